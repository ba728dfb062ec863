import sys
import types
from dataclasses import replace

import psutil
import pytest
import torch

from elastic_mbs import Event, MicroBatchFloorError, WaitingForMemory, memory
from elastic_mbs.memory import (
    CudaSensor,
    DeviceMeter,
    Headroom,
    Holder,
    HostMeter,
    HostSensor,
    Unavailable,
    Usage,
    host,
    sensor_for,
)
from tests.helpers.fake_nvml import GIB, FakeCuda, FakeDriver, raiser, read_cuda
from tests.helpers.steps import elastic, mlp, pairs, there

MIB = 1024**2


def test_a_reading_in_words_has_its_figures_its_processes_and_its_doubt() -> None:
    reading = Headroom(free=1024, total=4096, held_by_others=2048, source="nvml", at=0.0)
    assert reading.capacity == 2048
    assert (
        reading.in_words()
        == "1.0 KiB of 4.0 KiB were free at the last look, 2.0 KiB held by others"
    )
    full = replace(
        reading, holders=(Holder(4711, "python", 2048),), doubt="the device was lost"
    ).in_words()
    assert (
        full.removeprefix(reading.in_words())
        == " (processes there: python (PID 4711) 2.0 KiB) (in doubt: the device was lost)"
    )
    assert Unavailable("no reading yet").in_words() == "there is no memory reading (no reading yet)"


@pytest.mark.parametrize(
    ("usage", "most", "least"),
    [
        (Usage(1, 2, 10, 15, 0), 1.5, 1.5),
        (Usage(1, 2, 10, 5, 0), 1.0, 1.0),
        (Usage(0, 0, 0, 5, 0), 1.0, 1.0),
        # what was cached before may be no fragmentation
        (Usage(1, 2, 10, 15, 0, idle=3), 1.5, 1.2),
        (Usage(1, 2, 10, 15, 0, idle=12), 1.5, 1.0),
    ],
)
def test_fragmentation_is_never_below_one(usage: Usage, most: float, least: float) -> None:
    assert usage.fragmentation == most
    assert usage.least_fragmentation == pytest.approx(least)


def test_each_device_has_its_sensor() -> None:
    pairs = [sensor_for("cpu"), sensor_for(torch.device("cuda:0")), sensor_for("meta")]
    kinds = [(type(sensor), type(meter)) for sensor, meter in pairs]
    assert kinds == [
        (HostSensor, HostMeter),
        (CudaSensor, DeviceMeter),
        (memory.NoSensor, memory.NoMeter),
    ]
    assert all(
        isinstance(sensor, memory.MemorySensor) and isinstance(meter, memory.UsageMeter)
        for sensor, meter in pairs
    )
    sensor, meter = pairs[-1]
    meter.reset_peak()
    assert (meter.usage(), meter.resets) == (None, 1)
    assert sensor.read() == Unavailable("no memory sensor for device 'meta': pass sensor=...")


def test_the_host_sensor_reads_this_machine_or_says_why_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reading = HostSensor().read()
    assert isinstance(reading, Headroom)
    assert 0 < reading.free < reading.capacity <= reading.total == psutil.virtual_memory().total

    monkeypatch.setattr(psutil, "virtual_memory", raiser(OSError("no /proc")))
    assert HostSensor(clock=lambda: 1.0).read() == Unavailable(
        "host memory: OSError: no /proc", 1.0
    )


def test_the_host_peak_is_known_only_where_the_mark_rose(monkeypatch: pytest.MonkeyPatch) -> None:
    mark = 100
    monkeypatch.setattr(host, "_high_water_mark", lambda: mark)
    monkeypatch.setattr(psutil.Process, "memory_info", lambda _: types.SimpleNamespace(rss=80))
    meter = HostMeter()
    assert meter.usage() is None
    mark = 150
    assert meter.usage() == Usage(80, 80, 150, 150, 0)
    meter.reset_peak()
    assert meter.usage() is None
    assert meter.resets == 1
    mark = 151
    monkeypatch.setattr(psutil.Process, "memory_info", lambda _: types.SimpleNamespace(rss=160))
    assert meter.usage() == Usage(160, 160, 160, 160, 0)
    monkeypatch.setattr(psutil.Process, "memory_info", raiser(psutil.AccessDenied()))
    assert meter.usage() is None


def test_the_high_water_mark_has_the_unit_of_the_system(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("resource.getrusage", lambda _: types.SimpleNamespace(ru_maxrss=3))
    for platform, unit in (("linux", 1024), ("darwin", 1)):
        monkeypatch.setattr(sys, "platform", platform)
        assert host._high_water_mark() == 3 * unit
    monkeypatch.setattr(host, "resource", None)  # Windows
    assert host._high_water_mark() == 0
    monkeypatch.setattr(
        psutil.Process, "memory_info", lambda _: types.SimpleNamespace(rss=80, peak_wset=99)
    )
    assert host._high_water_mark() == 99


# CUDA


@pytest.mark.parametrize(
    ("free", "fraction", "expected"),
    [
        pytest.param(
            6,
            1.0,
            Headroom(6 * GIB, 9 * GIB, 1 * GIB, "nvml", 5.0),
            id="what NVML has free, and what we reserved",
        ),
        pytest.param(
            9, 1.0, Headroom(7 * GIB, 9 * GIB, 0, "nvml", 5.0), id="never more than the device"
        ),
        pytest.param(
            6,
            0.5,
            Headroom(5 * GIB // 2, 9 * GIB, 9 * GIB // 2, "nvml", 5.0),
            id="a cap on this process",
        ),
        pytest.param(
            6,
            0.125,
            Headroom(0, 9 * GIB, 63 * GIB // 8, "nvml", 5.0),
            id="a cap below what is reserved",
        ),
        pytest.param(
            6,
            None,
            Headroom(6 * GIB, 9 * GIB, 1 * GIB, "nvml", 5.0),
            id="a torch that cannot tell its cap",
        ),
    ],
)
def test_capacity_is_what_is_free_and_what_we_reserved_below_the_cap(
    cuda: FakeCuda,
    driver: FakeDriver,
    monkeypatch: pytest.MonkeyPatch,
    free: int,
    fraction: float | None,
    expected: Headroom,
) -> None:
    driver.cards[0].free = free * GIB
    if fraction is None:
        monkeypatch.delattr(torch.cuda, "get_per_process_memory_fraction")
    else:
        cuda.fraction = fraction
    assert read_cuda() == expected


@pytest.mark.parametrize("reserved", [[1 * GIB, 2 * GIB], [2 * GIB, 1 * GIB]])
def test_memory_that_moves_during_the_reading_is_not_counted_twice(
    cuda: FakeCuda, driver: FakeDriver, reserved: list[int]
) -> None:
    cuda.reserved = reserved
    assert read_cuda().capacity == 7 * GIB


@pytest.mark.parametrize(
    "error",
    [torch.AcceleratorError("CUDA error: device lost"), AssertionError("no driver"), OSError("x")],
)
def test_a_lost_device_is_unavailable(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", raiser(error))
    assert CudaSensor("cuda:1", clock=lambda: 5.0).read() == Unavailable(
        f"cuda:1: {type(error).__name__}: {error}", 5.0
    )


def test_the_current_device_is_taken_where_none_is_named(
    cuda: FakeCuda, driver: FakeDriver
) -> None:
    assert read_cuda("cuda").capacity == 8 * GIB  # memory_reserved of the fake insists on an index
    DeviceMeter("cuda").reset_peak()
    assert cuda.resets == [torch.device("cuda:3")]


def test_the_allocator_tells_our_use(cuda: FakeCuda) -> None:
    cuda.stats = {
        "active_bytes.all.current": 10,
        "active_bytes.all.peak": 30,
        "reserved_bytes.all.current": 20,
        "reserved_bytes.all.peak": 45,
        "num_alloc_retries": 2,
    }
    meter = DeviceMeter("cuda:0")
    usage = there(meter.usage())
    assert usage == Usage(10, 20, 30, 45, 2)
    assert usage.fragmentation == 1.5
    meter.reset_peak()
    assert (meter.resets, cuda.resets) == (1, [torch.device("cuda:0")])
    del cuda.stats["num_alloc_retries"]
    assert meter.usage() == Usage(10, 20, 30, 45, 0, idle=10)


@pytest.mark.parametrize(
    "stats",
    [
        {},
        {"active_bytes.all.current": 10, "reserved_bytes.all.current": 20},
        {
            "active_bytes.all.current": 10,
            "active_bytes.all.peak": 10,
            "reserved_bytes.all.current": 20,
            "reserved_bytes.all.peak": 0,
        },
    ],
)
def test_statistics_that_cannot_be_true_are_no_statistics(
    cuda: FakeCuda, stats: dict[str, int]
) -> None:
    cuda.stats = stats
    assert DeviceMeter("cuda:0").usage() is None


def test_a_meter_without_a_device_does_not_raise(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("memory_stats_as_nested_dict", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, raiser(torch.AcceleratorError("lost")))
    monkeypatch.setattr(torch.cuda, "current_device", raiser(RuntimeError("no driver")))
    meter = DeviceMeter("cuda")
    meter.reset_peak()
    assert meter.usage() is None
    assert meter.resets == 1


@pytest.mark.parametrize("known", [True, False])
def test_the_floor_error_names_holders_and_doubt_where_known(
    known: bool,
) -> None:
    model, events = mlp(), list[Event]()
    holders = (
        Holder(4711, "python", 200 * MIB),
        Holder(12, None, 60 * MIB),
        Holder(13, "Xorg"),
        Holder(14),
    )
    room = Headroom(
        free=100 * MIB, total=1024 * MIB, held_by_others=300 * MIB, source="test", at=0.0
    )
    reading = replace(room, doubt="the device was lost", holders=holders) if known else room
    sensor = types.SimpleNamespace(read=lambda: reading)
    mbs = elastic(
        model, micro_batch_size=1, sensor=sensor, wait_for_memory=2.0, on_event=events.append
    )
    naps: list[float] = []
    mbs._resources.sleep = naps.append

    def loss_fn(_: object) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 MiB.")

    with pytest.raises(MicroBatchFloorError) as caught:
        mbs.backward(loss_fn, pairs(2))
    names = (
        "python (PID 4711) 200.0 MiB, PID 12 60.0 MiB, Xorg (PID 13), and 1 more" if known else ""
    )
    said = f" (processes there: {names}) (in doubt: the device was lost)" if known else ""
    assert f"300.0 MiB held by others{said}" in str(caught.value)
    assert sum(naps) == pytest.approx(2.0), "a figure in doubt is good enough to wait by"
    [wait] = [event for event in events if isinstance(event, WaitingForMemory)]
    assert wait.holders == names
    assert wait.line().endswith(
        f"held by others 300.0 MiB: {names})" if known else "held by others 300.0 MiB)"
    )
