"""`escalate=("tile",)`: position-wise modules run in tiles, with exact gradients."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from elastic_mbs import Escalated, Event, MemoryBudget
from elastic_mbs.escalation import tile
from elastic_mbs.escalation.position_wise import MOST, PositionWise, may_be_position_wise
from elastic_mbs.rollback.random_streams import RandomStreams
from elastic_mbs.testing import InjectOOM
from stress.reference.state import error_of
from tests.helpers.steps import elastic, grads, through, whole_gradient
from tests.helpers.strikes import every_operation

WIDTH, LENGTH = 6, 13


class Gated(nn.Module):
    """The MLP of a llama."""

    def __init__(self, width: int = WIDTH, hidden: int = 4 * WIDTH) -> None:
        super().__init__()
        self.gate = nn.Linear(width, hidden, bias=False)
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)
        self.act = nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.down(self.act(self.gate(x)) * self.up(x))
        return found


class Made(nn.Module):
    """A module of a function, with two weights."""

    def __init__(self, function: Callable[[Any, Tensor], Any], **more: Any) -> None:
        super().__init__()
        self.function = function
        self.one, self.two = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        for name, value in more.items():
            setattr(self, name, value)

    def forward(self, x: Tensor) -> Any:
        return self.function(self, x)


def mlp(m: Any, x: Tensor) -> Tensor:
    found: Tensor = m.two(m.one(x).sin())
    return found


def routed(m: Any, x: Tensor) -> Tensor:
    """Send each position to one of two experts."""
    rows = x.flatten(0, -2)
    chosen = m.router(rows).argmax(-1)
    out = torch.zeros_like(rows)
    for number, expert in enumerate(m.experts):
        (at,) = (chosen == number).nonzero(as_tuple=True)
        out = out.index_add(0, at, expert(rows[at]))
    found: Tensor = out.view_as(x)
    return found


def counts(m: Any, x: Tensor) -> Tensor:
    m.runs += 1
    found: Tensor = mlp(m, x) / m.runs
    return found


def remembers(m: Any, x: Tensor) -> Tensor:
    m.seen.append(x.shape)
    return mlp(m, x)


class Balanced(torch.autograd.Function):
    """A penalty that is the same for every call, as those of experts."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(weight)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad, torch.ones_like(ctx.saved_tensors[0])


def zero(layer: nn.Module) -> nn.Module:
    for parameter in layer.parameters():
        nn.init.zeros_(parameter)
    return layer


def hooked(module: nn.Module) -> nn.Module:
    module.register_forward_hook(lambda *_: None)
    return module


POSITION_WISE: dict[str, Callable[[], nn.Module]] = {
    "gated": Gated,
    "sequential": lambda: nn.Sequential(nn.Linear(WIDTH, 9), nn.GELU(), nn.Linear(9, WIDTH)),
    "residual": lambda: Made(lambda m, x: x + mlp(m, x)),
    "normalised over features": lambda: Made(
        lambda m, x: m.two(functional.rms_norm(m.one(x), (12,)))
    ),
    "more features": lambda: Made(lambda m, x: m.one(x).exp()),
    "routed": lambda: Made(
        routed,
        router=nn.Linear(WIDTH, 2),
        experts=nn.ModuleList([Gated(), Gated()]),
    ),
    "tied": lambda: Made(lambda m, x: functional.linear(m.one(x).tanh(), m.one.weight.T)),
    "frozen": lambda: Made(mlp).requires_grad_(False),
    "dropout of nothing": lambda: nn.Sequential(Gated(), nn.Dropout(0.0)),
}

REFUSED: dict[str, Callable[[], nn.Module]] = {
    "attention": lambda: Made(
        lambda m, x: functional.scaled_dot_product_attention(x, x, x) + mlp(m, x)
    ),
    "convolution": lambda: Made(
        lambda m, x: mlp(m, x) + m.conv(x.mT).mT, conv=nn.Conv1d(WIDTH, WIDTH, 3, padding=1)
    ),
    "convolution of zeros": lambda: Made(
        lambda m, x: mlp(m, x) + m.conv(x.mT).mT,
        conv=zero(nn.Conv1d(WIDTH, WIDTH, 3, padding=1)),
    ),
    "running sum": lambda: Made(lambda m, x: mlp(m, x.cumsum(-2))),
    "mean over positions": lambda: Made(lambda m, x: mlp(m, x - x.mean(-2, keepdim=True))),
    "places": lambda: Made(lambda m, x: mlp(m, x + torch.arange(x.shape[-2])[:, None])),
    "the last position": lambda: Made(lambda m, x: mlp(m, x) + x[..., -1:, :] * 1e-6),
    "dropout": lambda: nn.Sequential(Gated(), nn.Dropout(0.1)),
    "noise of the host": lambda: Made(lambda m, x: mlp(m, x) * random.random()),
    "buffer": lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)),
    "batch statistics": lambda: nn.Sequential(
        nn.Linear(WIDTH, WIDTH), nn.Flatten(0, 1), nn.BatchNorm1d(WIDTH, track_running_stats=False)
    ),
    "hook": lambda: hooked(Gated()),
    "hook inside": lambda: nn.Sequential(hooked(nn.Linear(WIDTH, WIDTH)), nn.Tanh()),
    "counter": lambda: Made(counts, runs=0),
    "list": lambda: Made(remembers, seen=[]),
    "edits its input": lambda: Made(lambda m, x: mlp(m, x.clone().sin_()) + mlp(m, x.mul_(2))),
    "two outputs": lambda: Made(lambda m, x: (mlp(m, x), x)),
    "fewer positions": lambda: Made(lambda m, x: mlp(m, x)[..., 1:, :]),
    "a tensor beside": lambda: Made(lambda m, x: mlp(m, x) * m.scale, scale=torch.ones(1)),
    "another module beside": lambda: Made(mlp, others=[Gated()]),
    "a penalty in backward": lambda: Made(
        lambda m, x: Balanced.apply(mlp(m, x), m.one.weight)  # type: ignore[no-untyped-call]
    ),
    "whole numbers": lambda: Made(lambda m, x: mlp(m, x).long()),
}


def kept(module: nn.Module, shape: tuple[int, ...] = (3, LENGTH, WIDTH)) -> object:
    module.double()
    if not all(map(may_be_position_wise, module.modules())):
        return None
    input = torch.randn(shape, dtype=torch.float64)
    return PositionWise().kept(module, input, RandomStreams((), ()))


@pytest.mark.parametrize("name", POSITION_WISE)
def test_a_position_wise_module_is_found(name: str) -> None:
    before = torch.get_rng_state()
    module = POSITION_WISE[name]()
    values = {key: value.clone() for key, value in module.double().state_dict().items()}
    torch.set_rng_state(before)
    input = torch.randn(3, LENGTH, WIDTH, dtype=torch.float64)
    state = torch.get_rng_state()
    verdict = PositionWise().kept(module, input, RandomStreams((), ()))
    assert verdict is not None
    assert verdict.inside > 0
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(values[key], value) for key, value in module.state_dict().items())
    assert kept(module, (LENGTH, WIDTH)) is not None
    assert kept(module.half()) is not None


@pytest.mark.parametrize("name", REFUSED)
def test_any_other_module_is_refused(name: str) -> None:
    state, host = torch.get_rng_state(), random.getstate()
    module = REFUSED[name]()
    torch.set_rng_state(state)
    torch.randn(3, LENGTH, WIDTH, dtype=torch.float64)
    state = torch.get_rng_state()
    torch.set_rng_state(state)
    assert kept(module) is None
    assert random.getstate() == host
    if name == "list":
        assert module.seen == []


@pytest.mark.parametrize("name", [*POSITION_WISE, *REFUSED])
def test_a_trial_leaves_no_tensor_alive(name: str) -> None:
    # Autograd saves outputs of tanh, exp and max: a hook that keeps one itself keeps its node.
    module = {**POSITION_WISE, **REFUSED}[name]()
    kept(module)
    before = tensors_alive()
    kept(module)
    assert tensors_alive() == before


def tensors_alive() -> int:
    gc.collect()
    return sum(issubclass(type(each), Tensor) for each in gc.get_objects())


def test_modules_of_one_structure_are_tried_once_and_others_by_themselves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tried: list[nn.Module] = []
    monkeypatch.setattr(
        "elastic_mbs.escalation.position_wise._tried", lambda module, *_: tried.append(module)
    )
    verdicts, streams = PositionWise(), RandomStreams((), ())
    modules = [Gated(), Gated(), Gated(hidden=7), Made(mlp), Made(mlp), Made(mlp, flag=True)]
    for module in (*modules, *modules):
        verdicts.kept(module, torch.randn(1, 5, WIDTH), streams)
    assert tried == [modules[0], modules[2], modules[3], modules[5]]
    modules[0].eval()
    verdicts.kept(modules[0], torch.randn(1, 5, WIDTH), streams)
    assert len(tried) == 5


def test_a_module_that_is_another_in_each_call_is_left_alone_after_a_few_trials() -> None:
    verdicts, streams, module = PositionWise(), RandomStreams((), ()), Made(mlp, calls=0)
    input = torch.randn(1, 5, WIDTH)
    found = []
    for calls in range(3 * MOST):
        module.calls = calls  # type: ignore[assignment]
        found.append(verdicts.kept(module, input, streams))
    assert len(verdicts._verdicts) == MOST
    assert all(found[:MOST])
    assert not any(found[MOST:])
    module.calls = 0  # type: ignore[assignment]
    assert verdicts.kept(module, input, streams) == found[0]
    assert verdicts.kept(Made(mlp, calls=3 * MOST), input, streams) is not None


# ---------------------------------------------------------------------- training in tiles


class Block(nn.Module):
    """A sum over earlier positions and an MLP, each added to its input."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.feed_forward = Gated(width, hidden)

    def forward(self, x: Tensor) -> Tensor:
        x = x + x.cumsum(-2).tanh()
        found: Tensor = x + self.feed_forward(self.norm(x))
        return found


def blocks(count: int = 2, width: int = WIDTH, hidden: int = 4 * WIDTH) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Block(width, hidden) for _ in range(count))).double()


def samples(count: int = 2, length: int = LENGTH, width: int = WIDTH) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(count, length, width, dtype=torch.float64, generator=generator)


def loss_of(model: nn.Module) -> Callable[[Tensor], Tensor]:
    return lambda x: model(x).square().mean()


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the smallest modules in tiles, too, and in few of them."""
    monkeypatch.setattr(tile, "SMALL", 0)
    monkeypatch.setattr(tile, "FEWEST", 2)
    monkeypatch.setattr(tile, "WORTH", 1)


def tiled(
    model: nn.Module, batch: Tensor, door: int = 1, *, escalate: tuple[str, ...] = ("tile",)
) -> tuple[Any, Callable[[Tensor], Tensor]]:
    """Return a runtime that has all rungs in use, and its loss function."""
    events: list[Event] = []
    run = loss_of(model)

    def loss_fn(piece: Tensor) -> Tensor:
        if not any(isinstance(event, Escalated) and event.by == escalate[-1] for event in events):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB.")
        return run(piece)

    mbs = elastic(model, escalate=escalate, on_event=events.append)
    through(door, mbs, loss_fn, batch)
    model.zero_grad()
    return mbs, loss_fn


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("door", [1, 3])
@pytest.mark.parametrize(
    "escalate", [("tile",), ("checkpoint", "tile"), ("tile", "checkpoint", "offload")]
)
def test_oom_at_any_operation_in_tiles_changes_nothing(
    door: int, escalate: tuple[str, ...]
) -> None:
    model, batch = blocks(), samples(2, 6)
    wanted = whole_gradient(model, lambda twin: loss_of(twin)(batch))
    mbs, loss_fn = tiled(model, batch, door, escalate=escalate)
    state = torch.get_rng_state()
    for strike in every_operation(stride=23 if len(escalate) == 1 and door == 1 else 53):
        with strike:
            through(door, mbs, loss_fn, batch)
        assert error_of(grads(model), wanted) <= 1e-12, strike.hits
        assert torch.equal(torch.get_rng_state(), state)
        model.zero_grad()
    assert all("forward" not in vars(module) for module in model.modules())


@pytest.mark.usefixtures("small")
def test_memory_that_runs_out_in_a_trial_is_no_verdict() -> None:
    model, batch = blocks(1), samples(1)
    mbs, loss_fn = tiled(model, batch)
    profile = next(iter(mbs._calls._knowledge._profiles.values()))[1]
    verdicts = profile.position_wise._verdicts
    known = dict(verdicts)
    assert any(verdict is not None for verdict in known.values())
    wanted = whole_gradient(model, lambda twin: loss_of(twin)(batch))
    for at in range(1, 40, 3):
        verdicts.clear()
        with InjectOOM(at=[at]) as strike:
            mbs.backward(loss_fn, batch)
        assert strike.hits
        assert verdicts == known
        assert error_of(grads(model), wanted) <= 1e-12
        model.zero_grad()


def test_a_long_sample_trains_in_a_quarter_of_its_memory() -> None:
    model, x = blocks(2, 16, 512), samples(1, 512, 16)
    events: list[Event] = []
    wanted = whole_gradient(model, lambda twin: loss_of(twin)(x))
    with MemoryBudget("1GiB", track=(model, x)) as budget:
        before = budget.live
        loss_of(model)(x).backward()
        gradients = sum(parameter.nbytes for parameter in model.parameters())
        need = budget.peak - before - gradients
        model.zero_grad()
        mbs = elastic(model, escalate=("tile",), on_event=events.append, sensor=None)
        budget.limit = budget.live + gradients + need // 4
        result = mbs.backward(loss_of(model), x)
        found = grads(model)
    assert result.ooms == 2
    assert [event.by for event in events if isinstance(event, Escalated)] == ["tile"]
    assert error_of(found, wanted) <= 1e-12


@pytest.mark.usefixtures("small")
def test_tiles_are_as_long_in_backward_as_in_forward() -> None:
    # They are sized by the free memory, of which a backward has more.
    model, x = blocks(4, 16, 256), samples(1, 400, 16)
    wanted = whole_gradient(model, lambda twin: loss_of(twin)(x))
    for part in (10, 7, 5):
        with MemoryBudget("1GiB", track=(model, x)) as budget:
            before = budget.live
            loss_of(model)(x).backward()
            need = budget.peak - before
            model.zero_grad()
            mbs = elastic(model, escalate=("checkpoint", "tile"), sensor=None)
            budget.limit = budget.live + need // part + 2**20
            mbs.backward(loss_of(model), x)
            budget.limit = "1GiB"
            assert error_of(grads(model), wanted) <= 1e-12
            model.zero_grad()


class Late(nn.Module):
    """A module that draws where there are more positions than in a trial."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, 8 * WIDTH)
        self.probability = 0.5

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x).sin()
        if x.shape[-2] > 24:
            out = functional.dropout(out, self.probability)
            MASKS.append(out.detach().clone())
        return out.tanh()


MASKS: list[Tensor] = []


@pytest.mark.usefixtures("small")
def test_a_tile_draws_the_same_numbers_when_it_runs_again() -> None:
    model, x = nn.Sequential(Late()).double(), samples(1, 400)
    mbs, loss_fn = tiled(model, x)
    MASKS.clear()
    torch.manual_seed(3)
    mbs.backward(loss_fn, x)
    assert len(MASKS) == 2 * 2
    assert torch.equal(MASKS[0], MASKS[3])
    assert torch.equal(MASKS[1], MASKS[2])
    assert not torch.equal(MASKS[0], MASKS[1])


@pytest.mark.usefixtures("small")
def test_a_gradient_penalty_goes_through_tiles() -> None:
    model, one = blocks(1), samples(1)

    def penalised(piece: Tensor) -> Tensor:
        piece = piece.clone().requires_grad_()
        out: Tensor = model(piece).square().mean()
        (slope,) = torch.autograd.grad(out, piece, create_graph=True)
        return out + slope.square().mean()

    events: list[Event] = []

    def loss_fn(piece: Tensor) -> Tensor:
        if not any(isinstance(event, Escalated) for event in events):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB.")
        return penalised(piece)

    penalised(one).backward()
    wanted = grads(model)
    model.zero_grad()
    elastic(model, escalate=("tile",), on_event=events.append).backward(loss_fn, one)
    assert error_of(grads(model), wanted) <= 1e-12


def test_no_module_is_touched_before_the_floor(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: tile.TiledModules, *args: object) -> None:
        raise AssertionError

    monkeypatch.setattr(tile.TiledModules, "__init__", refuse)
    model, batch = blocks(1), samples(4)
    twin = blocks(1)
    mbs = elastic(model, escalate=("tile",), micro_batch_size=4)
    mbs.backward(loss_of(model), batch)
    loss_of(twin)(batch).backward()
    assert all(map(torch.equal, grads(model), grads(twin)))  # type: ignore[arg-type]


class Shared(nn.Module):
    """A position-wise module that its caller sets up anew for each use."""

    def __init__(self) -> None:
        super().__init__()
        self.part = Made(lambda m, x: m.two((m.scale * m.one(x)).sin()), scale=1.0)

    def forward(self, x: Tensor) -> Tensor:
        x = x + x.mean(-2, keepdim=True)
        part: Any = self.part
        for scale in (1.0, 2.0, 3.0):
            part.scale = scale
            x = x + part(x)
        return x


@pytest.mark.usefixtures("small")
def test_a_module_that_is_set_up_for_each_use_is_the_same_in_backward() -> None:
    torch.manual_seed(0)
    model, batch = Shared().double(), samples()
    wanted = whole_gradient(model, lambda twin: loss_of(twin)(batch))
    mbs, loss_fn = tiled(model, batch)
    mbs.backward(loss_fn, batch)
    assert error_of(grads(model), wanted) <= 1e-12


MIXES: dict[str, Callable[[Tensor], Tensor]] = {
    "attention": lambda x: functional.scaled_dot_product_attention(x, x, x),
    "attention after a norm": lambda x: functional.scaled_dot_product_attention(
        *(functional.layer_norm(x, x.shape[-1:]),) * 3
    ),
    "distances": lambda x: (-torch.cdist(x, x).square()).exp() @ x,
}


@pytest.mark.parametrize("name", MIXES)
def test_a_module_that_mixes_positions_which_are_alike_is_refused(name: str) -> None:
    width = 1024  # random positions are far apart: their attention to each other is below 1e-12

    class Mixing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(width))

        def forward(self, x: Tensor) -> Tensor:
            return MIXES[name](x) * self.scale

    assert kept(Mixing(), (2, LENGTH, width)) is None
