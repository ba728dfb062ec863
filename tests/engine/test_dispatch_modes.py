"""Edits in place under a dispatch mode show as they do without one."""

import contextlib
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from torch.utils.flop_counter import FlopCounterMode

from elastic_mbs import ElasticMBS, GradientsChangedError, Policy
from elastic_mbs.testing import InjectOOM, MemoryBudget


class Users(TorchDispatchMode):
    """A mode of a user's, which only looks."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def counted() -> FlopCounterMode:
    return FlopCounterMode(display=False)


MODES: dict[str, list[Callable[[], Any]]] = {
    "none": [],
    "MemoryBudget": [lambda: MemoryBudget("1GiB")],
    "InjectOOM": [InjectOOM],
    "FlopCounterMode": [counted],
    "a user's": [Users],
    "a user's in a budget": [lambda: MemoryBudget("1GiB"), Users],
    "a budget in a user's": [Users, lambda: MemoryBudget("1GiB")],
}
EDITS: dict[str, Callable[[nn.Module], Any]] = {
    "norm": lambda model: nn.utils.clip_grad_norm_(model.parameters(), 0.01),
    "norm, one by one": lambda model: nn.utils.clip_grad_norm_(
        model.parameters(), 0.01, foreach=False
    ),
    "value": lambda model: nn.utils.clip_grad_value_(model.parameters(), 1e-4),
    "zero": lambda model: torch._foreach_zero_(
        [p.grad for p in model.parameters() if p.grad is not None]
    ),
}


def entered(modes: list[Callable[[], Any]]) -> contextlib.ExitStack:
    stack = contextlib.ExitStack()
    for mode in modes:
        stack.enter_context(mode())
    return stack


def model_and_batch(dtype: torch.dtype = torch.float32) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 3)).to(dtype), torch.randn(32, 6).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize("modes", MODES)
@pytest.mark.parametrize("inside", [True, False], ids=["in the block", "between blocks"])
def test_an_edit_of_gradients_in_mid_batch_is_refused_under_any_mode(
    inside: bool, modes: str, edit: str, dtype: torch.dtype
) -> None:
    model, batch = model_and_batch(dtype)
    mbs = ElasticMBS(model, micro_batch_size=8)
    with entered(MODES[modes]), pytest.raises(GradientsChangedError):
        for micro in mbs.micro_batches(batch):
            with micro:
                micro.backward(model(micro.data).square().mean())
                if inside:
                    EDITS[edit](model)
            if not inside:
                EDITS[edit](model)
    assert _get_current_dispatch_mode_stack() == []


@pytest.mark.parametrize("modes", MODES)
@pytest.mark.parametrize("full", [False, True], ids=["empty gradients", "gradients before"])
def test_under_any_mode_a_call_without_edits_is_exact(modes: str, full: bool) -> None:
    model, batch = model_and_batch(torch.float64)
    for part in model.parameters():
        part.grad = torch.ones_like(part) if full else None
    mbs = ElasticMBS(model, micro_batch_size=8)
    with entered(MODES[modes]):
        for micro in mbs.micro_batches(batch):
            with micro:
                micro.backward(model(micro.data).square().mean())
    got = [part.grad for part in model.parameters()]
    wanted = torch.autograd.grad(model(batch).square().mean(), [*model.parameters()])
    for found, right in zip(got, wanted, strict=True):
        assert found is not None
        assert (found - right - float(full)).abs().max() <= 1e-12 * max(
            1.0, float(right.abs().max())
        )


@pytest.mark.parametrize("modes", MODES)
@pytest.mark.parametrize("at", range(1, 40, 3))
def test_a_batch_that_the_step_edits_is_replayed_as_it_was_under_any_mode(
    modes: str, at: int
) -> None:
    model, batch = model_and_batch(torch.float64)
    wanted = torch.autograd.grad(model(batch * 3).square().mean(), [*model.parameters()])

    def loss(piece: Tensor) -> Tensor:
        torch._foreach_mul_([piece], 3.0)
        found: Tensor = model(piece)
        return found.square().mean()

    mbs = ElasticMBS(model, micro_batch_size=8, policy=Policy(grow=False))
    with entered(MODES[modes]):
        mbs.backward(loss, batch.clone())  # shows that it edits
    model.zero_grad()
    again = batch.clone()
    with InjectOOM(at=[at]), entered(MODES[modes]):
        mbs.backward(loss, again)
    for part, right in zip(model.parameters(), wanted, strict=True):
        assert part.grad is not None
        assert (part.grad - right).abs().max() <= 1e-12 * float(right.abs().max())


@pytest.mark.parametrize(
    "name", sorted(n for n in dir(torch) if re.fullmatch("_foreach_.*[^_]_", n))
)
def test_a_mode_of_ours_raises_the_versions_that_an_operation_on_lists_raises(name: str) -> None:
    # as many arguments as it takes: none, a number, a list, two lists and a number
    def raised(
        mode: contextlib.AbstractContextManager[object], extra: tuple[Any, ...]
    ) -> list[bool]:
        lists = [torch.full((4,), 0.5), torch.full((3,), 0.5)]
        with mode, torch.no_grad():
            getattr(torch, name)(lists, *extra)
        return [tensor._version > 0 for tensor in lists]

    other = [torch.full((4,), 0.25), torch.full((3,), 0.25)]
    for extra in ((), (2.0,), (other,), (other, other), (other, 0.5)):
        with contextlib.suppress(TypeError, RuntimeError):
            plain = raised(contextlib.nullcontext(), extra)
            for mode in (InjectOOM(), MemoryBudget("1GiB")):
                assert raised(mode, extra) == plain
            return
    pytest.fail(f"no arguments found for {name}")


def test_an_edit_that_ends_half_way_raises_versions_too() -> None:
    lists = [torch.ones(4), torch.ones(3)]
    with InjectOOM(), contextlib.suppress(RuntimeError):
        torch._foreach_add_(lists, [torch.ones(4), torch.ones(2)])
    assert lists[0]._version > 0
