"""Each call is reported once, in order, with its seconds, and without a wait.

A report costs nothing where nothing listens.
"""

import os
import time
from collections import deque
from collections.abc import Iterator
from functools import partial
from typing import Any, ClassVar
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor, nn

from elastic_mbs import (
    CallDone,
    CallFailed,
    ElasticMBS,
    Event,
    Headroom,
    MemoryBudget,
    MicroBatchFloorError,
    OutOfMemory,
    Policy,
    Unavailable,
)
from elastic_mbs.device import Accelerator
from elastic_mbs.engine import report
from elastic_mbs.engine.outcome import timing
from elastic_mbs.engine.outcome.result import StepResult, loss_on_host
from elastic_mbs.engine.outcome.timing import Stopwatch, Telemetry, Timed, known, memory_figures
from elastic_mbs.memory import NoMeter
from elastic_mbs.memory.monitor import Monitor
from elastic_mbs.memory.sensor import Reading, Usage
from elastic_mbs.testing import InjectOOM
from tests.helpers.device_sim import Clock
from tests.helpers.events import Heard
from tests.helpers.steps import FailOn, cross_entropy, elastic, mlp, pairs, there, through


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock(100.0)
    monkeypatch.setattr(timing, "monotonic", clock)
    return clock


class Device:
    """A device that has finished `arrived` calls; the n-th took n seconds."""

    arrived = ended = 0

    def known(self, timed: Timed[Any], *, wait: bool = False) -> Iterator[tuple[Any, float | None]]:
        while timed and (wait or self.ended < self.arrived):
            self.ended += 1
            yield timed.popleft()[1], float(self.ended)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    late = Device()
    monkeypatch.setattr(timing, "known", late.known)
    return late


def telemetry_of(mbs: ElasticMBS) -> Telemetry:
    return there(mbs._resources.telemetry)


def test_without_a_sink_or_a_log_no_call_is_reported(
    model: nn.Sequential, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report, "CallDone", Mock(side_effect=AssertionError("CallDone was built")))
    with elastic(model, micro_batch_size=4) as mbs:
        mbs.backward(cross_entropy(model), pairs())
        mbs.evaluate(lambda batch: model(batch[0]), pairs())
    with elastic(model, on_event=print, enabled=False) as mbs:
        mbs.backward(cross_entropy(model), pairs())
    # The control: with a sink the mock is called.
    with (
        pytest.raises(AssertionError, match="CallDone was built"),
        elastic(model, on_event=print) as mbs,
    ):
        mbs.backward(cross_entropy(model), pairs())


def test_sinks_hear_each_call_begin_and_end_once_with_its_loss(
    door: int,
) -> None:
    heard, model = Heard(), mlp()
    with elastic(model, on_event=heard, micro_batch_size=3) as mbs:
        for number in range(1, 4):
            model.zero_grad()
            result = through(door, mbs, cross_entropy(model), pairs())
            assert (heard.begun, len(heard.calls), heard.closed) == (number, number, 0)
            done = heard.calls[-1]
            assert done.loss == pytest.approx(float(result), rel=1e-14)
            assert (done.samples, done.pieces, done.size_before, done.micro_batch_size) == (
                8,
                3,
                3,
                3,
            )
            assert (done.mode, done.ooms, done.replayed_samples, done.seconds_lost) == (
                "train",
                0,
                0,
                0.0,
            )
            assert there(done.seconds) > 0
            # This runtime has no sensor.
            assert (done.free, done.held_by_others, done.total) == (None, None, None)
        mbs.evaluate(lambda batch: model(batch[0]), pairs())
        done = heard.calls[-1]
        assert (done.mode, done.loss, done.samples, done.pieces) == ("eval", None, 8, 3)
    assert heard.closed == 1


def test_a_call_that_fails_is_reported_as_that_and_not_as_finished() -> None:
    heard, model = Heard(), mlp()
    batch = pairs()
    with elastic(model, on_event=heard) as mbs:
        with pytest.raises(ZeroDivisionError):
            mbs.backward(Mock(side_effect=ZeroDivisionError("by zero\nand more")), batch)
        mbs.backward(cross_entropy(model), batch)
        with InjectOOM(always_from=1), pytest.raises(MicroBatchFloorError):
            mbs.backward(cross_entropy(model), batch)
    failed = [event for event in heard.events if isinstance(event, CallFailed)]
    assert len(heard.calls) == 1
    assert (failed[0].error, failed[0].message) == ("ZeroDivisionError", "by zero")
    assert failed[1].error == "MicroBatchFloorError"
    assert failed[1].ooms > 1
    assert 0 < failed[1].seconds_lost <= failed[1].seconds


def test_a_sink_that_fails_when_a_call_has_failed_does_not_hide_why() -> None:
    with (
        elastic(mlp(), on_event=Mock(side_effect=ValueError("disk"))) as mbs,
        pytest.raises(ZeroDivisionError) as caught,
    ):
        mbs.backward(Mock(side_effect=ZeroDivisionError), pairs())
    assert caught.value.__notes__ == [
        "elastic_mbs: a function in on_event failed at CallFailed: ValueError: disk"
    ]


def refuse_done(event: Event) -> None:
    if isinstance(event, CallDone):
        raise ZeroDivisionError


def test_an_error_of_a_sink_comes_after_the_whole_gradient(
    model: nn.Sequential,
) -> None:
    with elastic(model, on_event=refuse_done) as mbs, pytest.raises(ZeroDivisionError):
        mbs.backward(cross_entropy(model), pairs())
    assert all(parameter.grad is not None for parameter in model.parameters())
    assert mbs.last_result is not None


REFUSED, PERHAPS_EARLIER = (
    torch.OutOfMemoryError("CUDA out of memory."),
    RuntimeError("CUDA error: out of memory"),
)


@pytest.mark.parametrize(
    ("error", "mode", "lost"), [(REFUSED, "piece", [1.0]), (PERHAPS_EARLIER, "step", [2.0, 3.0])]
)
def test_lost_is_the_time_of_the_attempts_that_are_undone(
    host: Clock, error: Exception, mode: str, lost: list[float]
) -> None:
    heard, model, fail, began = Heard(), mlp(), FailOn(2, 5, error=lambda: error), host.now

    def step(batch: Any) -> Tensor:
        host.now += 1.0
        fail()
        return cross_entropy(model)(batch)

    with elastic(model, micro_batch_size=4, min_micro_batch_size=2, on_event=heard) as mbs:
        mbs.backward(step, pairs())
    failures = [event for event in heard.events if isinstance(event, OutOfMemory)]
    assert [(event.mode, event.seconds_lost) for event in failures] == [
        (mode, seconds) for seconds in lost
    ]
    done = heard.calls[-1]
    assert (done.seconds_lost, done.seconds, done.ended) == (sum(lost), host.now - began, host.now)


@pytest.mark.parametrize("inner", ["eval", "backward"])
def test_a_call_inside_a_callback_keeps_the_outer_calls_time(host: Clock, inner: str) -> None:
    heard, model = Heard(), mlp()
    with elastic(model, micro_batch_size=8, on_event=heard) as mbs:
        call = (
            partial(mbs.evaluate, model, pairs()[0])
            if inner == "eval"
            else partial(mbs.backward, cross_entropy(model), pairs())
        )
        for micro in mbs.micro_batches(pairs()):
            with micro:
                host.now += 4.0
                micro.backward(cross_entropy(model)(micro.data))
                micro.on_commit(call)
    assert [done.seconds for done in heard.calls] == [0.0, 4.0]


def test_reading_the_loss_takes_no_memory_and_waits_for_nothing(model: nn.Sequential) -> None:
    assert (
        str(loss_on_host(StepResult(((0, 1),), 1, _losses=(torch.tensor(float("nan")),)))) == "nan"
    )
    assert loss_on_host(StepResult(((0, 1),), 1, _losses=(torch.zeros((), device="meta"),))) is None
    with (
        MemoryBudget("1GiB", [model]) as budget,
        elastic(model, micro_batch_size=2, on_event=Heard()) as mbs,
    ):
        result = mbs.backward(cross_entropy(model), pairs())
        budget.reset_peak()
        rest = budget.live
        assert loss_on_host(result) is not None
        assert budget.peak == rest


class NoRoom:
    """A loss on the host that cannot be read for want of memory."""

    def __float__(self) -> float:
        raise MemoryError


def test_a_loss_without_room_for_one_number_is_unknown(
    model: nn.Sequential, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timing, "_fetch", lambda result, accelerator: NoRoom())
    heard = Heard()
    with elastic(model, micro_batch_size=2, on_event=heard) as mbs:
        assert mbs.backward(cross_entropy(model), pairs()).ooms == 0
    assert [done.loss for done in heard.calls] == [None]


class Meter(NoMeter):
    def usage(self) -> Usage | None:
        return Usage(1, 2, 3, 4, 0)


ROOM = Headroom(free=50, total=100, held_by_others=30, source="test", at=0.0)


@pytest.mark.parametrize(
    ("meter", "reading", "figures"),
    [
        (Meter(), ROOM, (1, 2, 3, 4, 50, 30, 100)),
        # Memory that is neither free nor held by others is ours.
        (NoMeter(), ROOM, (None, 20, None, None, 50, 30, 100)),
        (Meter(), Unavailable("gone"), (1, 2, 3, 4, None, None, None)),
        (NoMeter(), Unavailable("gone"), (None,) * 7),
    ],
    ids=["both", "reading", "meter", "none"],
)
def test_memory_is_reported_as_far_as_it_is_known(
    meter: NoMeter, reading: Reading, figures: tuple[int | None, ...]
) -> None:
    sensor = Mock(read=Mock(return_value=reading))
    monitor = Monitor(sensor, interval=0)
    monitor.read_now()
    assert tuple(memory_figures(meter, monitor).values()) == figures
    assert sensor.read.call_count == 1  # figures take the latest reading


def test_calls_are_reported_in_order_when_their_figures_arrive(device: Device) -> None:
    heard, model = Heard(), mlp()
    with elastic(model, on_event=heard) as mbs:
        for arrived in (0, 0, 1, 3):
            device.arrived = arrived
            mbs.backward(cross_entropy(model), pairs())
            assert [done.seconds for done in heard.calls] == [1.0, 2.0, 3.0][:arrived]
    # Closing the runtime has reported the rest.
    assert [done.seconds for done in heard.calls] == [1.0, 2.0, 3.0, 4.0]
    assert heard.closed == 1


@pytest.mark.usefixtures("device")
def test_a_sink_that_raises_at_the_end_loses_no_other_call() -> None:
    heard, model, broken = Heard(), mlp(), True
    mbs = elastic(model, on_event=[heard, lambda event: refuse_done(event) if broken else None])
    for _ in range(2):
        mbs.backward(cross_entropy(model), pairs())
    with pytest.raises(ZeroDivisionError):
        mbs.close()
    assert heard.closed == 1
    broken = False
    telemetry_of(mbs).rest()
    assert len(heard.calls) == 2


@pytest.mark.usefixtures("device")
def test_a_forked_child_reports_nothing_of_its_parents_calls(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    heard, model = Heard(), mlp()
    mbs = elastic(model, on_event=heard)
    mbs.backward(cross_entropy(model), pairs())
    with monkeypatch.context() as patch:
        patch.setattr(os, "getpid", lambda: -1)
        telemetry_of(mbs).rest()
    assert heard.calls == []
    mbs.close()
    assert len(heard.calls) == 1


class DeviceEvent:
    """An event on a device that has done its work up to `horizon`."""

    now: ClassVar[float] = 0.0
    horizon: ClassVar[float] = 0.0
    lost: ClassVar[bool] = False
    streams: ClassVar[list[torch.device]] = []

    def __init__(self, device: torch.device, *, enable_timing: bool) -> None:
        assert enable_timing
        assert device.type == "cuda"
        self.at = 0.0

    def record(self, stream: torch.device) -> None:
        self.at = DeviceEvent.now
        DeviceEvent.streams.append(stream)

    def query(self) -> bool:
        self.elapsed_time(self)
        return self.at <= DeviceEvent.horizon

    def synchronize(self) -> None:
        DeviceEvent.horizon = max(DeviceEvent.horizon, self.at)

    def elapsed_time(self, end: "DeviceEvent") -> float:
        if DeviceEvent.lost:
            raise RuntimeError("CUDA error: unspecified launch failure")
        return 1000 * (end.at - self.at)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> torch.device:
    monkeypatch.setattr(torch, "Event", DeviceEvent)
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: device)
    for name, value in {"now": 0.0, "horizon": 0.0, "lost": False, "streams": []}.items():
        monkeypatch.setattr(DeviceEvent, name, value)
    return torch.device("cuda", 1)


def test_times_of_a_device_come_once_in_order_when_work_is_done(
    cuda: torch.device,
) -> None:
    timed: Timed[int] = deque()
    for number in range(4):
        watch = Stopwatch(Accelerator(cuda))
        DeviceEvent.now += 1 + number
        watch.stop()
        timed.append((watch, number))
    assert list(known(timed)) == []
    DeviceEvent.horizon = 3
    assert list(known(timed)) == [(0, 1.0), (1, 2.0)]
    assert list(known(timed)) == []
    assert list(known(timed, wait=True)) == [(2, 3.0), (3, 4.0)]
    assert DeviceEvent.streams == [cuda] * 8  # the model's device
    DeviceEvent.lost = True
    assert list(known(deque([(watch, 0)]))) == [(0, None)]


@pytest.mark.gpu
# Torch says it once in a process.
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype feature")
def test_reporting_calls_never_waits_for_the_device() -> None:
    where = torch.device("cuda", torch.cuda.current_device())
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 512), nn.Tanh(), nn.Linear(512, 8)).to(where)
    batch = torch.randn(64, 64, device=where)
    heard = Heard()
    losses = []
    try:
        with ElasticMBS(
            model, micro_batch_size=16, on_event=heard, policy=Policy(max_micro_batch_size=16)
        ) as mbs:
            deadline = time.monotonic() + 120
            while not isinstance(mbs.headroom, Headroom) and time.monotonic() < deadline:
                # A call that is over before the first answer of NVML would have no total.
                time.sleep(0.01)
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
