"""What `loss.backward()` bears, the path of a known loss function bears too: custom functions, hooks, gradients and modes of the user's."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from elastic_mbs import OptimizerInBackwardError
from elastic_mbs.engine.backward import backward
from elastic_mbs.testing import InjectOOM
from tests.helpers.settled import settled
from tests.helpers.steps import cross_entropy, elastic, mlp, off_by, pairs, through, whole_gradient

pytestmark = pytest.mark.no_oom_injection

DOORS = [1, 3]


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


@pytest.mark.parametrize("private", [False, True])
def test_backward_gives_the_same_bits_as_torchs(private: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("elastic_mbs.engine.backward._PRIVATE_ENTRY", private)
    model, batch = mlp(), pairs()
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 0.1)
    wanted = copy.deepcopy(model)
    for parameter, twin in zip(model.parameters(), wanted.parameters(), strict=True):
        twin.grad = torch.full_like(parameter, 0.1)
    torch.autograd.backward(cross_entropy(wanted)(batch))
    backward(cross_entropy(model)(batch))
    for parameter, twin in zip(model.parameters(), wanted.parameters(), strict=True):
        assert parameter.grad is not None
        assert twin.grad is not None
        assert torch.equal(parameter.grad, twin.grad)
