"""The path of a known loss function, on which no hook tells what has committed."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from elastic_mbs import BackwardInsideError, ElasticMBS, GradientsChangedError, OptimizerInBackwardError, OutOfMemory
from elastic_mbs.commits import CommitLog
from elastic_mbs.events import Event
from elastic_mbs.testing import InjectOOM
from tests.helpers.interrupts import interrupt_at
from tests.helpers.steps import cross_entropy, elastic, mlp, off_by, pairs, still_works, through, whole_gradient

pytestmark = pytest.mark.no_oom_injection

DOORS = [1, 3]


def settled(model: nn.Module, loss_fn: Callable[..., Any], batch: Any, door: int, **options: Any) -> ElasticMBS:
    """A runtime that has seen two clean calls."""
    mbs = elastic(model, grow=False, **{"micro_batch_size": 3, **options})
    for _ in range(2):
        through(door, mbs, loss_fn, batch)
    model.zero_grad()
    return mbs


def hooks_on(model: nn.Module) -> int:
    return sum(len(leaf._post_accumulate_grad_hooks or ()) for leaf in model.parameters())


@pytest.mark.parametrize("door", DOORS)
def test_hooks_leave_the_model_once_its_gradients_tell_the_same_and_come_back_with_a_failure(door: int) -> None:
    model, batch = mlp(), pairs()
    leaves = len(list(model.parameters()))
    mbs = elastic(model, grow=False, micro_batch_size=3)
    assert hooks_on(model) == leaves
    through(door, mbs, cross_entropy(model), batch)
    assert hooks_on(model) == leaves
    through(door, mbs, cross_entropy(model), batch)
    assert hooks_on(model) == 0
    with InjectOOM(at=[12]) as inject:
        through(door, mbs, cross_entropy(model), batch)
    assert len(inject.hits) == 1
    assert hooks_on(model) == leaves
    through(door, mbs, cross_entropy(model), batch)
    assert hooks_on(model) == 0
    mbs.close()
    assert hooks_on(model) == 0


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("filled", [False, True])
@pytest.mark.parametrize("times", [1, 2])
def test_a_failure_at_any_operation_of_a_known_step_function_leaves_the_whole_batchs_gradient(door: int, filled: bool, times: int) -> None:
    model, batch = mlp(), pairs()
    loss_fn = cross_entropy(model)
    wanted = whole_gradient(model, lambda twin: cross_entropy(twin)(batch))
    events: list[Event] = []
    mbs = settled(model, loss_fn, batch, door, on_event=events.append)
    state = mbs.state_dict()
    at, clean = 0, False
    while not clean:
        at += 1
        model.zero_grad()
        through(door, mbs, loss_fn, batch)  # clean: the hooks are off again
        assert hooks_on(model) == 0
        model.zero_grad(set_to_none=not filled)
        mbs.load_state_dict(state)
        with InjectOOM(at=range(at, at + times)) as inject:
            through(door, mbs, loss_fn, batch)
        assert off_by(model, wanted) <= 1e-12
        clean = not inject.hits
    assert at > 40
    assert {event.mode for event in events if isinstance(event, OutOfMemory)} == {"piece"}
    assert any(event.committed for event in events if isinstance(event, OutOfMemory))


def flat_gradients(model: nn.Module) -> None:
    """Gradients that are views of one buffer."""
    parameters = list(model.parameters())
    buffer, at = torch.zeros(sum(p.numel() for p in parameters), dtype=parameters[0].dtype), 0
    for p in parameters:
        p.grad = buffer[at : at + p.numel()].view_as(p)
        at += p.numel()


@pytest.mark.parametrize("door", DOORS)
def test_gradients_that_are_views_of_one_buffer_keep_the_hooks_and_are_exact_wherever_memory_runs_out(door: int) -> None:
    model, batch = mlp(), pairs()
    loss_fn = cross_entropy(model)
    wanted = whole_gradient(model, lambda twin: cross_entropy(twin)(batch))
    mbs = settled(model, loss_fn, batch, door)
    for at in range(1, 45):
        flat_gradients(model)
        with InjectOOM(at=[at]):
            through(door, mbs, loss_fn, batch)
        assert hooks_on(model) == len(list(model.parameters()))
        assert off_by(model, wanted) <= 1e-12


@pytest.mark.parametrize("door", DOORS)
def test_gradients_that_come_to_share_memory_in_the_middle_of_a_batch_are_not_trusted_to_tell_what_committed(door: int) -> None:
    """Two leaves of one element get the seed itself for their gradient: one tensor, seen through two views."""

    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.apart = True
            self.a, self.b, self.w = (nn.Parameter(torch.ones(1, dtype=torch.float64)) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            late = (x * self.w).exp().mean()  # made first, so its backward comes last
            a, b = (leaf.view(()) * 2 if self.apart else leaf.view(()) for leaf in (self.a, self.b))
            return a + b + late

    events: list[Event] = []
    batch = torch.linspace(0, 1, 8, dtype=torch.float64)
    wanted = [torch.ones(1, dtype=torch.float64)] * 2 + [(batch * batch.exp()).mean().reshape(1)]  # w is one
    for at in range(1, 45):
        model = Sum()
        mbs = settled(model, model, batch, door, on_event=events.append)
        through(door, mbs, model, batch)
        model.zero_grad()
        model.apart = False
        with InjectOOM(at=[at]):
            through(door, mbs, model, batch)
        assert off_by(model, [*wanted]) <= 1e-12
    modes = [(event.start, event.mode) for event in events if isinstance(event, OutOfMemory) and event.committed]
    # Once a piece has made them in one place, they are separated, and hooks are back and tell again.
    assert {(0, "step"), (3, "piece"), (6, "piece")} == set(modes)


def test_the_gradients_that_a_replay_has_dropped_are_not_kept_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = mlp(), pairs()
    mbs = settled(model, cross_entropy(model), batch, 1)
    held: list[weakref.ref[Tensor]] = []
    alive: list[int] = []

    def loss_fn(piece: tuple[Tensor, Tensor]) -> Tensor:
        if len(held) == 2:
            gc.collect()
            alive.append(sum(reference() is not None for reference in held))
        loss: Tensor = cross_entropy(model)(piece)
        leaf = next(model.parameters())
        if leaf.grad is not None and len(held) < 2:
            held.append(weakref.ref(leaf.grad))
            if len(held) == 2:
                raise MemoryError  # in forward; the batch goes on
        return loss

    monkeypatch.setattr("elastic_mbs.recovery._why_from_the_start", lambda call, failure: "the test says so")
    for _ in range(2):
        mbs.backward(loss_fn, batch)
        held.clear()
        model.zero_grad()
    alive.clear()
    mbs.backward(loss_fn, batch)
    assert alive
    assert alive[0] == 0


def own_backward(model: nn.Module, x: Tensor) -> None:
    model(x).sum().backward()


def clearing(model: nn.Module, x: Tensor) -> None:
    model.zero_grad()


def zeroing(model: nn.Module, x: Tensor) -> None:
    model.zero_grad(set_to_none=False)


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("mistake", [own_backward, clearing, zeroing])
def test_a_known_step_function_that_starts_to_touch_gradients_is_refused(mistake: Callable[[nn.Module, Tensor], None], door: int) -> None:
    model, batch = mlp(), pairs()
    makes_it = [False]

    def loss_fn(piece: tuple[Tensor, Tensor]) -> Tensor:
        if makes_it[0]:
            mistake(model, piece[0])
        loss: Tensor = cross_entropy(model)(piece)
        return loss

    mbs = settled(model, loss_fn, batch, door)
    makes_it[0] = True
    with pytest.raises((BackwardInsideError, GradientsChangedError), match=r"backward\(\)"):
        through(door, mbs, loss_fn, batch)
    assert all(leaf.grad is None for leaf in model.parameters())
    makes_it[0] = False
    assert still_works(mbs, model)


@pytest.mark.parametrize("door", DOORS)
def test_gradients_may_be_cleared_before_the_first_piece(door: int) -> None:
    model, batch = mlp(), pairs()

    def loss_fn(piece: tuple[Tensor, Tensor]) -> Tensor:
        model.zero_grad()
        loss: Tensor = cross_entropy(model)(piece)
        return loss

    mbs = settled(model, loss_fn, batch, door, micro_batch_size=8)
    through(door, mbs, loss_fn, batch)
    through(door, mbs, loss_fn, batch)
    assert off_by(model, whole_gradient(model, lambda twin: cross_entropy(twin)(batch))) <= 1e-12


@pytest.mark.parametrize("door", DOORS)
def test_a_hook_that_steps_inside_backward_is_noticed_although_it_came_when_the_step_function_was_known(door: int) -> None:
    model, batch = mlp(), pairs()
    mbs = settled(model, cross_entropy(model), batch, door)
    through(door, mbs, cross_entropy(model), batch)

    def let_go(leaf: Tensor) -> None:
        leaf.grad = None

    model.zero_grad()
    for leaf in model.parameters():
        leaf.register_post_accumulate_grad_hook(let_go)
    with pytest.raises(OptimizerInBackwardError):
        through(door, mbs, cross_entropy(model), batch)


def test_where_a_hook_writes_to_gradients_hooks_go_on_telling_what_committed() -> None:
    model, batch = mlp(), pairs()

    def write(leaf: Tensor) -> None:
        assert leaf.grad is not None
        leaf.grad.mul_(1.0)

    for leaf in model.parameters():
        leaf.register_post_accumulate_grad_hook(write)
    leaves = len(list(model.parameters()))
    mbs = settled(model, cross_entropy(model), batch, 1)
    through(1, mbs, cross_entropy(model), batch)
    assert hooks_on(model) == 2 * leaves
    wanted = whole_gradient(mlp(), lambda twin: cross_entropy(twin)(batch))
    assert off_by(model, wanted) <= 1e-12


@pytest.mark.parametrize("door", DOORS)
def test_a_backward_of_ones_own_between_two_batches_is_nobodys_mistake(door: int) -> None:
    """The hooks saw its commits, and the call after took them for its own step function's."""
    model, batch = mlp(), pairs()
    loss_fn = cross_entropy(model)
    mbs = elastic(model, grow=False, micro_batch_size=3)
    through(door, mbs, loss_fn, batch)
    loss_fn(batch).backward()
    model.zero_grad()
    with InjectOOM(at=[1]):
        through(door, mbs, loss_fn, batch)
    assert off_by(model, whole_gradient(model, lambda twin: cross_entropy(twin)(batch))) <= 1e-12


@pytest.mark.parametrize("door", DOORS)
def test_a_route_that_was_never_taken_is_learned_without_hooks(door: int) -> None:
    class Routed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used = [True, False, False]
            self.experts = nn.ModuleList(nn.Linear(4, 4).double() for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            chosen = [expert(x) for expert, use in zip(self.experts, self.used, strict=True) if use]
            return torch.stack(chosen).pow(2).mean()

    model, batch = Routed(), torch.randn(8, 4, dtype=torch.float64)
    mbs = settled(model, model, batch, door)
    for used in ([True, True, False], [False, True, True], [True, True, True], [False, False, True]):
        model.used = used
        for at in (None, 3, 9, 20, 31):
            model.zero_grad()
            with InjectOOM(at=[at] if at else []):
                through(door, mbs, model, batch)

            def whole(twin: nn.Module, used: list[bool] = used) -> Tensor:
                assert isinstance(twin, Routed)
                twin.used = used
                loss: Tensor = twin(batch)
                return loss

            assert off_by(model, whole_gradient(model, whole)) <= 1e-12


@pytest.mark.parametrize("at", range(1, 30, 4))
def test_an_error_of_the_users_own_passes_unchanged_and_leaves_no_gradient(at: int) -> None:
    model, batch = mlp(), pairs()
    mbs = settled(model, cross_entropy(model), batch, 1)
    mine = ValueError("mine")

    class Raise(InjectOOM):
        def step(self, name: str) -> None:
            self.count += 1
            if self.count == at:
                raise mine

    with pytest.raises(ValueError, match="mine") as caught, Raise():
        mbs.backward(cross_entropy(model), batch)
    assert caught.value is mine
    assert all(leaf.grad is None for leaf in model.parameters())
    assert still_works(mbs, model)


# ---------------------------------------------------------------------- gradients that autograd makes in one place


class Meeting(nn.Module):
    """Two leaves that meet in one addition, each through a view: autograd gives both the same memory for their gradient."""

    def __init__(self, apart: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.apart = apart
        self.a, self.b, self.w = (nn.Parameter(torch.randn(4, dtype=torch.float64)) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        late = (x * self.w).exp().mean()  # made first, so its backward comes last
        a, b = (leaf[None] * 2 if self.apart else leaf[None] for leaf in (self.a, self.b))
        return (x + (a + b)).pow(2).mean() + late


def rows(n: int = 8) -> Tensor:
    return torch.linspace(-1, 1, 4 * n, dtype=torch.float64).view(n, 4)


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("options", [{}, {"replay": "isolate"}, {"accumulate_dtype": torch.float32}])
def test_leaves_whose_gradients_autograd_makes_in_one_place_get_each_piece_once(door: int, options: dict[str, Any]) -> None:
    model, batch = Meeting(), rows()
    wanted = whole_gradient(model, lambda twin: twin(batch))
    mbs = elastic(model, micro_batch_size=3, **options)
    for _ in range(4):
        model.zero_grad()
        through(door, mbs, model, batch)
        assert off_by(model, wanted) <= 1e-12


def test_leaves_outside_the_model_whose_gradients_are_made_in_one_place_get_each_piece_once() -> None:
    model, batch = mlp(), pairs()
    weights = [torch.ones(1, dtype=torch.float64, requires_grad=True) for _ in range(2)]

    def loss_fn(piece: tuple[Tensor, Tensor]) -> Tensor:
        loss: Tensor = cross_entropy(model)(piece) + weights[0].squeeze() + weights[1].squeeze()
        return loss

    mbs = elastic(model, micro_batch_size=3)
    for _ in range(3):
        for weight in weights:
            weight.grad = None
        mbs.backward(loss_fn, batch)
        assert off_by(weights, [torch.ones(1, dtype=torch.float64)] * 2) <= 1e-12


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("settle", [0, 1, 2])
@pytest.mark.parametrize("apart", [False, True])
def test_gradients_in_one_place_are_exact_wherever_memory_runs_out(door: int, settle: int, apart: bool) -> None:
    """`apart`: they come to lie in one place only when the loss function is known."""
    batch = rows()
    wanted = whole_gradient(Meeting(), lambda twin: twin(batch))
    at, clean = 0, False
    while not clean:
        at += 1
        model = Meeting(apart)
        mbs = elastic(model, micro_batch_size=3)
        for _ in range(settle):
            through(door, mbs, model, batch)
        model.zero_grad()
        model.apart = False
        with InjectOOM(at=[at]) as inject:
            through(door, mbs, model, batch)
        assert off_by(model, wanted) <= 1e-12
        clean = not inject.hits
    assert at > 30


# ---------------------------------------------------------------------- what `loss.backward()` bears


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_call_from_where_no_graphs_are_made_accumulates_all_the_same_where_the_step_makes_its_own(door: int, mode: Callable[[], Any]) -> None:
    model, batch = mlp(), pairs()

    def loss_fn(piece: tuple[Tensor, Tensor]) -> Tensor:
        with torch.inference_mode(False), torch.enable_grad():
            loss: Tensor = cross_entropy(model)(tuple(part.clone() for part in piece))
            return loss

    wanted = whole_gradient(model, lambda twin: cross_entropy(twin)(batch))
    mbs = elastic(model, micro_batch_size=3)
    for closed in (True, False, True, True):
        model.zero_grad()
        with mode() if closed else torch.enable_grad():
            through(door, mbs, loss_fn, batch)
        assert off_by(model, wanted) <= 1e-12


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("filled", [False, True])
def test_a_custom_function_may_return_no_gradient_for_a_leaf(door: int, filled: bool) -> None:
    class NoneForTheSecond(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, threshold: Tensor) -> Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
            return grads[0] * 2, None

    model, batch = mlp(), pairs()
    model.register_parameter("threshold", nn.Parameter(torch.ones(4, dtype=torch.float64)))

    def loss_of(twin: nn.Module) -> Callable[[tuple[Tensor, Tensor]], Tensor]:
        assert isinstance(twin, nn.Sequential)
        apply: Callable[[Tensor, Any], Tensor] = NoneForTheSecond.apply
        return lambda piece: nn.functional.cross_entropy(apply(twin(piece[0]), twin.threshold), piece[1])

    wanted = whole_gradient(model, lambda twin: loss_of(twin)(batch))
    mbs = elastic(model, micro_batch_size=3)
    for at in (None, None, None, *range(1, 50, 3)):
        model.zero_grad()
        if filled:
            for leaf in model[0].parameters():
                leaf.grad = torch.zeros_like(leaf)
        with InjectOOM(at=[at] if at else []):
            through(door, mbs, loss_of(model), batch)
        assert model.threshold.grad is None
        assert off_by(model, wanted) <= 1e-12


@pytest.mark.parametrize("door", DOORS)
def test_a_gradient_that_autograd_cannot_write_to_stays_where_the_loss_does_not_reach(door: int) -> None:
    model, batch = mlp(), pairs()
    model.register_parameter("unused", nn.Parameter(torch.ones(2, dtype=torch.float64)))
    mbs = settled(model, cross_entropy(model), batch, door)
    with torch.inference_mode():
        model.unused.grad = torch.ones(2, dtype=torch.float64)
    for at in (None, 12, 20, None):
        for leaf in list(model.parameters()):
            if leaf is not model.unused:
                leaf.grad = None
        with InjectOOM(at=[at] if at else []):
            through(door, mbs, cross_entropy(model), batch)
        wanted = whole_gradient(model, lambda twin: cross_entropy(twin)(batch))
        assert model.unused.grad is not None
        assert off_by([leaf for leaf in model.parameters() if leaf is not model.unused], [grad for grad in wanted if grad is not None]) <= 1e-12


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("size", [3, 8])
def test_a_hook_that_clears_gradients_which_were_filled_is_noticed_in_the_first_piece(door: int, size: int) -> None:
    model, batch = mlp(), pairs()
    mbs = settled(model, cross_entropy(model), batch, door, micro_batch_size=size)
    through(door, mbs, cross_entropy(model), batch)

    def let_go(leaf: Tensor) -> None:
        leaf.grad = None

    for leaf in model.parameters():
        leaf.register_post_accumulate_grad_hook(let_go)
    with pytest.raises(OptimizerInBackwardError):
        through(door, mbs, cross_entropy(model), batch)


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("early", [False, True])
def test_a_hook_that_writes_to_another_leafs_gradient_is_not_taken_for_its_commit(door: int, early: bool) -> None:
    batch = pairs()
    wanted = whole_gradient(mlp(), lambda twin: cross_entropy(twin)(batch))
    for at in range(1, 45):
        model = mlp()
        mbs = settled(model, cross_entropy(model), batch, door) if not early else elastic(model, micro_batch_size=3)
        other = next(model[0].parameters())

        def write(leaf: Tensor, other: Tensor = other) -> None:
            if other.grad is not None:
                other.grad.mul_(1.0)

        [*model.parameters()][-1].register_post_accumulate_grad_hook(write)
        if early:
            for _ in range(2):
                through(door, mbs, cross_entropy(model), batch)
        model.zero_grad()
        with InjectOOM(at=[at]):
            through(door, mbs, cross_entropy(model), batch)
        assert off_by(model, wanted) <= 1e-12


@pytest.mark.parametrize("line", ["leave_call(self)", "if getattr(_thread", "del _running[place]"])
def test_an_interrupt_while_a_finished_call_leaves_refuses_no_later_step(line: str) -> None:
    model, batch = mlp(), pairs()
    mbs = settled(model, cross_entropy(model), batch, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with interrupt_at(line), pytest.raises(KeyboardInterrupt):
        mbs.backward(cross_entropy(model), batch)
    optimizer.step()
    assert still_works(mbs, model)
    optimizer.step()


def test_an_interrupt_while_a_call_begins_leaves_the_thread_outside_of_calls() -> None:
    model, batch = mlp(), pairs()
    mbs = settled(model, cross_entropy(model), batch, 1)
    with interrupt_at("_running.append(call)"), pytest.raises(KeyboardInterrupt):
        mbs.backward(cross_entropy(model), batch)
    assert still_works(mbs, model)


def test_an_interrupt_while_hooks_come_off_leaves_no_leaf_that_is_taken_for_watched() -> None:
    """A leaf without a hook would get a piece twice that had committed before a backward ran out."""
    leaves = [torch.ones(1, requires_grad=True) for _ in range(3)]
    log = CommitLog()
    log.watch(leaves)
    log.watch_guests([guest := torch.ones(1, requires_grad=True)])
    for leave in (log.rest, log.forget_guests):
        for lines in range(2, 12):
            log.listen()
            log.watch_guests([guest])
            with interrupt_at("", "commits.py", lines), suppress(KeyboardInterrupt):
                leave()
            log.listen()
            log.watch_guests([guest])
            log.clear()
            torch.stack([*leaves, guest]).sum().backward()
            assert {id(leaf) for leaf in log.fired} == {id(leaf) for leaf in [*leaves, guest]}


def test_an_interrupt_while_new_leaves_are_met_leaves_none_unwatched() -> None:
    model, batch = mlp(), pairs()
    model[0].requires_grad_(False)
    mbs = settled(model, cross_entropy(model), batch, 1)
    model[0].requires_grad_(True)
    with interrupt_at("parts.commits.watch(parts.inventory.leaves)"), pytest.raises(KeyboardInterrupt):
        mbs.backward(cross_entropy(model), batch)
    assert still_works(mbs, model)
    assert hooks_on(model) == len(list(model.parameters()))


@pytest.mark.parametrize("line", ["if self.finished:", "try:"])
def test_an_interrupt_between_the_lines_of_the_loop_written_out_ends_its_call_at_once(line: str) -> None:
    model, batch = mlp(), pairs()
    mbs = settled(model, cross_entropy(model), batch, 3)
    with pytest.raises(KeyboardInterrupt):
        for number, micro in enumerate(mbs.micro_batches(batch)):
            with micro:
                micro.backward(cross_entropy(model)(micro.data))
            if number == 1:
                interrupting = interrupt_at(line, "engine.py")
                interrupting.__enter__()
    interrupting.__exit__(None, None, None)
    assert all(leaf.grad is None for leaf in model.parameters())
    assert still_works(mbs, model)


@pytest.mark.parametrize("door", DOORS)
def test_a_known_step_function_may_leave_graphs_switched_off_behind_its_own(door: int) -> None:
    model, batch = mlp(), pairs()
    closes = [False]

    def loss_fn(piece: tuple[Tensor, Tensor]) -> Tensor:
        torch.set_grad_enabled(True)
        loss: Tensor = cross_entropy(model)(piece)
        torch.set_grad_enabled(not closes[0])
        return loss

    mbs = settled(model, loss_fn, batch, door)
    closes[0] = True
    try:
        through(door, mbs, loss_fn, batch)
    finally:
        torch.set_grad_enabled(True)
    assert off_by(model, whole_gradient(model, lambda twin: cross_entropy(twin)(batch))) <= 1e-12


def test_two_step_functions_under_one_decorator_are_learned_apart() -> None:
    """They share the decorator's code. The second one's own leaf was taken for one that had come in the middle of a batch."""
    model, batch = mlp(), pairs()
    scale = torch.ones((), dtype=torch.float64, requires_grad=True)

    @torch.enable_grad()
    def first(piece: tuple[Tensor, Tensor]) -> Tensor:
        loss: Tensor = cross_entropy(model)(piece)
        return loss

    @torch.enable_grad()
    def second(piece: tuple[Tensor, Tensor]) -> Tensor:
        loss: Tensor = cross_entropy(model)(piece) * scale
        return loss

    mbs = settled(model, first, batch, 1)
    with InjectOOM(at=[35]) as inject:
        mbs.backward(second, batch)
    assert inject.hits
    assert off_by(model, whole_gradient(model, lambda twin: cross_entropy(twin)(batch))) <= 1e-12
    assert scale.grad is not None
    assert torch.allclose(scale.grad, cross_entropy(model)(batch), rtol=1e-12)
