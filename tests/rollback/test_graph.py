from __future__ import annotations

import contextlib
import copy
import gc
import io
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from elastic_mbs.rollback.graph import Census, CommitLog, drain, has_foreign_hook, walk
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


# ---------------------------------------------------------------------- the log


def test_a_tied_weight_commits_once_in_a_backward() -> None:
    log, tied, other = CommitLog(), leaf(3, 3), leaf(3)
    log.watch([tied, other])
    x = torch.randn(2, 3, dtype=F64)
    log.clear()
    (x @ tied @ tied + other).sum().backward()
    assert sorted(map(id, list(log.fired))) == ids([tied, other])
    assert len(log.fired) == 2


def test_a_weight_in_several_reentrant_checkpoints_commits_once_in_each() -> None:
    log, tied, x = CommitLog(), leaf(3, 3), leaf(2, 3)
    log.watch([tied])
    for _ in range(3):
        x = checkpoint(lambda y: torch.tanh(y @ tied), x, use_reentrant=True)
    log.clear()
    x.sum().backward()
    assert list(map(id, list(log.fired))) == [id(tied)] * 3


def test_a_weight_in_several_checkpoints_that_are_not_reentrant_commits_once() -> None:
    log, tied, x = CommitLog(), leaf(3, 3), leaf(2, 3)
    log.watch([tied])
    for _ in range(3):
        x = checkpoint(lambda y: torch.tanh(y @ tied), x, use_reentrant=False)
    log.clear()
    x.sum().backward()
    assert list(map(id, list(log.fired))) == [id(tied)]


def test_begin_starts_a_new_attempt() -> None:
    log, w = CommitLog(), leaf(2)
    log.watch([w])
    log.clear()
    w.sum().backward()
    log.clear()
    assert len(log.fired) == 0
    assert list(log.fired) == []
    w.sum().backward()
    assert len(log.fired) == 1


def test_what_happens_to_the_leaves_outside_an_attempt_does_not_count_in_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("elastic_mbs.rollback.graph.MOST", 3)
    log, w = CommitLog(), leaf(2)
    log.watch([w])
    for _ in range(5):
        w.sum().backward()
    assert len(log.fired) == 3, "what nobody clears is kept up to a limit"
    log.clear()
    assert list(log.fired) == []
    w.sum().backward()
    assert next(iter(log.fired)) is w
    log.clear()
    assert list(log.fired) == []


def test_a_commit_is_noted_although_a_hook_of_the_users_fails_after_it() -> None:
    log, w = CommitLog(), leaf(2)

    def fail(_: Tensor) -> None:
        raise KeyError

    w.register_post_accumulate_grad_hook(fail)
    log.watch([w])
    log.clear()
    with pytest.raises(KeyError):
        w.sum().backward()
    assert list(map(id, list(log.fired))) == [id(w)]


def test_hooks_of_others_are_told_from_ours() -> None:
    log, plain, hooked, observed = CommitLog(), leaf(2), leaf(2), leaf(2)
    log.watch([plain, hooked, observed])
    hooked.register_hook(lambda grad: grad)
    observed.register_post_accumulate_grad_hook(lambda _: None)
    assert [has_foreign_hook(w) for w in (plain, hooked, observed, leaf(1))] == [False, True, True, False]


def deep(width: int = 3, depth: int = 3) -> tuple[nn.Module, Tensor]:
    layers = [nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(depth)]
    return nn.Sequential(*layers).double(), torch.randn(4, width, dtype=F64)


def test_marks_are_exactly_the_leaves_that_a_failed_backward_reached() -> None:
    model, x = deep()
    leaves = list(model.parameters())
    log = CommitLog()
    log.watch(leaves)
    partial = at = 0
    while True:
        at += 1
        model.zero_grad(set_to_none=True)
        log.clear()
        loss = model(x).square().sum()
        with InjectOOM(at=[at]) as oom, contextlib.suppress(torch.OutOfMemoryError):
            loss.backward()
        assert ids(list(log.fired)) == ids(w for w in leaves if w.grad is not None)
        partial += 0 < len(log.fired) < len(leaves)
        if not oom.hits:
            break
    assert len(log.fired) == len(leaves)
    assert partial >= 5


def test_marks_are_right_where_all_gradients_are_views_of_one_buffer() -> None:
    model, x = deep()
    leaves = list(model.parameters())
    flat = torch.zeros(sum(w.numel() for w in leaves), dtype=F64)
    for w, view in zip(leaves, flat.split([w.numel() for w in leaves]), strict=True):
        w.grad = view.view_as(w)
    log = CommitLog()
    log.watch(leaves)
    partial = at = 0
    while True:
        at += 1
        flat.zero_()
        log.clear()
        loss = model(x).square().sum()
        with InjectOOM(at=[at]) as oom, contextlib.suppress(torch.OutOfMemoryError):
            loss.backward()
        assert ids(list(log.fired)) == ids(w for w in leaves if w.grad is not None and w.grad.any())
        partial += 0 < len(log.fired) < len(leaves)
        if not oom.hits:
            break
    assert len(log.fired) == len(leaves)
    assert partial >= 3


def hooks_on(w: Tensor) -> int:
    return len(getattr(w, "_post_accumulate_grad_hooks", None) or ())


def test_watch_follows_the_leaves_it_is_given() -> None:
    log, kept, dropped, new = CommitLog(), leaf(2), leaf(2), leaf(2)
    log.watch([kept, dropped])
    log.watch([kept, new])
    assert [hooks_on(w) for w in (kept, dropped, new)] == [1, 0, 1]
    log.clear()
    (kept + dropped + new).sum().backward()
    assert ids(list(log.fired)) == ids([kept, new])
    assert ids(log.leaves()) == ids([kept, new])
    assert [log.watches(w) for w in (kept, dropped, new)] == [True, False, True]


def test_watching_twice_marks_once() -> None:
    log, w = CommitLog(), leaf(2)
    log.watch([w, w])
    log.watch([w])
    assert log.watch_guests([w]) == []
    log.clear()
    w.sum().backward()
    assert len(log.fired) == 1


def test_a_guest_is_watched_until_it_is_forgotten() -> None:
    log, own, guest = CommitLog(), leaf(2), leaf(2)
    log.watch([own])
    assert list(map(id, log.watch_guests([own, guest]))) == [id(guest)]
    log.clear()
    (own * guest).sum().backward()
    assert ids(list(log.fired)) == ids([own, guest])
    log.forget_guests()
    log.clear()
    (own * guest).sum().backward()
    assert list(map(id, list(log.fired))) == [id(own)]
    assert hooks_on(guest) == 0


def test_a_guest_that_becomes_the_models_own_stays_watched_and_marks_once() -> None:
    log, w = CommitLog(), leaf(2)
    log.watch_guests([w])
    log.watch([w])
    log.forget_guests()
    log.clear()
    w.sum().backward()
    assert (len(log.fired), hooks_on(w)) == (1, 1)


def test_guests_do_not_outlive_their_call() -> None:
    log = CommitLog()

    def call() -> weakref.ref[Tensor]:
        prompt = leaf(3)
        log.watch_guests([prompt])
        log.clear()
        prompt.sum().backward()
        log.forget_guests()
        log.clear()
        return weakref.ref(prompt)

    gc.disable()
    try:
        assert call()() is None
    finally:
        gc.enable()


def test_a_guest_is_not_kept_alive_while_it_is_watched() -> None:
    log, prompt = CommitLog(), leaf(3)
    log.watch_guests([prompt])
    assert log.watches(prompt)
    alive = weakref.ref(prompt)
    gc.disable()
    try:
        del prompt
        assert alive() is None
        assert log.leaves() == []
    finally:
        gc.enable()


def test_a_log_that_is_dropped_takes_its_hooks_along() -> None:
    own, guest = leaf(2), leaf(2)
    log = CommitLog()
    log.watch([own])
    log.watch_guests([guest])
    alive = weakref.ref(log)
    gc.disable()
    try:
        del log
        assert alive() is None
    finally:
        gc.enable()
    assert [hooks_on(own), hooks_on(guest)] == [0, 0]
    (own + guest).sum().backward()


@given(st.lists(st.tuples(st.sampled_from(["watch", "guests", "forget"]), st.sets(st.integers(0, 4))), max_size=8))
def test_no_history_of_watching_leaves_a_hook_behind(steps: list[tuple[str, set[int]]]) -> None:
    log, leaves = CommitLog(), [leaf(1) for _ in range(5)]
    for step, chosen in steps:
        if step == "watch":
            log.watch([leaves[i] for i in chosen])
        elif step == "guests":
            log.watch_guests([leaves[i] for i in chosen])
        else:
            log.forget_guests()
        assert [hooks_on(w) for w in leaves] == [int(log.watches(w)) for w in leaves]
        assert ids(log.leaves()) == ids(w for w in leaves if log.watches(w))
    log.close()
    assert [hooks_on(w) for w in leaves] == [0] * 5
    log.clear()
    torch.cat(leaves).sum().backward()
    assert len(log.fired) == 0


def test_a_watched_model_can_be_copied_and_saved_and_its_copies_are_not_watched() -> None:
    model, x = deep()
    log = CommitLog()
    log.watch(model.parameters())
    stored = io.BytesIO()
    torch.save(model, stored)
    stored.seek(0)
    for other in (copy.deepcopy(model), torch.load(stored, weights_only=False)):
        log.clear()
        other(x).sum().backward()
        assert len(log.fired) == 0


# ---------------------------------------------------------------------- backwards inside a backward


def test_drain_changes_no_gradient() -> None:
    log, w = CommitLog(), leaf(2)
    log.watch([w])
    drain([torch.device("cpu")])
    assert w.grad is None
    assert len(log.fired) == 0
