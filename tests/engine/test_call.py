"""A call ends by its result, by an error, or by an interrupt between any two lines."""

import gc
import weakref
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from elastic_mbs import ElasticMBS, MicroBatch
from elastic_mbs.errors import (
    IncompleteBatchError,
    MicroBatchFloorError,
    ReplayUnsafeError,
    UsageError,
)
from elastic_mbs.events import CallDone, CallFailed, Event
from elastic_mbs.testing import InjectOOM
from tests.helpers.steps import (
    FailOn,
    calls_of,
    cross_entropy,
    elastic,
    failing,
    mlp,
    off_by,
    pairs,
    still_works,
    there,
    through,
    whole_gradient,
)
from tests.helpers.strikes import AtLine, every_operation, until_clean

ENGINE = (
    "engine/call.py",
    "engine/micro_batch.py",
    "engine/gradients.py",
    "engine/snapshot.py",
    "engine/progress.py",
    "engine/hooks.py",
    "engine/recovery/failure.py",
    "engine/recovery/recover.py",
    "engine/recovery/unwinding.py",
)


def test_an_interrupt_between_any_two_lines_leaves_a_runtime_that_works(door: int) -> None:
    for strike in until_clean(lambda n: AtLine(n, *ENGINE), stride=23, least=300):
        model = mlp()
        mbs = elastic(model, micro_batch_size=4)
        with strike, suppress(KeyboardInterrupt):
            through(door, mbs, failing(model, FailOn(2)), pairs(8))
        call = calls_of(mbs).current
        if call is not None and not call.finished:
            assert not call.inside
            with pytest.raises(IncompleteBatchError):
                mbs.backward(cross_entropy(model), pairs(8))
        assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None, (
            "hooks on saved tensors were left on this thread"
        )
        torch.optim.SGD(model.parameters()).step()  # refused while a call runs
        assert still_works(mbs, model), strike.hits


def test_a_call_whose_callback_fails_is_done() -> None:
    model, events = mlp(), list[Event]()
    mbs = elastic(model, micro_batch_size=4, on_event=events.append)
    # The error belongs to the user's callback, so it passes as it was raised.
    with pytest.raises(torch.OutOfMemoryError) as caught:
        for micro in mbs.micro_batches(pairs(8)):
            with micro:
                micro.backward(cross_entropy(model)(micro.data))
                micro.on_commit(FailOn(1))
    assert str(caught.value).startswith("CUDA out of memory")
    assert (mbs.last_result is None, mbs.stats.calls) == (False, 1)
    assert [type(event) for event in events if isinstance(event, CallDone | CallFailed)] == [
        CallDone
    ]


@pytest.mark.parametrize("late", ["on_commit", "keep"])
def test_a_micro_batch_that_is_over_takes_nothing_more(model: nn.Sequential, late: str) -> None:
    mbs = elastic(model, micro_batch_size=4)
    kept = list[MicroBatch]()
    for micro in mbs.micro_batches(pairs(8)):
        with micro:
            micro.backward(cross_entropy(model)(micro.data))
        kept.append(micro)
    for micro in kept:
        with pytest.raises(UsageError, match=f"{late}.* inside its own `with micro:`"):
            getattr(micro, late)(print)


def test_a_runtime_closed_inside_a_block_says_that_its_batch_is_incomplete(
    model: nn.Sequential, mbs: ElasticMBS
) -> None:
    with pytest.raises(IncompleteBatchError, match="closed inside"):
        for micro in mbs.micro_batches(pairs(8)):
            with micro:
                micro.backward(cross_entropy(model)(micro.data))
                mbs.close()


def test_on_fatal_and_events_get_the_typed_error_of_bookkeeping(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, events, fatal = mlp(), list[Event](), list[BaseException]()
    mbs = elastic(model, micro_batch_size=4, on_event=events.append, on_fatal=fatal.append)
    monkeypatch.setattr(mbs._knowledge.controller, "end", FailOn(1))
    monkeypatch.setattr(mbs._resources, "capacity", FailOn(1, 2))
    with pytest.raises(MicroBatchFloorError, match="bookkeeping") as caught:
        mbs.backward(cross_entropy(model), pairs(8))
    assert fatal == [caught.value]
    assert [event.error for event in events if isinstance(event, CallFailed)] == [
        "MicroBatchFloorError"
    ]
    assert all(p.grad is None for p in model.parameters())


def test_a_call_that_fails_before_its_snapshot_leaves_buffers_as_they_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4)).double()
    mbs = elastic(model, micro_batch_size=4)
    mbs.backward(cross_entropy(model), pairs(8))
    mean = model[1].running_mean
    assert isinstance(mean, Tensor)
    mean.fill_(5.0)  # as by a checkpoint that is loaded between two calls
    seen = list[float]()
    read, fail = mbs._resources.streams.read, FailOn(1)

    def read_streams(**options: bool) -> Any:
        fail()
        return read(**options)

    monkeypatch.setattr(mbs._resources.streams, "read", read_streams)
    handle = model.register_forward_pre_hook(lambda *_: seen.append(float(mean[0])))
    mbs.backward(cross_entropy(model), pairs(8))
    handle.remove()
    assert fail.count > 1
    assert seen[0] == 5.0


def test_the_loss_of_a_failed_attempt_lets_go_of_its_graph() -> None:
    model, losses = mlp(), list[Tensor]()
    mbs = elastic(model, micro_batch_size=4)
    hook = FailOn(1)
    handle = list(model.parameters())[2].register_hook(lambda grad: hook())
    for micro in mbs.micro_batches(pairs(8)):
        with micro:
            loss = cross_entropy(model)(micro.data)
            losses.append(loss)
            micro.backward((loss, {"kept": loss.detach()}))
    handle.remove()
    assert mbs.stats.ooms == 1
    assert [loss.grad_fn is None for loss in losses] == [True] + [False] * (len(losses) - 1)


def test_the_loops_variable_keeps_no_failed_attempt_alive() -> None:
    model, alive = mlp(), list[weakref.ref[Tensor]]()
    mbs = elastic(model, micro_batch_size=4)
    micro = None
    try:
        for micro in mbs.micro_batches(pairs(8)):
            with micro:
                alive.append(weakref.ref(micro.data[0]))
                raise ValueError("a mistake")
    except ValueError:
        pass
    gc.collect()
    assert there(micro).data is None
    assert alive[0]() is None


@pytest.mark.no_oom_injection
def test_a_batch_is_freed_with_the_call_that_has_failed_over_it(door: int) -> None:
    model, alive = mlp(), list[weakref.ref[Tensor]]()
    mbs = elastic(model, micro_batch_size=4)

    def run() -> None:
        batch = pairs(8)
        alive.append(weakref.ref(batch[0]))
        with pytest.raises(ValueError, match="a mistake"):
            through(
                door, mbs, failing(model, FailOn(2, error=lambda: ValueError("a mistake"))), batch
            )

    run()
    gc.collect()  # of the error and its frames
    assert alive[0]() is None


LABELS = ("aten::eq", "aten::any")  # a look at the labels, before any attempt


@pytest.mark.parametrize("calls", [1, 2])
def test_a_step_that_edits_its_batch_is_recovered_from_wherever_memory_runs_out(
    calls: int, door: int
) -> None:
    wanted: list[Any] = []
    for inject in every_operation(stride=3, least=10):
        model, batch = mlp(), pairs(8)

        def loss_fn(piece: Any, model: nn.Module = model) -> Tensor:
            return cross_entropy(model)((piece[0].mul_(2.0), piece[1]))

        mbs = elastic(model, micro_batch_size=4)
        for _ in range(calls - 1):
            through(door, mbs, loss_fn, batch)
        model.zero_grad()
        with inject:
            result = through(door, mbs, loss_fn, batch)
        assert result.ooms == len(inject.hits) or inject.hits[0] in LABELS
        if inject.hits != ["aten::clone"]:  # there was no room for the copy
            assert torch.equal(batch[0], pairs(8)[0]), "the caller's batch is left alone"
        wanted = wanted or whole_gradient(model, lambda twin: loss_fn(pairs(8), twin))
        assert off_by(model, wanted) <= 1e-12


def test_a_batch_edited_by_a_failed_attempt_is_refused_once(
    model: nn.Sequential,
) -> None:
    # Where a step begins to do so after its first call, its pieces are views.
    mbs = elastic(model, micro_batch_size=4)

    def edits(fail: FailOn, by: float = 2.0) -> Any:
        def loss_fn(batch: Any) -> Tensor:
            if by != 1.0:
                batch[0].mul_(by)
            fail()
            return cross_entropy(model)(batch)

        return loss_fn

    mbs.backward(edits(FailOn(), 1.0), pairs(8))
    model.zero_grad()
    with pytest.raises(
        ReplayUnsafeError,
        match=r"changed in place.* From the next call on samples that are edited are copies",
    ):
        mbs.backward(edits(FailOn(1)), pairs(8))
    batch = pairs(8)
    result = mbs.backward(edits(FailOn(1)), batch)
    assert result.ooms == 1
    assert result.micro_batch_size < 4, "the refused failure counts for the size, too"
    assert (
        off_by(
            model,
            whole_gradient(model, lambda twin: cross_entropy(twin)((2 * pairs(8)[0], pairs(8)[1]))),
        )
        <= 1e-12
    )


def test_an_evaluation_that_recovers_keeps_the_users_gradients(
    model: nn.Sequential,
) -> None:
    bucket = torch.zeros(8, 6, dtype=torch.float64)
    # The user has made gradients that overlap.
    model[0].weight.grad, model[0].bias.grad = bucket, bucket[:, 0]
    before = [p.grad for p in model.parameters()]
    x = pairs(8)[0]
    with InjectOOM(at=[1]) as inject:
        assert elastic(model, micro_batch_size=4).evaluate(model, x).shape == (8, 4)
    assert inject.hits
    assert all(p.grad is grad for p, grad in zip(model.parameters(), before, strict=True))


def test_the_loss_is_read_again_after_memory_was_freed(
    model: nn.Sequential, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = elastic(model, micro_batch_size=4).backward(cross_entropy(model), pairs(8))
    stack, fail = torch.stack, FailOn(1)

    def stack_once(*args: Any) -> Tensor:
        fail()
        return stack(*args)

    monkeypatch.setattr(torch, "stack", stack_once)
    assert float(result) == pytest.approx(float(cross_entropy(model)(pairs(8)).detach()), rel=1e-12)
    assert fail.count == 2
