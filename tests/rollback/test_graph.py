from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from elastic_mbs.rollback.gradients import Ledger
from elastic_mbs.rollback.graph import Census, drain, has_hook, has_hook_after, walk
from elastic_mbs.testing import InjectOOM

F64 = torch.float64


def census_of(loss: Tensor) -> Census:
    assert loss.grad_fn is not None
    return walk(loss.grad_fn)


def ids(leaves: Iterable[Tensor]) -> list[int]:
    return sorted(id(leaf) for leaf in leaves)


def leaf(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=F64, requires_grad=True)


# ---------------------------------------------------------------------- the walk


def test_the_walk_finds_every_leaf_of_the_model_and_those_outside_it() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)).double()
    prompt, log_weight, batch = leaf(4), leaf(), leaf(5, 4)
    loss = (model(batch + prompt) * log_weight.exp()).sum()
    assert ids(census_of(loss).leaves) == ids([*model.parameters(), prompt, log_weight, batch])


def test_the_walk_leaves_out_what_backward_does_not_reach() -> None:
    used, frozen, detached, unused = leaf(3), leaf(3), leaf(3), leaf(3)
    frozen.requires_grad_(False)
    loss = (used * frozen * detached.detach()).sum()
    assert ids(census_of(loss).leaves) == ids([used])
    assert unused.grad is None


def test_a_leaf_that_is_used_often_is_found_once() -> None:
    tied = leaf(3, 3)
    x = torch.randn(2, 3, dtype=F64)
    for _ in range(4):
        x = x @ tied
    assert ids(census_of(x.sum()).leaves) == ids([tied])


def test_a_deep_graph_does_not_exhaust_the_stack() -> None:
    w = leaf()
    x = w
    for _ in range(5000):
        x = x + 1
    assert ids(census_of(x).leaves) == [id(w)]


def test_what_a_custom_function_keeps_under_the_name_variable_is_no_leaf() -> None:
    class Keeps(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.variable = x
            return x * 2

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            return grads[0] * 2

    w = leaf(3)
    loss = Keeps.apply(w * 3).sum()  # type: ignore[no-untyped-call]  # torch has no annotation there
    assert ids(census_of(loss).leaves) == [id(w)]


def test_functions_written_in_python_are_named() -> None:
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            return grads[0] * 2

    class BatchNormLike(Double):
        pass

    x = leaf(3)
    for function in (Double, BatchNormLike):
        assert census_of(function.apply(x.exp()).sum()).custom == {f"{function.__name__}Backward"}  # type: ignore[no-untyped-call]  # torch's
    assert census_of(x.exp().sum()).custom == frozenset()


def norm(kind: Callable[..., nn.Module], *args: Any, **kwargs: Any) -> Callable[[bool, Tensor], Tensor]:
    def apply(training: bool, x: Tensor) -> Tensor:
        out: Tensor = kind(*args, **kwargs).double().train(training)(x)
        return out

    return apply


def functional_batch_norm(training: bool, x: Tensor) -> Tensor:
    return functional.batch_norm(x, torch.zeros(4, dtype=F64), torch.ones(4, dtype=F64), training=training)


@pytest.mark.parametrize(
    ("apply", "training", "normalises"),
    [
        (norm(nn.BatchNorm1d, 4), True, True),
        (norm(nn.BatchNorm1d, 4), False, False),
        (norm(nn.BatchNorm1d, 4, track_running_stats=False), True, True),
        (norm(nn.BatchNorm1d, 4, track_running_stats=False), False, True),
        (functional_batch_norm, True, True),
        (functional_batch_norm, False, False),
        (norm(nn.LayerNorm, 4), True, False),
        (norm(nn.GroupNorm, 2, 4), True, False),
        (norm(nn.RMSNorm, 4), True, False),
    ],
)
def test_the_walk_tells_statistics_of_the_batch_from_frozen_ones(apply: Callable[[bool, Tensor], Tensor], training: bool, normalises: bool) -> None:
    assert census_of(apply(training, leaf(6, 4)).square().sum()).normalises_batch is normalises


def test_a_backend_that_does_not_say_is_taken_to_use_the_batch() -> None:
    class StrangeBatchNorm(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x - x.mean(0)

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            return grads[0]

    out = StrangeBatchNorm.apply(leaf(2, 2))  # type: ignore[no-untyped-call]  # torch has no annotation there
    assert census_of(out.sum()).normalises_batch


def test_the_walk_still_works_on_a_graph_whose_backward_has_run_or_failed() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)).double()
    loss = model(torch.randn(6, 4, dtype=F64)).sum()
    before = census_of(loss)
    with InjectOOM(at=[5]), pytest.raises(torch.OutOfMemoryError):
        loss.backward()
    assert (ids(census_of(loss).leaves), census_of(loss).normalises_batch) == (ids(before.leaves), True)


# ---------------------------------------------------------------------- what a backward has reached


def test_a_tied_weight_commits_once_in_a_backward_and_once_in_each_reentrant_checkpoint() -> None:
    for times, wrap in ((1, plain), (3, checkpoint_reentrant), (1, checkpoint_plain)):
        tied, x = leaf(3, 3), leaf(2, 3)
        tied.grad = torch.zeros_like(tied)
        ledger = Ledger()
        ledger.set_leaves([tied])
        ledger.note()
        for _ in range(3):
            x = wrap(partial(tanh_of, tied), x)
        x.sum().backward()
        assert len(ledger.changed()) == times


def tanh_of(weight: Tensor, x: Tensor) -> Tensor:
    return torch.tanh(x @ weight)


def plain(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return function(x)


def checkpoint_reentrant(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    out: Tensor = checkpoint(function, x, use_reentrant=True)
    return out


def checkpoint_plain(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    out: Tensor = checkpoint(function, x, use_reentrant=False)
    return out


def test_hooks_of_the_user_are_seen() -> None:
    plain, hooked, observed = leaf(2), leaf(2), leaf(2)
    hooked.register_hook(lambda grad: grad)
    observed.register_post_accumulate_grad_hook(lambda _: None)
    assert [has_hook(w) for w in (plain, hooked, observed)] == [False, True, True]
    assert [has_hook_after(w) for w in (plain, hooked, observed)] == [False, False, True]


def deep(width: int = 3, depth: int = 3) -> tuple[nn.Module, Tensor]:
    layers = [nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(depth)]
    return nn.Sequential(*layers).double(), torch.randn(4, width, dtype=F64)


@pytest.mark.parametrize("filled", [False, True])
def test_exactly_the_leaves_that_a_failed_backward_reached_have_changed(filled: bool) -> None:
    model, x = deep()
    leaves = list(model.parameters())
    ledger = Ledger()
    ledger.set_leaves(leaves)
    partial = at = 0
    while True:
        at += 1
        for w in leaves:
            w.grad = torch.zeros_like(w) if filled else None
        ledger.note()
        loss = model(x).square().sum()
        with InjectOOM(at=[at]) as oom, contextlib.suppress(torch.OutOfMemoryError):
            loss.backward()
        changed = ledger.changed()
        assert ids(changed) == ids(w for w in leaves if w.grad is not None and w.grad.any())
        partial += 0 < len(changed) < len(leaves)
        if not oom.hits:
            break
    assert len(changed) == len(leaves)
    assert partial >= 5


def test_drain_changes_no_gradient_and_takes_no_memory() -> None:
    leaves = [leaf(2), torch.zeros(2, device="meta", requires_grad=True)]  # on two devices
    with torch.no_grad(), InjectOOM(always_from=1) as oom:
        drain(leaves)
    assert not oom.hits
    assert all(each.grad is None for each in leaves)
