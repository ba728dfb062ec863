"""Calls of a loss function that is known."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from elastic_mbs import BackwardInsideError, GradientsChangedError, OptimizerInBackwardError, OutOfMemory
from elastic_mbs.engine.recovery import Mode, Replay
from elastic_mbs.events import Event
from elastic_mbs.testing import InjectOOM
from tests.helpers.settled import settled
from tests.helpers.steps import cross_entropy, elastic, mlp, off_by, pairs, still_works, through, whole_gradient

pytestmark = pytest.mark.no_oom_injection

DOORS = [1, 3]


@pytest.mark.parametrize("door", DOORS)
def test_no_hook_is_ever_on_the_users_model(door: int) -> None:
    model, batch = mlp(), pairs()
    mbs = elastic(model, grow=False, micro_batch_size=3)
    hooks: list[int] = []

    def loss_fn(piece: tuple[Tensor, Tensor]) -> Tensor:
        hooks.extend(len(leaf._post_accumulate_grad_hooks or ()) + len(leaf._backward_hooks or ()) for leaf in model.parameters())
        loss: Tensor = cross_entropy(model)(piece)
        return loss

    for at in ([], [12], []):
        with InjectOOM(at=at) as inject:
            through(door, mbs, loss_fn, batch)
        assert len(inject.hits) == len(at)
    assert hooks
    assert not any(hooks)


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
        through(door, mbs, loss_fn, batch)
        model.zero_grad(set_to_none=not filled)
        mbs.load_state_dict(state)
        with InjectOOM(at=range(at, at + times)) as inject:
            through(door, mbs, loss_fn, batch)
        assert off_by(model, wanted) <= 1e-12
        clean = not inject.hits
    assert at > 40
    assert {event.mode for event in events if isinstance(event, OutOfMemory)} == {"piece"}
    assert any(event.committed for event in events if isinstance(event, OutOfMemory))


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

    monkeypatch.setattr("elastic_mbs.engine.recovery.choose_replay", lambda state, failure: Replay(Mode.STEP, "of the test"))
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
def test_a_hook_that_steps_inside_backward_is_noticed_when_it_comes_late(door: int) -> None:
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


@pytest.mark.parametrize("at", range(1, 40, 3))
def test_a_hook_that_writes_to_gradients_hides_no_commit(at: int) -> None:
    model, batch = mlp(), pairs()

    def write(leaf: Tensor) -> None:
        assert leaf.grad is not None
        leaf.grad.mul_(1.0)

    for leaf in model.parameters():
        leaf.register_post_accumulate_grad_hook(write)
    mbs = settled(model, cross_entropy(model), batch, 1)
    with InjectOOM(at=[at]):
        through(1, mbs, cross_entropy(model), batch)
    wanted = whole_gradient(mlp(), lambda twin: cross_entropy(twin)(batch))
    assert off_by(model, wanted) <= 1e-12


@pytest.mark.parametrize("door", DOORS)
def test_a_backward_of_the_users_between_two_batches_is_no_mistake(door: int) -> None:
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
def test_a_route_that_was_never_taken_is_learned(door: int) -> None:
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
