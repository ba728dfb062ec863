import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from elastic_mbs.rollback import graph as graph_module
from elastic_mbs.rollback.gradients import Ledger
from elastic_mbs.rollback.graph import (
    Census,
    drain,
    has_hook,
    inner_backwards,
    walk,
)
from elastic_mbs.testing import InjectOOM
from tests.helpers.steps import there
from tests.helpers.strikes import AtLine, until_clean

F64 = torch.float64


def census_of(loss: Tensor) -> Census:
    return walk(there(loss.grad_fn))


def ids(leaves: Iterable[Tensor]) -> list[int]:
    return sorted(id(leaf) for leaf in leaves)


def leaf(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=F64, requires_grad=True)


def test_the_walk_finds_every_leaf_of_the_model_and_those_outside_it() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)).double()
    prompt, log_weight, batch = leaf(4), leaf(), leaf(5, 4)
    # a leaf that is used twice is found once
    loss = (model(model(batch + prompt)) * log_weight.exp()).sum()
    assert ids(census_of(loss).leaves) == ids([*model.parameters(), prompt, log_weight, batch])


def test_a_deep_graph_does_not_exhaust_the_stack() -> None:
    w = leaf()
    x = w
    for _ in range(5000):
        x = x + 1
    assert ids(census_of(x).leaves) == [id(w)]


def custom(name: str, x: Tensor) -> Tensor:
    """Return the output of a function of that name, written in Python."""

    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.variable = x
        return x * 2

    methods = {
        "forward": staticmethod(forward),
        "backward": staticmethod(lambda ctx, *grads: grads[0] * 2),
    }
    # `apply` comes from the base class
    out: Tensor = type(name, (torch.autograd.Function,), methods).apply(x)  # type: ignore[attr-defined]
    return out


@pytest.mark.parametrize(("name", "normalises"), [("Double", False), ("StrangeBatchNorm", True)])
def test_functions_written_in_python_are_named_and_keep_no_leaves(
    name: str, normalises: bool
) -> None:
    w = leaf(3)
    census = census_of(custom(name, w.exp()).sum())
    assert ids(census.leaves) == [id(w)]
    assert census.custom == {f"{name}Backward"}
    # a function with BatchNorm in its name is taken to normalise over the batch
    assert census.normalises_batch is normalises
    assert census_of(w.exp().sum()).custom == frozenset()


class FunctionalBatchNorm(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return functional.batch_norm(
            x, torch.zeros(4, dtype=F64), torch.ones(4, dtype=F64), training=self.training
        )


@pytest.mark.parametrize(
    ("module", "training", "evaluation"),
    [
        (nn.BatchNorm1d(4), True, False),
        (nn.BatchNorm1d(4, track_running_stats=False), True, True),
        (FunctionalBatchNorm(), True, False),
        (nn.LayerNorm(4), False, False),
        (nn.GroupNorm(2, 4), False, False),
        (nn.RMSNorm(4), False, False),
    ],
)
def test_the_walk_tells_statistics_of_the_batch_from_frozen_ones(
    module: nn.Module, training: bool, evaluation: bool
) -> None:
    x = leaf(6, 4)
    assert census_of(module.double().train()(x).square().sum()).normalises_batch is training
    assert census_of(module.eval()(x).square().sum()).normalises_batch is evaluation


def test_the_walk_still_works_on_a_graph_whose_backward_has_run_or_failed() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)).double()
    loss = model(torch.randn(6, 4, dtype=F64)).sum()
    before = census_of(loss)
    with InjectOOM(at=[5]), pytest.raises(torch.OutOfMemoryError):
        loss.backward()
    assert (ids(census_of(loss).leaves), census_of(loss).normalises_batch) == (
        ids(before.leaves),
        True,
    )


def test_a_tied_weight_commits_once_per_backward_and_per_checkpoint() -> None:
    for times, reentrant in ((1, None), (3, True), (1, False)):
        tied, x = leaf(3, 3), leaf(2, 3)
        tied.grad = torch.zeros_like(tied)
        ledger = Ledger()
        ledger.set_leaves([tied])
        ledger.note()
        run = partial(torch.matmul, other=tied)
        for _ in range(3):
            x = run(x) if reentrant is None else checkpoint(run, x, use_reentrant=reentrant)
        x.sum().backward()
        assert len(ledger.changed()) == times


def test_hooks_of_the_user_are_seen() -> None:
    plain, hooked, observed = leaf(2), leaf(2), leaf(2)
    hooked.register_hook(lambda grad: grad)
    observed.register_post_accumulate_grad_hook(lambda _: None)
    assert [has_hook(w) for w in (plain, hooked, observed)] == [False, True, True]


def test_drain_changes_no_gradient_and_takes_no_memory() -> None:
    leaves = [leaf(2), torch.zeros(2, device="meta", requires_grad=True)]  # on two devices
    with torch.no_grad(), InjectOOM(always_from=1) as oom:
        drain(leaves)
    assert not oom.hits
    assert all(each.grad is None for each in leaves)


def inside(run: Callable[[Tensor, Tensor], object], x: Tensor, w: Tensor) -> Tensor:
    """Return x · w from a function that builds and runs the graph of `w` only in its backward."""

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

    # torch has no annotation there
    out: Tensor = Recompute.apply(x)  # type: ignore[no-untyped-call]
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
def test_leaves_of_an_inner_backward_are_reported_before_they_commit(
    run: Callable[[Tensor, Tensor], object],
) -> None:
    x, w = leaf(3), leaf(3)
    found: list[tuple[int, bool]] = []
    loss = inside(run, x, w).sum()
    assert ids(census_of(loss).leaves) == ids([x])

    def report(leaves: tuple[Tensor, ...]) -> None:
        found.extend((id(reached), reached.grad is None) for reached in leaves)

    with inner_backwards(there(loss.grad_fn), report):
        loss.backward()
    assert found == [(id(w), True)]
    assert torch.equal(there(w.grad), x.detach())


def test_a_backward_of_another_thread_or_outside_of_ours_is_no_inner_one() -> None:
    x, w, other = leaf(3), leaf(3), leaf(3)
    found: list[tuple[Tensor, ...]] = []

    def elsewhere(y: Tensor, grad: Tensor) -> None:
        thread = threading.Thread(target=lambda: other.exp().sum().backward())
        thread.start()
        thread.join()

    loss = inside(elsewhere, x, w).sum()
    with inner_backwards(there(loss.grad_fn), found.append):
        loss.backward()
        inside(lambda y, grad: torch.autograd.backward(y, grad), x, w).sum().backward()
    assert found == []


def test_the_look_into_inner_backwards_ends_with_its_block() -> None:
    graph_module._users.clear()  # an interrupted test before this one can have left its look
    torch.autograd.backward = graph_module._original
    original = torch.autograd.backward
    x, w = leaf(3), leaf(3)
    loss = x.exp().sum()
    with pytest.raises(KeyError), inner_backwards(there(loss.grad_fn), lambda leaves: None):
        assert torch.autograd.backward is not original
        raise KeyError
    assert torch.autograd.backward is original
    found: list[tuple[Tensor, ...]] = []
    x.register_hook(lambda _: 1 / 0)  # an error inside is the point
    with pytest.raises(ZeroDivisionError), inner_backwards(there(loss.grad_fn), found.append):
        loss.backward()
    w.exp().sum().backward()
    assert found == []


def test_two_looks_at_once_do_not_leave_the_wrapper_behind() -> None:
    original = torch.autograd.backward
    outer, inner = (
        inner_backwards(there(leaf(3).exp().sum().grad_fn), lambda leaves: None) for _ in range(2)
    )
    outer.__enter__()
    inner.__enter__()
    outer.__exit__(None, None, None)  # two threads need not leave in the order of a stack
    inner.__exit__(None, None, None)
    assert torch.autograd.backward is original


def test_an_interrupt_at_any_line_does_not_leave_the_wrapper_behind() -> None:
    original = torch.autograd.backward
    for strike in until_clean(lambda n: AtLine(n, "rollback/graph.py"), least=15):
        x, w = leaf(3), leaf(3)
        loss = inside(lambda y, grad: torch.autograd.backward(y, grad), x, w).sum()
        looks = inner_backwards(there(loss.grad_fn), lambda leaves: None)
        with strike, suppress(KeyboardInterrupt), looks:
            loss.backward()
        del looks
        torch.autograd.backward(leaf(3).exp().sum())
        assert torch.autograd.backward is original, strike.hits
