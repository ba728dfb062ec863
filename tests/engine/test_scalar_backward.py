"""Backward from a scalar without torch's questions: the same as with them, or with them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from elastic_mbs.engine import scalar_backward
from elastic_mbs.engine.scalar_backward import FIRST, LAST, backward, is_known
from tests.helpers.steps import cross_entropy, elastic, mlp, pairs

pytestmark = pytest.mark.no_oom_injection


def graph_of(model: nn.Module) -> Tensor:
    torch.manual_seed(3)
    out: Tensor = model(torch.randn(5, 4))
    return out.square().mean()


def small() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """The roots that torch's own function was called with."""
    roots: list[object] = []
    original = torch.autograd.backward

    def spy(tensors: Any, *args: Any, **kwargs: Any) -> None:
        roots.append(tensors)
        original(tensors, *args, **kwargs)

    monkeypatch.setattr(torch.autograd, "backward", spy)
    return roots


def test_the_installed_torch_is_one_that_it_was_tried_with() -> None:
    """A newer one falls back to torch's own function. Read `_engine_run_backward` there, run this file, and raise `LAST`."""
    assert is_known(torch.__version__)


@pytest.mark.parametrize(
    ("version", "known"),
    [("2.7.1", False), ("2.8.0+cu128", True), ("2.13.0+cpu", True), ("2.14.0a0+git1a5f2e5", False), ("2.14.0", False), ("3.0.0", False)],
)
def test_only_versions_that_were_looked_at_are_entered_directly(version: str, known: bool) -> None:
    assert (FIRST, LAST) == ((2, 8), (2, 13))
    assert is_known(version) is known


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_gradients_are_bit_by_bit_those_of_torch(dtype: torch.dtype, asked: list[object]) -> None:
    ours, theirs = small().to(dtype), small().to(dtype)
    for _ in range(2):  # the second time they are added to
        for model, run in ((ours, backward), (theirs, torch.autograd.backward)):
            x = torch.linspace(-1, 1, 20, dtype=dtype).reshape(5, 4)
            run(model(x).square().mean())
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert mine.grad is not None
        assert other.grad is not None
        assert torch.equal(mine.grad, other.grad)
    assert len(asked) == 2, "only theirs"


def test_the_graph_is_freed_and_hooks_run_as_with_torch() -> None:
    model, seen = small(), list[str]()
    weight = next(model.parameters())
    weight.register_hook(lambda grad: seen.append("tensor"))
    weight.register_post_accumulate_grad_hook(lambda leaf: seen.append("leaf"))
    loss = graph_of(model)
    loss.register_hook(lambda grad: seen.append(f"root {grad.item()}"))
    backward(loss)
    assert seen == ["root 1.0", "tensor", "leaf"]
    with pytest.raises(RuntimeError, match="second time"):
        backward(loss)


def test_an_error_inside_backward_comes_through_as_it_is() -> None:
    model = small()

    def fail(grad: Tensor) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    next(model.parameters()).register_hook(fail)
    with pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory"):
        backward(graph_of(model))


class _Own(Tensor):
    """A subclass, which may have a backward of its own."""


class _Mode(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(func.__name__)
        return func(*args, **(kwargs or {}))


def test_a_subclass_is_handed_to_torch(asked: list[object]) -> None:
    loss = graph_of(small()).as_subclass(_Own)
    backward(loss)
    assert asked, "a subclass with a backward of its own is asked once more, through torch's function"
    assert asked[0] is loss


def test_a_mode_of_the_users_sees_what_it_sees_with_torch() -> None:
    model, mode = small(), _Mode()
    loss = graph_of(model)
    with mode:
        backward(loss)
    ours, mode.seen = mode.seen, []
    loss = graph_of(model)
    with mode:
        torch.autograd.backward(loss)
    assert ours == mode.seen


def test_inside_a_functorch_transform_torch_refuses() -> None:
    def inside(x: Tensor) -> Tensor:
        backward((x * 2).sum())
        return x.sum()

    with pytest.raises(RuntimeError, match="functorch transform"):
        torch.func.grad(inside)(torch.ones(3))


def test_with_another_version_the_steps_are_the_same_and_torch_is_asked(asked: list[object], monkeypatch: pytest.MonkeyPatch) -> None:
    batch, gradients = pairs(), []
    for direct in (True, False):
        monkeypatch.setattr(scalar_backward, "_direct", direct)
        model = mlp()
        mbs = elastic(model, grow=False, micro_batch_size=3)
        for _ in range(3):
            model.zero_grad()
            asked.clear()
            mbs.backward(cross_entropy(model), batch)
        gradients.append([leaf.grad for leaf in model.parameters()])
        assert len(asked) == (0 if direct else len(mbs.last_result.partition) if mbs.last_result else -1)
    for mine, other in zip(*gradients, strict=True):
        assert mine is not None
        assert other is not None
        assert torch.equal(mine, other)
