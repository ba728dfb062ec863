"""What is told of a finished call, when, and that it costs nothing where nobody listens."""

import os
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

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
    MemoryOptions,
    MicroBatchFloorError,
    OutOfMemory,
    Policy,
    Unavailable,
)
from elastic_mbs.engine import call, telemetry
from elastic_mbs.engine.result import StepResult
from elastic_mbs.engine.telemetry import Figures, Telemetry, memory_figures
from elastic_mbs.events import EventLog
from elastic_mbs.memory import NoMeter, NoSensor
from elastic_mbs.memory.monitor import Monitor
from elastic_mbs.memory.sensor import Reading, Usage
from elastic_mbs.testing import InjectOOM
from tests.helpers.events import Heard
from tests.helpers.steps import cross_entropy, elastic, mlp, pairs

pytestmark = pytest.mark.injectable


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Late:
    """The figures of a device that is still working."""

    def __init__(self, seconds: float, waits: list[float]) -> None:
        self.seconds, self.arrived, self.waits = seconds, False, waits

    def ready(self) -> bool:
        return self.arrived

    def wait(self) -> None:
        self.waits.append(self.seconds)

    def read(self) -> tuple[float | None, float | None]:
        return self.seconds, self.seconds * 10


class LateTelemetry(Telemetry):
    """A telemetry whose calls run on a device."""

    def __init__(self, log: EventLog, clock: Callable[[], float]) -> None:
        super().__init__(log, clock)
        self.late: list[Late] = []
        self.waits: list[float] = []

    def _figures(self, result: StepResult | None, seconds: float) -> Figures:
        self.late.append(Late(float(len(self.late)), self.waits))
        return self.late[-1]


def runtime(heard: Heard, kind: type[Telemetry] = Telemetry, **options: Any) -> tuple[ElasticMBS, Any, Clock, nn.Module]:
    model, clock = mlp(), Clock()
    mbs = elastic(model, on_event=heard, **options)
    mbs._context.telemetry = kind(mbs._context.log, clock)
    return mbs, mbs._context.telemetry, clock, model


# ---------------------------------------------------------------------- where nobody listens


def test_without_a_sink_or_a_log_no_call_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: object, **__: object) -> CallDone:
        raise AssertionError("CallDone was built")

    monkeypatch.setattr(call, "CallDone", never)
    model = mlp()
    with elastic(model, micro_batch_size=4) as mbs:
        assert mbs._context.telemetry is None
        mbs.backward(cross_entropy(model), pairs())
        mbs.eval(lambda batch: model(batch[0]), pairs())
    with pytest.raises(AssertionError, match="CallDone was built"), elastic(model, on_event=print) as mbs:  # this test can fail
        mbs.backward(cross_entropy(model), pairs())


def test_a_disabled_runtime_tells_of_nothing() -> None:
    heard, model = Heard(), mlp()
    with elastic(model, on_event=heard, enabled=False) as mbs:
        mbs.backward(cross_entropy(model), pairs())
    assert heard.events == []


# ---------------------------------------------------------------------- what is told


@pytest.mark.no_oom_injection
@pytest.mark.parametrize("door", [1, 3])
def test_each_call_is_told_of_once_with_its_loss(door: int) -> None:
    heard, model = Heard(), mlp()
    loss_fn = cross_entropy(model)
    with elastic(model, on_event=heard, micro_batch_size=3) as mbs:
        for number in range(3):
            model.zero_grad()
            if door == 1:
                mbs.backward(loss_fn, pairs())
            else:
                for micro in mbs.micro_batches(pairs()):
                    with micro:
                        micro.backward(loss_fn(micro.data))
            assert len(heard.calls) == number + 1
            call, result = heard.calls[-1], mbs.last_result
            assert result is not None
            assert call.loss == pytest.approx(float(result), rel=1e-14)
            assert (call.samples, call.pieces, call.size_before, call.micro_batch_size) == (8, 3, 3, 3)
            assert (call.mode, call.ooms, call.replayed_samples, call.seconds_lost) == ("train", 0, 0, 0.0)
            assert call.seconds is not None
            assert call.seconds > 0


@pytest.mark.no_oom_injection
def test_an_eval_is_told_of_without_a_loss() -> None:
    heard, model = Heard(), mlp()
    with elastic(model, on_event=heard, micro_batch_size=4) as mbs:
        mbs.eval(lambda batch: model(batch[0]), pairs())
    (call,) = heard.calls
    assert (call.mode, call.loss, call.samples, call.pieces) == ("eval", None, 8, 2)


def test_a_call_that_fails_is_told_of_as_that_and_not_as_finished() -> None:
    heard, model = Heard(), mlp()
    failed: list[CallFailed] = []

    def broken(batch: object) -> Tensor:
        raise ZeroDivisionError("by zero\nand more")

    def listen(event: Event) -> None:
        if isinstance(event, CallFailed):
            failed.append(event)

    with elastic(model, on_event=[heard, listen]) as mbs:
        with pytest.raises(ZeroDivisionError):
            mbs.backward(broken, pairs())
        mbs.backward(cross_entropy(model), pairs())
        batch = pairs()
        with InjectOOM(always_from=1), pytest.raises(MicroBatchFloorError):
            mbs.backward(cross_entropy(model), batch)
    assert len(heard.calls) == 1
    assert [(event.error, event.message) for event in failed[:1]] == [("ZeroDivisionError", "by zero")]
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


def test_an_error_in_a_users_sink_comes_when_the_call_is_over_and_its_gradient_whole() -> None:
    def broken(event: Event) -> None:
        if isinstance(event, CallDone):
            raise ZeroDivisionError

    model = mlp()
    with elastic(model, on_event=broken) as mbs:
        with pytest.raises(ZeroDivisionError):
            mbs.backward(cross_entropy(model), pairs())
        assert all(parameter.grad is not None for parameter in model.parameters())
        assert mbs.last_result is not None


@pytest.mark.no_oom_injection
@pytest.mark.parametrize("mode", ["piece", "step"])
def test_lost_is_the_time_of_the_attempts_that_failed(mode: str) -> None:
    heard = Heard()
    mbs, _, clock, model = runtime(heard, micro_batch_size=4)
    loss_fn, attempts = cross_entropy(model), 0

    def step(batch: Any) -> Tensor:
        nonlocal attempts
        attempts += 1
        clock.now += 1.0
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
    (call,) = heard.calls
    assert call.seconds_lost == 1.0
    assert call.seconds == clock.now - 100.0 - (2.0 if mode == "piece" else 0.0)
    assert call.ended == clock.now


def test_what_a_replay_from_the_start_loses_is_counted_once() -> None:
    clock = Clock()
    watch = Telemetry(EventLog(), clock)
    watch.begin(torch.device("cpu"))
    clock.now += 1  # a piece that commits
    watch.attempt()
    clock.now += 2
    assert watch.failed("piece") == 2
    watch.attempt()
    clock.now += 4
    assert watch.failed("step") == 5  # this attempt and the piece that had committed
    watch.attempt()
    clock.now += 8
    assert watch.failed("isolate") == 8
    watch.begin(torch.device("cpu"))
    assert watch.failed("step") == 0


def test_a_loss_that_is_not_a_number_is_told_as_it_is() -> None:
    heard, model = Heard(), mlp()
    with elastic(model, on_event=heard) as mbs:
        mbs.backward(lambda batch: model(batch[0]).sum() * float("nan"), pairs())
    (call,) = heard.calls
    assert call.loss is not None
    assert call.loss != call.loss


def test_a_loss_that_cannot_be_read_stays_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    class Stubborn:
        device = torch.device("cpu")

        def __float__(self) -> float:
            raise torch.OutOfMemoryError

    assert telemetry._loss_on_host(StepResult(((0, 1),), 1, _losses=(Stubborn(),))) is None  # type: ignore[arg-type]  # it acts as one
    assert telemetry._loss_on_host(StepResult(((0, 1),), 1, _losses=(torch.zeros((), device="meta"),))) is None


def test_reading_the_loss_takes_no_memory() -> None:
    heard, model = Heard(), mlp()
    with (
        MemoryBudget("1GiB", [model]) as budget,
        ElasticMBS(model, micro_batch_size=2, on_event=heard, memory=MemoryOptions(monitor_interval=0)) as mbs,
    ):
        mbs.backward(cross_entropy(model), pairs())
        budget.reset_peak()
        rest = budget.live
        assert mbs.last_result is not None
        telemetry._loss_on_host(mbs.last_result)
        assert budget.peak == rest


def test_the_sinks_of_this_package_are_told_when_calls_begin_and_when_the_runtime_is_closed() -> None:
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


class Fixed:
    def __init__(self, reading: Reading) -> None:
        self.reading, self.reads = reading, 0

    def read(self) -> Reading:
        self.reads += 1
        return self.reading


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
def test_memory_is_told_as_far_as_it_is_known(meter: NoMeter, reading: Reading, figures: tuple[int | None, ...]) -> None:
    sensor = Fixed(reading)
    monitor = Monitor(sensor, interval=0)
    monitor.poll()
    assert tuple(memory_figures(meter, monitor).values()) == figures
    assert sensor.reads == 1  # the latest reading, never a new one


# ---------------------------------------------------------------------- figures that come late


def test_a_call_is_told_of_when_its_figures_have_arrived_and_in_order() -> None:
    heard = Heard()
    mbs, watch, _, model = runtime(heard, LateTelemetry)
    with mbs:
        for _ in range(3):
            mbs.backward(cross_entropy(model), pairs())
        assert heard.calls == []
        watch.late[1].arrived = True  # not before the one that came first
        mbs.backward(cross_entropy(model), pairs())
        assert heard.calls == []
        watch.late[0].arrived = True
        mbs.backward(cross_entropy(model), pairs())
        assert [(call.seconds, call.loss) for call in heard.calls] == [(0.0, 0.0), (1.0, 10.0)]
        assert watch.waits == []
    assert [call.seconds for call in heard.calls] == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert watch.waits == [2.0, 3.0, 4.0]  # only when the runtime was closed
    assert heard.closed == 1


def test_a_users_sink_that_raises_at_the_end_keeps_no_file_open() -> None:
    heard = Heard()

    def broken(event: Event) -> None:
        if isinstance(event, CallDone):
            raise ZeroDivisionError

    mbs, _, _, model = runtime(heard, LateTelemetry)
    mbs._context.log._sinks = (heard, broken)
    mbs._context.log._closing = (heard,)
    mbs.backward(cross_entropy(model), pairs())
    with pytest.raises(ZeroDivisionError):
        mbs.close()
    assert heard.closed == 1


def test_a_forked_child_tells_nothing_of_its_parents_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    heard = Heard()
    mbs, watch, _, model = runtime(heard, LateTelemetry)
    mbs.backward(cross_entropy(model), pairs())
    own = os.getpid()
    monkeypatch.setattr(os, "getpid", lambda: own + 1)
    watch.rest()
    assert heard.calls == []
    monkeypatch.undo()
    mbs.close()
    assert len(heard.calls) == 1


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype feature")  # said once in a process, by whichever test is the first
def test_telling_of_calls_never_waits_for_the_device() -> None:
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


def test_a_runtime_without_a_sensor_tells_of_its_calls_all_the_same() -> None:
    heard, model = Heard(), mlp()
    with ElasticMBS(model, on_event=heard, micro_batch_size=4, memory=MemoryOptions(sensor=NoSensor("none"), monitor_interval=0)) as mbs:
        mbs.backward(cross_entropy(model), pairs())
    (call,) = heard.calls
    assert (call.free, call.held_by_others, call.total) == (None, None, None)
    assert replace(call, name="x").line()
