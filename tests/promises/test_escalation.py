"""`RecoveryOptions.escalate`: a sample that does not fit takes less memory, gradients unchanged."""

import copy
import pickle
import random
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from elastic_mbs import ElasticMBS, Escalated, Event, MicroBatchFloorError, ReplayUnsafeError
from elastic_mbs.escalation import offload
from elastic_mbs.escalation.checkpoint import CheckpointedBlocks, blocks_of
from elastic_mbs.rollback.random_streams import RandomStreams
from elastic_mbs.testing import InjectOOM
from stress.reference.state import error_of
from tests.helpers.room import PLENTY, Room
from tests.helpers.steps import Pair, elastic, grads, through
from tests.helpers.strikes import every_operation

pytestmark = pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype feature")

WIDTH = 16
WAYS = [("offload",), ("checkpoint",), ("checkpoint", "offload")]


def block(width: int = WIDTH) -> nn.Module:
    return nn.Sequential(
        nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Dropout(0.2)
    )


def deep(device: torch.device | str = "cpu", *more: nn.Module, blocks: int = 8) -> nn.Sequential:
    torch.manual_seed(0)
    return (
        nn.Sequential(
            nn.Linear(8, WIDTH),
            nn.Sequential(*(block() for _ in range(blocks)), *more),
            nn.Linear(WIDTH, 4),
        )
        .double()
        .to(device)
    )


def long_samples(device: torch.device | str = "cpu", samples: int = 4, length: int = 8) -> Pair:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(samples, length, 8, dtype=torch.float64, generator=generator)
    return x.to(device), torch.randn(
        samples, length, 4, dtype=torch.float64, generator=generator
    ).to(device)


def loss_of(model: nn.Module) -> Callable[[Pair], Tensor]:
    return lambda batch: (model(batch[0]) - batch[1]).square().mean()


def by_hand(
    model: nn.Module, batch: Pair, partition: tuple[tuple[int, int], ...]
) -> tuple[list[Tensor | None], Tensor]:
    """Return the gradients of a loop by hand from the seed, and the random stream after it."""
    model.zero_grad()
    torch.manual_seed(5)
    for start, stop in partition:
        (
            loss_of(model)((batch[0][start:stop], batch[1][start:stop]))
            * ((stop - start) / len(batch[0]))
        ).backward()
    found = grads(model)
    model.zero_grad()
    return found, stream(batch[0].device)


def stream(device: torch.device) -> Tensor:
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def need_of_one(room: Room, model: nn.Module, batch: Pair) -> int:
    """Return the bytes that a step on one sample needs once libraries have their workspaces."""
    loss_of(model)(batch).backward()
    model.zero_grad()
    need = room.need(lambda: loss_of(model)((batch[0][:1], batch[1][:1])).backward())
    model.zero_grad()
    return need


def ways_of(events: list[Event]) -> list[str]:
    """Return the rungs that were put in use, each once."""
    return list(dict.fromkeys(event.by for event in events if isinstance(event, Escalated)))


def all_in_use(events: list[Event], escalate: tuple[str, ...]) -> bool:
    """Return whether the last rung is in use, with all of its blocks."""
    steps = [event for event in events if isinstance(event, Escalated)]
    if not steps or steps[-1].by != escalate[-1]:
        return False
    part = steps[-1].part.split()  # "2 of 8 blocks"
    return not part or part[0] == part[2]


def escalated(
    model: nn.Module, escalate: tuple[str, ...], batch: Pair, door: int = 1, **options: Any
) -> tuple[ElasticMBS, Callable[[Pair], Tensor]]:
    """Return a runtime that has all of `escalate` in use, and its loss function.

    In its first batch no sample fitted until then.
    """
    events: list[Event] = []
    run = loss_of(model)

    def loss_fn(piece: Pair) -> Tensor:
        if not all_in_use(events, escalate):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB.")
        return run(piece)

    mbs = elastic(model, escalate=escalate, on_event=events.append, **options)
    through(door, mbs, loss_fn, batch)
    assert ways_of(events) == list(escalate)
    model.zero_grad()
    return mbs, loss_fn


# ---------------------------------------------------------------------- training goes on


@pytest.mark.parametrize("escalate", WAYS)
def test_a_model_whose_single_sample_does_not_fit_trains_exactly(
    device: torch.device, escalate: tuple[str, ...]
) -> None:
    model, batch = deep(device), long_samples(device, 2, 2**15 if device.type == "cuda" else 2**10)
    events: list[Event] = []
    with Room(device, model) as room:
        need = need_of_one(room, model, batch)
        room.allow(int(0.5 * need if len(escalate) == 1 else 0.25 * need))
        with pytest.raises(MicroBatchFloorError, match=r'escalate="auto"'):
            elastic(model).backward(loss_of(model), batch)
        mbs = elastic(model, escalate=escalate, on_event=events.append)
        torch.manual_seed(5)
        result = mbs.backward(loss_of(model), batch)
        found, after = grads(model), stream(device)
        model.zero_grad()
        assert ways_of(events) == list(escalate)
        assert result.partition == ((0, 1), (1, 2))
        assert mbs.backward(loss_of(model), batch).ooms == 0
        room.allow(PLENTY)
        wanted, wanted_after = by_hand(model, batch, result.partition)
        assert error_of(found, wanted) <= 1e-12
        assert torch.equal(after, wanted_after)


def test_sizes_grow_again_with_what_fits_now(device: torch.device) -> None:
    model, batch = deep(device), long_samples(device, 8, 2**14 if device.type == "cuda" else 2**10)
    with Room(device, model) as room:
        need = need_of_one(room, model, batch)
        room.allow(int(0.9 * need))
        growing = {
            "grow": True,
            "patience": 1,
            "jitter": 0.0,
            "cooldown": 0.0,
            "min_gain": 0.0,
            "margin": 0.0,
            "sensor": None,
        }
        with elastic(model, escalate=("offload",), **growing) as mbs:
            sizes = []
            for _ in range(8):
                sizes.append(mbs.backward(loss_of(model), batch).micro_batch_size)
                model.zero_grad()
    assert sizes[0] == 1
    assert max(sizes) > 1


@pytest.mark.parametrize("door", [1, 3])
@pytest.mark.parametrize("escalate", WAYS)
def test_oom_at_any_operation_while_escalated_changes_nothing(
    monkeypatch: pytest.MonkeyPatch, door: int, escalate: tuple[str, ...]
) -> None:
    monkeypatch.setattr(offload, "SMALL", 64)
    model, batch = deep(blocks=2), long_samples(length=2)
    mbs, loss_fn = escalated(model, escalate, batch, door, micro_batch_size=2)
    for strike in every_operation(stride=29):
        torch.manual_seed(5)
        with strike:
            result = through(door, mbs, loss_fn, batch)
        found, after = grads(model), torch.get_rng_state()
        wanted, wanted_after = by_hand(model, batch, result.partition)
        assert error_of(found, wanted) <= 1e-12, strike.hits
        assert torch.equal(after, wanted_after), strike.hits


# ---------------------------------------------------------------------- limits


def test_an_evaluation_is_not_escalated_and_the_ways_tried_are_named() -> None:
    model, batch = deep(blocks=2), long_samples()
    events: list[Event] = []
    mbs = elastic(model, escalate=("checkpoint", "offload"), on_event=events.append)
    with InjectOOM(always_from=2), pytest.raises(MicroBatchFloorError, match="does not fit\\. "):
        mbs.evaluate(lambda piece: model(piece[0]), batch)
    assert not ways_of(events)
    with (
        InjectOOM(always_from=20),
        pytest.raises(
            MicroBatchFloorError, match=r"not even with checkpoint \(3 of 3 blocks\) and offload"
        ),
    ):
        mbs.backward(loss_of(model), batch)
    assert ways_of(events) == ["checkpoint", "offload"]


def test_only_tensors_that_nobody_else_keeps_go_to_the_host(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gone: list[Tensor] = []
    slot = offload.HostSlot

    def seen(tensor: Tensor, way: Any) -> Any:
        gone.append(tensor.detach())
        return slot(tensor, way)

    monkeypatch.setattr(offload, "HostSlot", seen)
    model, batch = deep(blocks=1), long_samples(samples=2, length=256)
    mbs, loss_fn = escalated(model, ("offload",), batch)
    gone.clear()
    mbs.backward(loss_fn, batch)
    kept = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *batch)}
    assert gone
    assert all(tensor.nbytes >= offload.SMALL for tensor in gone)
    assert not kept & {tensor.untyped_storage().data_ptr() for tensor in gone}


@pytest.mark.parametrize(
    "layer",
    [lambda: nn.BatchNorm1d(8), lambda: parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))],
)
def test_a_block_that_changes_its_buffers_is_not_checkpointed_but_refused(
    layer: Callable[[], nn.Module],
) -> None:
    # A second run in backward would change the buffers twice for each piece.
    model, batch = deep("cpu", layer()), long_samples()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ReplayUnsafeError, match="changes its buffer"):
        escalated(model, ("checkpoint",), batch)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    escalated(model, ("offload",), batch)


def test_a_checkpointed_block_draws_once_from_the_hosts_streams() -> None:
    inner = nn.Linear(WIDTH, WIDTH)
    inner.register_forward_hook(lambda module, given, out: torch.tanh(out) * random.random())
    model, batch = deep("cpu", nn.Sequential(inner)), long_samples()
    mbs, loss_fn = escalated(model, ("checkpoint",), batch)
    torch.manual_seed(5)
    random.seed(5)
    result = mbs.backward(loss_fn, batch)
    found, after = grads(model), random.getstate()
    random.seed(5)
    assert error_of(found, by_hand(model, batch, result.partition)[0]) <= 1e-12
    assert random.getstate() == after


def test_forwards_are_the_users_own_again_after_the_call() -> None:
    model, batch = deep(), long_samples()
    blocks, calls = blocks_of(model.modules()), list[str]()
    own = blocks[0].forward

    def patched(x: Tensor) -> Tensor:
        calls.append("own")
        return own(x)  # type: ignore[no-any-return]  # a tensor

    blocks[0].forward = patched
    mbs, loss_fn = escalated(model, ("checkpoint",), batch, micro_batch_size=4)
    calls.clear()
    mbs.backward(loss_fn, batch)
    assert len(calls) == 2 * 4  # forward and again in backward, for each sample
    with pytest.raises(MicroBatchFloorError), InjectOOM(always_from=20):
        mbs.backward(loss_fn, batch)
    assert blocks[0].forward is patched
    assert all("forward" not in vars(each) for each in blocks[1:])


def test_a_model_that_offers_checkpointing_is_asked_for_it_while_it_runs() -> None:
    # as models of transformers offer it
    model, batch, calls = deep(blocks=1), long_samples(), list[str]()
    model.register_forward_hook(lambda *_: calls.append("ran"))
    vars(model)["gradient_checkpointing_enable"] = lambda gradient_checkpointing_kwargs: (
        calls.append("on")
    )
    vars(model)["gradient_checkpointing_disable"] = lambda: calls.append("off")
    mbs, _ = escalated(model, ("checkpoint",), batch)
    assert calls == ["on", "ran", "off"] * 4
    mbs.backward(lambda piece: loss_of(model)(piece), batch)
    assert calls[12:] == ["ran"]


class Offering(nn.Sequential):
    """A model that offers checkpointing and leaves traces of it behind, as transformers' do."""

    checkpointing: Any = None

    def gradient_checkpointing_enable(self, gradient_checkpointing_kwargs: Any) -> None:
        for module in self:
            vars(module)["checkpointing"] = partial(checkpoint, **gradient_checkpointing_kwargs)
        self.hook = self[0].register_forward_hook(lambda module, given, out: out.sin())

    def gradient_checkpointing_disable(self) -> None:
        for module in self:
            vars(module)["checkpointing"] = None


def test_a_model_that_was_asked_to_checkpoint_is_as_before_after_the_call() -> None:
    inner = Offering(nn.Linear(8, WIDTH), Offering(nn.Linear(WIDTH, WIDTH)), nn.Linear(WIDTH, 4))
    model, batch = inner.double(), long_samples()
    own = model[0].register_forward_hook(lambda module, given, out: out)
    ElasticMBS.of(model)  # the place of the runtime stays

    def state() -> list[dict[str, Any]]:
        return [{**vars(module), "_elastic_mbs": None} for module in model.modules()]

    before = state()
    hooks = [dict(module._forward_hooks) for module in model.modules()]
    escalated(model, ("checkpoint",), batch)
    assert state() == before
    assert [dict(module._forward_hooks) for module in model.modules()] == hooks
    own.remove()
    pickle.dumps(model)


class Annealed(nn.Module):
    """A block that counts its runs: each adds less than the one before."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.runs: int | None = None
        self.table: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.runs = 1 if self.runs is None else self.runs + 1
        if self.table is None:
            self.table = torch.ones(WIDTH, dtype=torch.float64)
        return x + torch.tanh(self.inner(x) * self.table) / self.runs


def test_a_number_that_a_block_counts_is_the_same_when_it_runs_again() -> None:
    blocks = [Annealed(), Annealed()]
    model, batch = deep("cpu", *blocks, blocks=0), long_samples()
    twin = copy.deepcopy(model)
    mbs, loss_fn = escalated(model, ("checkpoint",), batch)
    for block in blocks:
        block.runs, block.table = None, None
    result = mbs.backward(loss_fn, batch)
    assert len(result.partition) == 4
    found = grads(model)
    assert error_of(found, by_hand(twin, batch, result.partition)[0]) <= 1e-12
    assert [block.runs for block in blocks] == [4, 4]
    assert all(block.table is not None for block in blocks)


class Freely(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, *, run: float, block: float, module: float) -> Tensor:
        out: Tensor = x + self.layer(x).tanh() * (run + block + module)
        return out


def test_a_block_names_its_arguments_as_it_likes() -> None:
    torch.manual_seed(0)
    blocks = nn.ModuleList([Freely(), Freely()]).double()
    x = torch.randn(3, WIDTH, dtype=torch.float64)

    def loss_of(x: Tensor) -> Tensor:
        for each in blocks:
            x = each(x, run=1.0, block=2.0, module=3.0)
        return x.square().mean()

    loss_of(x).backward()
    wanted = grads(blocks)
    blocks.zero_grad()
    with CheckpointedBlocks([blocks], RandomStreams([], [])):
        loss_of(x).backward()
    assert error_of(grads(blocks), wanted) == 0


def test_a_gradient_penalty_goes_through_checkpointed_blocks() -> None:
    model, (x, _) = deep(blocks=3), long_samples()
    ready: list[Event] = []

    def penalised(piece: Tensor) -> Tensor:
        piece = piece.clone().requires_grad_()
        out: Tensor = model(piece)
        (slope,) = torch.autograd.grad(out.sum(), piece, create_graph=True)
        penalty: Tensor = (slope.norm(dim=-1) - 1).square().mean()
        return out.square().mean() + penalty

    def loss_fn(piece: Tensor) -> Tensor:
        if not ways_of(ready):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB.")
        return penalised(piece)

    mbs = elastic(model, escalate=("checkpoint",), on_event=ready.append)
    torch.manual_seed(5)
    result = mbs.backward(loss_fn, x)
    found = grads(model)
    model.zero_grad()
    torch.manual_seed(5)
    for start, stop in result.partition:
        (penalised(x[start:stop]) / len(x)).backward()
    assert error_of(found, grads(model)) <= 1e-12


def test_the_blocks_are_the_children_of_the_longest_list() -> None:
    inner = nn.ModuleList([nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)) for _ in range(3)])
    assert blocks_of(
        nn.ModuleList([inner, nn.Sequential(*[nn.ReLU() for _ in range(9)])]).modules()
    ) == list(inner)
    model = nn.Sequential(nn.Embedding(1000, 4), inner, nn.Linear(4, 1000))
    # Of two lists of the same length, the one with more parameters counts.
    assert blocks_of(model.modules()) == list(model)
    assert blocks_of([nn.Linear(1, 1)]) == []
