"""How long calls take, and what is reported of them: once, in order, without waiting, and at no cost where nothing listens."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor, nn

from elastic_mbs import CallDone, CallFailed, ElasticMBS, Event, Headroom, MemoryBudget, MicroBatchFloorError, OutOfMemory, Policy, Unavailable
from elastic_mbs.engine import state
from elastic_mbs.engine.result import StepResult
from elastic_mbs.engine.timing import CallClock, Telemetry, memory_figures
from elastic_mbs.events import EventLog
from elastic_mbs.memory import NoMeter
from elastic_mbs.memory.monitor import Monitor
from elastic_mbs.memory.sensor import Reading, Usage
from elastic_mbs.testing import InjectOOM
from tests.helpers.events import Heard
from tests.helpers.steps import cross_entropy, elastic, mlp, pairs, through

CPU = torch.device("cpu")


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class LateClock(CallClock[Any]):
    """A clock of a device that has done only as many calls as the test says."""

    def __init__(self, host: Callable[[], float]) -> None:
        super().__init__(host)
        self.arrived, self.count, self.calls = 0, 0, list[Any]()

    def stop(self, payload: Any) -> None:
        self.calls.append(payload)

    def done(self, *, wait: bool = False) -> Iterator[tuple[Any, float | None]]:
        while self.calls and (wait or self.count < self.arrived):
            self.count += 1
            yield self.calls.pop(0), float(self.count)


def runtime(heard: Heard, kind: type[CallClock[Any]] = CallClock, **options: Any) -> tuple[ElasticMBS, Telemetry, Clock, Any, nn.Module]:
    model, host = mlp(), Clock()
    mbs, clock = elastic(model, on_event=heard, **options), kind(host)
    telemetry = mbs._context.telemetry = Telemetry(mbs._context.log, clock)
    return mbs, telemetry, host, clock, model


# ---------------------------------------------------------------------- where nothing listens


def test_without_a_sink_or_a_log_no_call_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: object, **__: object) -> CallDone:
        raise AssertionError("CallDone was built")

    monkeypatch.setattr(state, "CallDone", never)
    model = mlp()
    with elastic(model, micro_batch_size=4) as mbs:
        mbs.backward(cross_entropy(model), pairs())
        mbs.eval(lambda batch: model(batch[0]), pairs())
    with elastic(model, on_event=print, enabled=False) as mbs:
        mbs.backward(cross_entropy(model), pairs())
    with pytest.raises(AssertionError, match="CallDone was built"), elastic(model, on_event=print) as mbs:  # this test can fail
        mbs.backward(cross_entropy(model), pairs())


# ---------------------------------------------------------------------- what is reported


@pytest.mark.no_oom_injection
@pytest.mark.parametrize("door", [1, 3])
def test_each_call_is_reported_once_with_its_loss(door: int) -> None:
    heard, model = Heard(), mlp()
    with elastic(model, on_event=heard, micro_batch_size=3) as mbs:
        for number in range(3):
            model.zero_grad()
            result = through(door, mbs, cross_entropy(model), pairs())
            assert len(heard.calls) == number + 1
            done = heard.calls[-1]
            assert done.loss == pytest.approx(float(result), rel=1e-14)
            assert (done.samples, done.pieces, done.size_before, done.micro_batch_size) == (8, 3, 3, 3)
            assert (done.mode, done.ooms, done.replayed_samples, done.seconds_lost) == ("train", 0, 0, 0.0)
            assert done.seconds is not None
            assert done.seconds > 0
            assert (done.free, done.held_by_others, done.total) == (None, None, None)  # it has no sensor
            assert replace(done, name="x").line()
        mbs.eval(lambda batch: model(batch[0]), pairs())
        done = heard.calls[-1]
        assert (done.mode, done.loss, done.samples, done.pieces) == ("eval", None, 8, 3)


def test_a_call_that_fails_is_reported_as_that_and_not_as_finished() -> None:
    heard, model = Heard(), mlp()

    def broken(batch: object) -> Tensor:
        raise ZeroDivisionError("by zero\nand more")

    with elastic(model, on_event=heard) as mbs:
        with pytest.raises(ZeroDivisionError):
            mbs.backward(broken, pairs())
        mbs.backward(cross_entropy(model), pairs())
        batch = pairs()
        with InjectOOM(always_from=1), pytest.raises(MicroBatchFloorError):
            mbs.backward(cross_entropy(model), batch)
    failed = [event for event in heard.events if isinstance(event, CallFailed)]
    assert len(heard.calls) == 1
    assert (failed[0].error, failed[0].message) == ("ZeroDivisionError", "by zero")
    assert failed[1].error == "MicroBatchFloorError"
    assert failed[1].ooms > 1
    assert 0 < failed[1].seconds_lost <= failed[1].seconds


def test_a_sink_that_fails_when_a_call_has_failed_does_not_hide_why() -> None:
    def broken(event: Event) -> None:
        raise ValueError("disk")

    def loss_fn(batch: object) -> Tensor:
        raise ZeroDivisionError

    with elastic(mlp(), on_event=broken) as mbs, pytest.raises(ZeroDivisionError) as caught:
        mbs.backward(loss_fn, pairs())
    assert caught.value.__notes__ == ["elastic_mbs: a function in on_event failed at CallFailed: ValueError: disk"]


def refuse_done(event: Event) -> None:
    if isinstance(event, CallDone):
        raise ZeroDivisionError


def test_an_error_in_a_users_sink_comes_when_the_call_is_over_and_its_gradient_whole() -> None:
    model = mlp()
    with elastic(model, on_event=refuse_done) as mbs:
        with pytest.raises(ZeroDivisionError):
            mbs.backward(cross_entropy(model), pairs())
        assert all(parameter.grad is not None for parameter in model.parameters())
        assert mbs.last_result is not None


@pytest.mark.no_oom_injection
@pytest.mark.parametrize("mode", ["piece", "step"])
def test_lost_is_the_time_of_the_attempts_that_failed(mode: str) -> None:
    heard = Heard()
    mbs, _, host, _, model = runtime(heard, micro_batch_size=4)
    loss_fn, attempts = cross_entropy(model), 0

    def step(batch: Any) -> Tensor:
        nonlocal attempts
        attempts += 1
        host.now += 1.0
        loss: Tensor = loss_fn(batch)
        if attempts == 2:
            if mode == "step":  # a failure in a backward before any has succeeded is replayed from the start
                loss.register_hook(fail)
            else:
                fail(loss)
        return loss

    def fail(_: Tensor) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB.")

    with mbs:
        if mode == "piece":
            attempts = -2
            mbs.backward(step, pairs())  # two clean pieces first
            attempts, heard.events = 0, []
            model.zero_grad()
        else:
            attempts = 1
        mbs.backward(step, pairs())
    failures = [event for event in heard.events if isinstance(event, OutOfMemory)]
    assert [(event.mode, event.seconds_lost, event.requested) for event in failures] == [(mode, 1.0, 2 << 20)]
    (done,) = heard.calls
    assert done.seconds_lost == 1.0
    assert done.seconds == host.now - 100.0 - (2.0 if mode == "piece" else 0.0)
    assert done.ended == host.now


def test_what_a_replay_from_the_start_loses_is_counted_once() -> None:
    host = Clock()
    telemetry = Telemetry(EventLog(), CallClock(host))
    telemetry.begin(CPU)
    host.now += 1  # a piece that commits
    telemetry.attempt()
    host.now += 2
    assert telemetry.failed("piece") == 2
    telemetry.attempt()
    host.now += 4
    assert telemetry.failed("step") == 5  # this attempt and the piece that had committed
    telemetry.attempt()
    host.now += 8
    assert telemetry.failed("isolate") == 8
    telemetry.begin(CPU)
    assert telemetry.failed("step") == 0


def test_reading_the_loss_takes_no_memory_and_waits_for_nothing() -> None:
    model = mlp()
    assert str(StepResult(((0, 1),), 1, _losses=(torch.tensor(float("nan")),)).loss_on_host()) == "nan"
    assert StepResult(((0, 1),), 1, _losses=(torch.zeros((), device="meta"),)).loss_on_host() is None
    with MemoryBudget("1GiB", [model]) as budget, elastic(model, micro_batch_size=2, on_event=Heard()) as mbs:
        result = mbs.backward(cross_entropy(model), pairs())
        budget.reset_peak()
        rest = budget.live
        assert result.loss_on_host() is not None
        assert budget.peak == rest


def test_the_sinks_of_this_package_hear_when_calls_begin_and_when_the_runtime_is_closed() -> None:
    heard, model = Heard(), mlp()
    with elastic(model, on_event=heard) as mbs:
        mbs.backward(cross_entropy(model), pairs())
        mbs.backward(cross_entropy(model), pairs())
        assert (heard.begun, heard.closed) == (2, 0)
    assert heard.closed == 1


# ---------------------------------------------------------------------- memory


class Meter(NoMeter):
    def usage(self) -> Usage | None:
        return Usage(1, 2, 3, 4, 0)


ROOM = Headroom(free=50, total=100, held_by_others=30, source="test", at=0.0)


@pytest.mark.parametrize(
    ("meter", "reading", "figures"),
    [
        (Meter(), ROOM, (1, 2, 3, 4, 50, 30, 100)),
        (NoMeter(), ROOM, (None, 20, None, None, 50, 30, 100)),  # what is neither free nor others' is ours
        (Meter(), Unavailable("gone"), (1, 2, 3, 4, None, None, None)),
        (NoMeter(), Unavailable("gone"), (None,) * 7),
    ],
    ids=["both", "reading", "meter", "none"],
)
def test_memory_is_reported_as_far_as_it_is_known(meter: NoMeter, reading: Reading, figures: tuple[int | None, ...]) -> None:
    sensor = Mock(read=Mock(return_value=reading))
    monitor = Monitor(sensor, interval=0)
    monitor.read_now()
    assert tuple(memory_figures(meter, monitor).values()) == figures
    assert sensor.read.call_count == 1  # the latest reading, never a new one


# ---------------------------------------------------------------------- figures that come late


def test_a_call_is_reported_when_its_figures_have_arrived_and_in_order() -> None:
    heard = Heard()
    mbs, _, _, clock, model = runtime(heard, LateClock)
    with mbs:
        for arrived in (0, 0, 1, 3):
            clock.arrived = arrived
            mbs.backward(cross_entropy(model), pairs())
            assert [done.seconds for done in heard.calls] == [1.0, 2.0, 3.0][:arrived]
    assert [done.seconds for done in heard.calls] == [1.0, 2.0, 3.0, 4.0]  # the rest when the runtime was closed
    assert heard.closed == 1


def test_a_users_sink_that_raises_at_the_end_keeps_no_file_open_and_loses_no_other_call() -> None:
    heard = Heard()
    mbs, telemetry, _, _, model = runtime(heard, LateClock)
    for _ in range(2):
        mbs.backward(cross_entropy(model), pairs())
    sinks, mbs._context.log._sinks, mbs._context.log._closing = mbs._context.log._sinks, (heard, refuse_done), (heard,)
    with pytest.raises(ZeroDivisionError):
        mbs.close()
    assert heard.closed == 1
    mbs._context.log._sinks = sinks
    telemetry.rest()
    assert len(heard.calls) == 2


def test_a_forked_child_reports_nothing_of_its_parents_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    heard = Heard()
    mbs, telemetry, _, _, model = runtime(heard, LateClock)
    mbs.backward(cross_entropy(model), pairs())
    own = os.getpid()
    monkeypatch.setattr(os, "getpid", lambda: own + 1)
    telemetry.rest()
    assert heard.calls == []
    monkeypatch.undo()
    mbs.close()
    assert len(heard.calls) == 1


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype feature")  # said once in a process, by whichever test is the first
def test_reporting_calls_never_waits_for_the_device() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 512), nn.Tanh(), nn.Linear(512, 8)).to(device)
    batch = torch.randn(64, 64, device=device)
    heard = Heard()
    losses = []
    try:
        with ElasticMBS(model, micro_batch_size=16, on_event=heard, policy=Policy(max_micro_batch_size=16)) as mbs:
            deadline = time.monotonic() + 120
            while not isinstance(mbs.headroom, Headroom) and time.monotonic() < deadline:
                time.sleep(0.01)  # the first call may be over before NVML has answered for the first time, and would tell of no total
            for i in range(8):
                model.zero_grad()
                torch.cuda.set_sync_debug_mode("error" if i >= 2 else "default")
                result = mbs.backward(lambda x: model(x).square().mean(), batch)
                torch.cuda.set_sync_debug_mode("default")
                losses.append(float(result))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert [call.loss for call in heard.calls] == losses
    assert all(call.seconds is not None and call.seconds > 0 for call in heard.calls)
    assert all(call.allocated and call.reserved and call.total for call in heard.calls)
