from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor

from elastic_mbs.rollback.graph import Census, inner_backwards, walk


def census_of(loss: Tensor) -> Census:
    assert loss.grad_fn is not None
    return walk(loss.grad_fn)


def ids(leaves: Iterable[Tensor]) -> list[int]:
    return sorted(id(leaf) for leaf in leaves)


def leaf(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, requires_grad=True)


def inside(run: Callable[[Tensor, Tensor], object], x: Tensor, w: Tensor) -> Tensor:
    """x · w by a function that does not show `w`: it builds that graph only in its backward, and runs it there."""

    class Recompute(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.x = x.detach()
            return x * w.detach()

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            with torch.enable_grad():
                run(ctx.x * w, grads[0])
            return grads[0] * w.detach()

    out: Tensor = Recompute.apply(x)  # type: ignore[no-untyped-call]  # torch has no annotation there
    return out


@pytest.mark.parametrize(
    "run",
    [
        lambda y, grad: torch.autograd.backward(y, grad),
        lambda y, grad: torch.autograd.backward([y], [grad]),
        lambda y, grad: y.backward(grad),
        lambda y, grad: torch.autograd.backward(torch.autograd.graph.get_gradient_edge(y), grad),
    ],
    ids=["tensor", "list", "method", "edge"],
)
def test_leaves_of_an_inner_backward_are_reported_before_they_commit(run: Callable[[Tensor, Tensor], object]) -> None:
    x, w = leaf(3), leaf(3)
    found: list[tuple[int, bool]] = []
    loss = inside(run, x, w).sum()
    assert ids(census_of(loss).leaves) == ids([x])

    def report(leaves: tuple[Tensor, ...]) -> None:
        found.extend((id(reached), reached.grad is None) for reached in leaves)

    assert loss.grad_fn is not None
    with inner_backwards(loss.grad_fn, report):
        loss.backward()
    assert found == [(id(w), True)]
    assert w.grad is not None
    assert torch.equal(w.grad, x.detach())


def test_a_backward_of_another_thread_is_no_inner_one() -> None:
    x, w, other = leaf(3), leaf(3), leaf(3)
    found: list[tuple[Tensor, ...]] = []

    def elsewhere(y: Tensor, grad: Tensor) -> None:
        thread = threading.Thread(target=lambda: other.exp().sum().backward())
        thread.start()
        thread.join()

    loss = inside(elsewhere, x, w).sum()
    assert loss.grad_fn is not None
    with inner_backwards(loss.grad_fn, found.append):
        loss.backward()
    assert found == []


def test_the_look_into_inner_backwards_ends_with_its_block() -> None:
    original = torch.autograd.backward
    x, w = leaf(3), leaf(3)
    loss = x.exp().sum()
    assert loss.grad_fn is not None
    with pytest.raises(KeyError), inner_backwards(loss.grad_fn, lambda leaves: None):
        assert torch.autograd.backward is not original
        raise KeyError
    assert torch.autograd.backward is original
    found: list[tuple[Tensor, ...]] = []
    x.register_hook(lambda _: 1 / 0)  # an error inside is the point
    with pytest.raises(ZeroDivisionError), inner_backwards(loss.grad_fn, found.append):
        loss.backward()
    w.exp().sum().backward()
    assert found == []


def test_a_backward_that_is_not_ours_is_left_alone_while_ours_is_looked_into() -> None:
    x, w, mine = leaf(3), leaf(3), leaf(3).exp().sum()
    found: list[tuple[Tensor, ...]] = []
    assert mine.grad_fn is not None
    with inner_backwards(mine.grad_fn, found.append):
        inside(lambda y, grad: torch.autograd.backward(y, grad), x, w).sum().backward()
    assert found == []


def test_two_looks_at_once_do_not_leave_the_wrapper_behind() -> None:
    original = torch.autograd.backward
    first, second = leaf(3).exp().sum(), leaf(3).exp().sum()
    assert first.grad_fn is not None
    assert second.grad_fn is not None
    outer, inner = inner_backwards(first.grad_fn, lambda leaves: None), inner_backwards(second.grad_fn, lambda leaves: None)
    outer.__enter__()
    inner.__enter__()
    outer.__exit__(None, None, None)  # not in the order of a stack: two threads
    inner.__exit__(None, None, None)
    assert torch.autograd.backward is original
