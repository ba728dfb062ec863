"""Promise 6: every retry loop has a cap; a sensor failure stops growth, never training."""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from elastic_mbs import (
    ElasticMBS,
    Headroom,
    MemoryBudget,
    MemoryOptions,
    MicroBatchFloorError,
    Policy,
    Unavailable,
)
from elastic_mbs.events import Event, OutOfMemory, Resized, WaitingForMemory
from elastic_mbs.memory import NoSensor, Reading
from elastic_mbs.testing import InjectOOM
from tests.helpers.steps import (
    FailOn,
    Pair,
    cross_entropy,
    elastic,
    failing,
    mlp,
    off_by,
    pairs,
    through,
    whole_gradient,
)

pytestmark = pytest.mark.injectable

DOORS = [1, 3]
MIB = 1024**2


def _always(requested: str = "2.00 GiB") -> FailOn:
    return FailOn(
        *range(1, 1000),
        error=lambda: torch.OutOfMemoryError(
            f"CUDA out of memory. Tried to allocate {requested}. GPU 0 has …"
        ),
    )


class _Scripted:
    """A sensor with given readings, the last of which repeats for ever."""

    def __init__(self, *readings: Reading | Exception) -> None:
        self.readings = list(readings)
        self.reads = 0

    def read(self) -> Reading:
        self.reads += 1
        reading = self.readings.pop(0) if len(self.readings) > 1 else self.readings[0]
        if isinstance(reading, Exception):
            raise reading
        return reading


def _room(free: int, others: int, total: int = 1024 * MIB) -> Headroom:
    return Headroom(free=free, total=total, held_by_others=others, source="test", at=0.0)


def _with_sleep(mbs: ElasticMBS) -> list[float]:
    naps: list[float] = []
    mbs._resources.sleep = naps.append
    return naps


# ---------------------------------------------------------------------- caps


@pytest.mark.parametrize(
    ("n", "size", "attempts"), [(8, 8, 5), (8, 1, 2), (1, 1, 2), (64, 64, 8), (13, 13, 5)]
)
@pytest.mark.parametrize("door", DOORS)
def test_persistent_oom_ends_after_one_attempt_per_halving_and_one_more(
    door: int, n: int, size: int, attempts: int
) -> None:
    model, fail = mlp(), _always()
    mbs = elastic(model, micro_batch_size=size)
    naps = _with_sleep(mbs)
    with pytest.raises(MicroBatchFloorError):
        through(door, mbs, failing(model, fail), pairs(n))
    assert fail.count == attempts
    assert naps == []
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize(
    ("minimum", "align", "attempts"), [(4, 1, 3), (1, 4, 3), (3, 4, 3), (16, 1, 2)]
)
def test_the_floor_is_the_smallest_allowed_micro_batch(
    minimum: int, align: int, attempts: int
) -> None:
    model, fail, sizes = mlp(), _always(), []

    def loss_fn(b: Pair) -> Tensor:
        sizes.append(len(b[0]))
        fail()
        raise AssertionError("it always fails")

    mbs = elastic(
        model, micro_batch_size=max(minimum, 8), min_micro_batch_size=minimum, align=align
    )
    with pytest.raises(MicroBatchFloorError):
        mbs.backward(loss_fn, pairs(8))
    assert len(sizes) == attempts
    assert min(sizes) >= min(8, max(minimum, align))


@pytest.mark.no_oom_injection
@pytest.mark.parametrize("name", ["plain", "dropout"])
@pytest.mark.parametrize("door", DOORS)
def test_replays_from_the_start_are_capped(door: int, name: str) -> None:
    # Backward always fails at the last leaf. The others have committed, so the batch starts over.
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(6, 8), nn.Dropout(0.5) if name == "dropout" else nn.Tanh(), nn.Linear(8, 4)
    ).double()
    events, started = list[Event](), [0]

    def fail(grad: Tensor) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    mbs = elastic(model, micro_batch_size=64, on_event=events.append)
    mbs.backward(cross_entropy(model), pairs(64))
    model.zero_grad()
    weight = next(model.parameters())
    handle = weight.register_hook(fail)
    seen = mbs.stats.ooms

    def loss_fn(b: Pair) -> Tensor:
        started[0] += 1
        loss: Tensor = cross_entropy(model)(b)
        return loss

    with pytest.raises(MicroBatchFloorError):
        through(door, mbs, loss_fn, pairs(64))
    handle.remove()
    assert mbs.stats.ooms == seen
    failures = sum(isinstance(event, OutOfMemory) for event in events)
    assert failures == started[0] <= 16 + 4 * 7 + 1
    assert all(p.grad is None for p in model.parameters())
    assert through(door, mbs, loss_fn, pairs(64)).ooms == 0


@pytest.mark.no_oom_injection
@pytest.mark.parametrize("door", DOORS)
def test_a_sample_that_cannot_be_run_ends_the_batch_at_its_second_restart(
    door: int,
) -> None:
    # The pieces before the sample commit again after each restart, which is no progress. Nearly the
    # whole batch was replayed 45 times.
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 4)).double()
    batch, bad = pairs(64), 40
    events, runs, poor = list[Event](), [0], [False]

    # The last leaf fails. The others have committed, so the batch starts over.
    def fail(grad: Tensor) -> None:
        if poor[0]:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    def loss_fn(b: Pair) -> Tensor:
        runs[0] += 1
        poor[0] = known and bool((b[0] == batch[0][bad]).all(1).any())
        loss: Tensor = cross_entropy(model)(b)
        return loss

    known = False
    mbs = elastic(model, micro_batch_size=64, on_event=events.append)
    through(door, mbs, loss_fn, batch)
    model.zero_grad()
    next(model.parameters()).register_hook(fail)
    known, runs[0] = True, 0
    with pytest.raises(MicroBatchFloorError, match="samples 40:41"):
        through(door, mbs, loss_fn, batch)
    assert runs[0] <= 200
    halvings = 6
    assert sum(isinstance(event, OutOfMemory) for event in events) == halvings + 2
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("share", [0.5, 0.8])
def test_failures_at_random_for_ever_end(share: float) -> None:
    # A success resets the count of failures in a row. The batch ends all the same.
    model = mlp()
    generator = torch.Generator().manual_seed(0)
    count = [0]

    def sometimes() -> None:
        count[0] += 1
        if torch.rand((), generator=generator).item() < share:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 MiB.")

    for _ in range(20):
        before = count[0]
        try:
            elastic(model, micro_batch_size=16).backward(failing(model, sometimes), pairs(16))
        except MicroBatchFloorError:
            assert all(p.grad is None for p in model.parameters())
        assert count[0] - before <= 16 * 3 + 10
        model.zero_grad()


def test_bookkeeping_that_runs_out_of_memory_is_tried_three_times() -> None:
    model, batch, calls = mlp(), pairs(8), [0]

    def count(b: Pair) -> Tensor:
        calls[0] += 1
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 MiB.")

    mbs = elastic(model, micro_batch_size=4, count=count)
    with pytest.raises(MicroBatchFloorError, match="count the loss terms"):
        mbs.backward(cross_entropy(model), batch)
    assert calls == [3]


# ---------------------------------------------------------------------- the error at the floor


def test_the_error_at_the_floor_names_the_figures_and_the_ways_out() -> None:
    model, called = mlp(), list[Exception]()
    sensor = _Scripted(_room(free=100 * MIB, others=300 * MIB))
    mbs = elastic(
        model, micro_batch_size=8, sensor=sensor, min_micro_batch_size=2, on_fatal=called.append
    )
    with pytest.raises(MicroBatchFloorError) as caught:
        mbs.backward(failing(model, _always("512.00 MiB")), pairs(8))
    text = str(caught.value)
    for part in (
        "512.0 MiB",
        "100.0 MiB",
        "1.0 GiB",
        "300.0 MiB",
        "micro-batch of 2",
        "min_micro_batch_size",
        "checkpoints blocks",
        "CUDA out of memory",
    ):
        assert part in text, part
    assert isinstance(caught.value, torch.OutOfMemoryError), (
        "handlers for out-of-memory that are there already see it"
    )
    assert called == [caught.value]
    assert caught.value.__context__ is None
    assert caught.value.__cause__ is None


def test_a_request_larger_than_the_device_is_not_waited_for() -> None:
    model, fail = mlp(), _always("2.00 TiB")
    mbs = elastic(
        model,
        micro_batch_size=1,
        sensor=_Scripted(_room(free=0, others=900 * MIB)),
        wait_for_memory=60,
    )
    naps = _with_sleep(mbs)
    with pytest.raises(MicroBatchFloorError, match="larger than the whole device"):
        mbs.backward(failing(model, fail), pairs(2))
    assert (fail.count, naps) == (1, [])


# ---------------------------------------------------------------------- waiting for others


@pytest.mark.parametrize("door", DOORS)
def test_waits_for_memory_that_others_hold_up_to_a_limit(door: int) -> None:
    model, fail, events = mlp(), _always("1.00 MiB"), list[Event]()
    mbs = elastic(
        model,
        micro_batch_size=2,
        sensor=_Scripted(_room(free=0, others=900 * MIB)),
        wait_for_memory=3.0,
        on_event=events.append,
    )
    naps = _with_sleep(mbs)
    with pytest.raises(MicroBatchFloorError):
        through(door, mbs, failing(model, fail), pairs(4))
    assert sum(naps) == pytest.approx(3.0)
    assert max(naps) <= 1.0
    waits = [event for event in events if isinstance(event, WaitingForMemory)]
    assert len(waits) == 1
    assert (waits[0].seconds, waits[0].held_by_others) == (3.0, 900 * MIB)


@pytest.mark.parametrize("door", DOORS)
def test_goes_on_when_the_co_tenant_leaves(door: int) -> None:
    model, batch = mlp(), pairs(4)
    gone = [False]
    sensor = _Scripted(_room(free=0, others=900 * MIB))

    def while_it_is_there() -> None:
        if not gone[0]:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 MiB.")

    mbs = elastic(model, micro_batch_size=2, sensor=sensor, wait_for_memory=30.0)
    naps = list[float]()

    def sleep(seconds: float) -> None:
        naps.append(seconds)
        if len(naps) == 4:
            gone[0] = True
            sensor.readings = [_room(free=800 * MIB, others=100 * MIB)]

    mbs._resources.sleep = sleep
    result = through(door, mbs, failing(model, while_it_is_there), batch)
    assert len(naps) == 4
    assert result.ooms > 0
    assert off_by(model, whole_gradient(model, lambda net: cross_entropy(net)(batch))) <= 1e-12


def test_the_waits_of_one_call_share_one_limit() -> None:
    # Memory comes and goes while the piece keeps failing. The limit does not start anew.
    model, fail = mlp(), _always("1.00 MiB")
    sensor = _Scripted(_room(free=0, others=900 * MIB))
    mbs = elastic(model, micro_batch_size=1, sensor=sensor, wait_for_memory=2.0)
    naps = list[float]()

    def sleep(seconds: float) -> None:
        naps.append(seconds)
        now = sensor.readings[0]
        assert isinstance(now, Headroom)
        sensor.readings = [replace(now, held_by_others=max(200 * MIB, now.held_by_others - MIB))]

    mbs._resources.sleep = sleep
    with pytest.raises(MicroBatchFloorError):
        mbs.backward(failing(model, fail), pairs(1))
    assert sum(naps) <= 2.0 + 1e-9
    assert fail.count <= 50


def test_the_waits_of_two_passes_share_one_limit() -> None:
    model = mlp()
    sensor = _Scripted(_room(free=900 * MIB, others=0))
    mbs = elastic(model, micro_batch_size=1, sensor=sensor, wait_for_memory=0.5)
    naps, runs = list[float](), dict[bool, int]()
    mbs._resources.sleep = naps.append

    def embed(piece: Pair) -> Tensor:
        second = torch.is_grad_enabled()
        runs[second] = runs.get(second, 0) + 1
        if runs[second] <= 3:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 MiB")
        out: Tensor = model(piece[0])
        return out

    with suppress(MicroBatchFloorError):
        mbs.backward_embeddings(embed, lambda found: found.square().mean(), pairs(4))
    assert len(runs) == 2
    assert 0 < sum(naps) <= 0.5 + 1e-9


@pytest.mark.parametrize(
    "sensor",
    [
        NoSensor("none"),
        _Scripted(OSError("driver gone")),
        _Scripted(_room(free=MIB // 2, others=0)),
    ],
)
def test_does_not_wait_where_nobody_else_holds_memory_or_nobody_can_tell(sensor: _Scripted) -> None:
    model = mlp()
    mbs = elastic(model, micro_batch_size=2, sensor=sensor, wait_for_memory=600.0)
    naps = _with_sleep(mbs)
    with pytest.raises(MicroBatchFloorError):
        mbs.backward(failing(model, _always("1.00 MiB")), pairs(4))
    assert naps == []


# ---------------------------------------------------------------------- sensors


@pytest.mark.no_oom_injection
@pytest.mark.parametrize(
    "death",
    [
        OSError("driver gone"),
        Unavailable("unplugged"),
        "nonsense",
        None,
        lambda reading: replace(reading, doubt="lost"),
    ],
)
def test_a_sensor_that_dies_stops_growth_and_not_training(death: object) -> None:
    model, batch, events = nn.Linear(6, 4).double(), pairs(64), list[Event]()
    wanted = whole_gradient(model, lambda net: cross_entropy(net)(batch))
    with MemoryBudget("1GiB", track=(model, batch)) as budget:

        class Sensor:
            dead = False

            def read(self) -> Reading:
                if self.dead:
                    if isinstance(death, Exception):
                        raise death
                    # a broken sensor returns anything
                    return death(budget.read()) if callable(death) else death  # type: ignore[return-value]
                return budget.read()

        sensor = Sensor()
        mbs = ElasticMBS(
            model,
            micro_batch_size=2,
            policy=Policy(seed=0, patience=1, jitter=0.0, cooldown=0.0, min_gain=0.0),
            on_event=events.append,
            memory=MemoryOptions(sensor=sensor, monitor_interval=0),
        )

        def calls(n: int) -> list[int]:
            sizes = []
            for _ in range(n):
                model.zero_grad()
                sizes.append(mbs.backward(cross_entropy(model), batch).micro_batch_size)
                assert off_by(model, wanted) <= 1e-12
            return sizes

        alive = calls(4)
        assert alive[-1] > alive[0]
        sensor.dead = True
        stopped = calls(12)
        assert len(set(stopped[1:])) == 1
        assert stopped[-1] < 64
        with InjectOOM(at=[5]):
            model.zero_grad()
            shrunk = mbs.backward(cross_entropy(model), batch)
        assert shrunk.ooms == 1
        assert [type(event).__name__ for event in events].count("SensorLost") == 1
        assert isinstance(mbs.headroom, Headroom) is callable(death), (
            "a reading in doubt stays usable"
        )
        sensor.dead = False
        assert calls(30)[-1] > shrunk.micro_batch_size
        assert [type(event).__name__ for event in events].count("SensorBack") == 1
    assert any(isinstance(event, Resized) for event in events)


def test_a_sensor_that_hangs_does_not_hold_up_a_step() -> None:
    model, batch = mlp(), pairs(8)

    reading, done = threading.Event(), threading.Event()

    class Hanging:
        def read(self) -> Reading:
            reading.set()
            assert done.wait(120)  # a step that waited here would wait for its own end
            return Unavailable("slow")

    with ElasticMBS(
        model, micro_batch_size=4, memory=MemoryOptions(sensor=Hanging(), monitor_interval=0.01)
    ) as mbs:
        assert reading.wait(120)
        mbs.backward(cross_entropy(model), batch)
        done.set()


@pytest.mark.no_oom_injection
def test_memory_is_read_right_after_a_failure_not_at_the_next_interval() -> None:
    model, batch = mlp(), pairs(8)
    readings: list[bool] = []  # True where the neighbour was seen
    spike = threading.Event()

    class Neighbour:
        def read(self) -> Reading:
            readings.append(spike.is_set())
            return Headroom(
                free=1 if spike.is_set() else 100,
                total=100,
                held_by_others=0,
                source="test",
                at=0.0,
            )

    def wait_for(count: int) -> None:
        deadline = time.monotonic() + 120
        while len(readings) < count and time.monotonic() < deadline:
            time.sleep(0.001)

    with ElasticMBS(
        model, micro_batch_size=4, memory=MemoryOptions(sensor=Neighbour(), monitor_interval=3600)
    ) as mbs:
        mbs.backward(cross_entropy(model), batch)
        model.zero_grad()
        wait_for(1)
        spike.set()
        with InjectOOM(at=[5]):
            assert mbs.backward(cross_entropy(model), batch).ooms == 1
        wait_for(2)
    assert readings == [False, True]
