from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import types
from collections.abc import Callable
from typing import Any

import psutil
import pytest
import torch

from elastic_mbs.memory import (
    CudaMeter,
    CudaSensor,
    Headroom,
    HostMeter,
    HostSensor,
    MemorySensor,
    NoMeter,
    NoSensor,
    Unavailable,
    Usage,
    UsageMeter,
    host,
    sensor_for,
)
from elastic_mbs.memory.nvml import DeviceMemory, NvmlDevice

GIB = 1024**3


def raiser(error: BaseException) -> Callable[..., Any]:
    def fail(*_: Any, **__: Any) -> Any:
        raise error

    return fail


# readings


def test_capacity_is_what_is_free_and_what_we_hold() -> None:
    assert Headroom(free=3, total=10, held_by_others=2, source="x", at=0.0).capacity == 8


@pytest.mark.parametrize(
    ("usage", "factor"),
    [
        (Usage(1, 2, 10, 15, 0), 1.5),
        (Usage(1, 2, 10, 10, 0), 1.0),
        (Usage(1, 2, 10, 5, 0), 1.0),
        (Usage(0, 0, 0, 5, 0), 1.0),
    ],
)
def test_fragmentation_is_never_below_one(usage: Usage, factor: float) -> None:
    assert usage.fragmentation == factor


def test_an_unknown_device_trains_without_readings() -> None:
    sensor, meter = sensor_for("mps")
    assert sensor.read() == Unavailable("no memory sensor for device 'mps': pass sensor=...")
    assert meter.usage() is None
    meter.reset_peak()
    assert meter.resets == 1


def test_each_device_has_its_sensor() -> None:
    pairs = [sensor_for("cpu"), sensor_for(torch.device("cuda:0")), sensor_for("meta")]
    kinds = [(type(sensor), type(meter)) for sensor, meter in pairs]
    assert kinds == [(HostSensor, HostMeter), (CudaSensor, CudaMeter), (NoSensor, NoMeter)]
    assert all(isinstance(sensor, MemorySensor) and isinstance(meter, UsageMeter) for sensor, meter in pairs)


# host


def test_the_host_sensor_accounts_for_every_byte(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: types.SimpleNamespace(available=30, total=100))
    monkeypatch.setattr(psutil.Process, "memory_info", lambda _: types.SimpleNamespace(rss=50))
    assert HostSensor(clock=lambda: 7.0).read() == Headroom(30, 100, 20, "host", 7.0)
    monkeypatch.setattr(psutil.Process, "memory_info", lambda _: types.SimpleNamespace(rss=90))
    assert HostSensor(clock=lambda: 7.0).read() == Headroom(30, 100, 0, "host", 7.0)  # shared pages count in both


def test_the_host_sensor_reads_this_machine() -> None:
    reading = HostSensor().read()
    assert isinstance(reading, Headroom)
    assert 0 < reading.free < reading.capacity <= reading.total == psutil.virtual_memory().total


def test_a_host_that_cannot_be_read_is_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", raiser(OSError("no /proc")))
    assert HostSensor(clock=lambda: 1.0).read() == Unavailable("host memory: OSError: no /proc", 1.0)


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


def test_the_host_meter_sees_a_new_record() -> None:
    # in a subprocess: only there is the mark small, whatever other tests have used before
    code = """
        from elastic_mbs.memory import HostMeter
        meter = HostMeter()
        assert meter.usage() is None
        pile = bytearray(meter._mark)  # more than was ever resident, once it is touched
        pile[::4096] = b"x" * len(pile[::4096])
        usage = meter.usage()
        assert usage.peak_allocated >= usage.allocated > len(pile), usage
        size = len(pile)
        del pile
        after = meter.usage()
        assert after.allocated < size + usage.allocated / 4 and after.peak_allocated > size, (usage, after)
        meter.reset_peak()
        assert meter.usage() is None
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(("platform", "unit"), [("linux", 1024), ("darwin", 1)])
def test_the_high_water_mark_has_the_unit_of_the_system(monkeypatch: pytest.MonkeyPatch, platform: str, unit: int) -> None:
    monkeypatch.setattr(sys, "platform", platform)
    monkeypatch.setattr("resource.getrusage", lambda _: types.SimpleNamespace(ru_maxrss=3))
    assert host._high_water_mark() == 3 * unit


def test_without_the_resource_module_the_mark_comes_from_psutil(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "resource", None)
    assert host._high_water_mark() == 0
    monkeypatch.setattr(psutil.Process, "memory_info", lambda _: types.SimpleNamespace(rss=80, peak_wset=99))
    assert host._high_water_mark() == 99


# NVML


class NVMLError(Exception):
    """Behaves as the real one: not comparable with other types, not hashable."""

    def __eq__(self, other: object) -> bool:
        return bool(self.value == other.value)  # type: ignore[attr-defined]

    __hash__ = None  # type: ignore[assignment]


ERRORS = ["LibraryNotFound", "DriverNotLoaded", "NotFound", "InvalidArgument", "FunctionNotFound", "GpuIsLost", "NotSupported", "Unknown"]


class FakeNvml(types.ModuleType):
    """The functions of pynvml that are used, over one device. `fail` maps a function's name to the class that it raises."""

    nvmlMemory_v2 = 0x02000028

    def __init__(self) -> None:
        super().__init__("pynvml")
        self.NVMLError = NVMLError
        for name in ERRORS:
            setattr(self, f"NVMLError_{name}", type(f"NVMLError_{name}", (NVMLError,), {}))
        self.known = {"GPU-abc": "handle"}
        self.free, self.total = 6 * GIB, 10 * GIB
        self.fail: dict[str, str] = {}
        self.calls: list[str] = []

    def _call(self, name: str) -> None:
        self.calls.append(name)
        if name in self.fail:
            raise getattr(self, f"NVMLError_{self.fail[name]}")(f"{self.fail[name]} in {name}")

    def nvmlInit(self) -> None:
        self._call("init")

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        self._call("open")
        if uuid not in self.known:
            raise getattr(self, "NVMLError_NotFound")(uuid)  # noqa: B009 - made in __init__
        return self.known[uuid]

    def nvmlDeviceGetMemoryInfo(self, handle: str, version: int | None = None) -> types.SimpleNamespace:
        assert handle in self.known.values()
        self._call("v1" if version is None else "v2")
        return types.SimpleNamespace(free=self.free, total=self.total)


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    fake = FakeNvml()
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    return fake


def test_nvml_reads_a_gpu_by_its_uuid_and_opens_it_once(nvml: FakeNvml) -> None:
    device = NvmlDevice("abc")
    assert [device.memory(), device.memory()] == [DeviceMemory(6 * GIB, 10 * GIB)] * 2
    assert nvml.calls == ["init", "open", "v2", "v2"]


def test_nvml_finds_a_mig_instance(nvml: FakeNvml) -> None:
    nvml.known = {"MIG-abc": "slice"}
    assert NvmlDevice("abc").memory() == DeviceMemory(6 * GIB, 10 * GIB)


def test_an_unknown_uuid_gives_a_reason(nvml: FakeNvml) -> None:
    assert NvmlDevice("xyz").memory() == "NVML: NVMLError_NotFound: MIG-xyz"


def test_an_old_driver_is_asked_in_the_old_way_from_then_on(nvml: FakeNvml) -> None:
    nvml.fail = {"v2": "FunctionNotFound"}
    device = NvmlDevice("abc")
    assert device.memory() == device.memory() == DeviceMemory(6 * GIB, 10 * GIB)
    assert nvml.calls == ["init", "open", "v2", "v1", "v1"]


def test_an_old_binding_is_asked_in_the_old_way(nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(FakeNvml, "nvmlMemory_v2")
    assert NvmlDevice("abc").memory() == DeviceMemory(6 * GIB, 10 * GIB)
    assert nvml.calls == ["init", "open", "v1"]


@pytest.mark.parametrize("name", ["LibraryNotFound", "DriverNotLoaded"])
def test_without_a_driver_nvml_is_asked_once(nvml: FakeNvml, name: str) -> None:
    nvml.fail = {"init": name}
    device = NvmlDevice("abc")
    assert device.memory() == device.memory() == f"NVML: NVMLError_{name}: {name} in init"
    assert nvml.calls == ["init"]


@pytest.mark.parametrize("name", ["GpuIsLost", "Unknown", "NotSupported"])
def test_a_lost_gpu_gives_a_reason_and_is_opened_again(nvml: FakeNvml, name: str) -> None:
    device = NvmlDevice("abc")
    assert device.memory() == DeviceMemory(6 * GIB, 10 * GIB)
    nvml.fail = {"v2": name}
    assert device.memory() == f"NVML: NVMLError_{name}: {name} in v2"
    nvml.fail = {}
    assert device.memory() == DeviceMemory(6 * GIB, 10 * GIB)
    assert nvml.calls == ["init", "open", "v2", "v2", "init", "open", "v2"]


def test_a_total_of_zero_is_no_reading(nvml: FakeNvml) -> None:
    nvml.total = nvml.free = 0
    assert NvmlDevice("abc").memory() == "NVML gives no memory figures for this device (it shares the host's memory)"


def test_a_forked_child_opens_nvml_for_itself(nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    device = NvmlDevice("abc")
    device.memory()
    device._lock.acquire()  # as a thread of the parent may have at the fork
    monkeypatch.setattr(os, "getpid", lambda: -1)
    assert device.memory() == DeviceMemory(6 * GIB, 10 * GIB)
    assert nvml.calls == ["init", "open", "v2", "init", "open", "v2"]


def test_without_the_binding_nvml_gives_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    device = NvmlDevice("abc")
    reason = device.memory()
    assert isinstance(reason, str)
    assert "pynvml" in reason
    assert device.memory() is reason


def test_the_real_binding_answers_without_raising() -> None:
    memory = NvmlDevice("00000000-0000-0000-0000-000000000000").memory()
    assert isinstance(memory, str)
    assert memory.startswith("NVML: NVMLError_")


# CUDA


class FakeCuda:
    """torch.cuda, as far as the sensors use it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.properties = types.SimpleNamespace(total_memory=9 * GIB, uuid="abc", is_integrated=False)
        self.reserved = [2 * GIB]
        self.fraction = 1.0
        self.info = (5 * GIB, 9 * GIB)
        self.stats: dict[str, int] = {}
        self.resets: list[torch.device] = []
        for name in ("get_device_properties", "memory_reserved", "get_per_process_memory_fraction", "mem_get_info", "memory_stats"):
            monkeypatch.setattr(torch.cuda, name, getattr(self, name), raising=False)
        monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", self.resets.append)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)

    def get_device_properties(self, _: torch.device) -> types.SimpleNamespace:
        return self.properties

    def memory_reserved(self, device: torch.device) -> int:
        assert device.index is not None
        return self.reserved.pop(0) if len(self.reserved) > 1 else self.reserved[0]

    def get_per_process_memory_fraction(self, _: torch.device) -> float:
        return self.fraction

    def mem_get_info(self, _: torch.device) -> tuple[int, int]:
        return self.info

    def memory_stats(self, _: torch.device) -> dict[str, int]:
        return self.stats


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    return FakeCuda(monkeypatch)


def read(device: str = "cuda:0") -> Headroom:
    reading = CudaSensor(device, clock=lambda: 5.0).read()
    assert isinstance(reading, Headroom), reading
    return reading


def test_cuda_headroom_is_what_nvml_has_free_and_what_we_reserved(cuda: FakeCuda, nvml: FakeNvml) -> None:
    reading = read()
    assert reading == Headroom(6 * GIB, 9 * GIB, 1 * GIB, "nvml", 5.0)
    assert reading.capacity == 8 * GIB


def test_without_nvml_cuda_is_asked(cuda: FakeCuda, nvml: FakeNvml) -> None:
    nvml.fail = {"init": "LibraryNotFound"}
    assert read() == Headroom(5 * GIB, 9 * GIB, 2 * GIB, "cuda", 5.0)


def test_nvml_is_opened_once_for_all_readings(cuda: FakeCuda, nvml: FakeNvml) -> None:
    sensor = CudaSensor("cuda:0")
    sensor.read()
    sensor.read()
    assert nvml.calls == ["init", "open", "v2", "v2"]


def test_a_cap_on_this_process_limits_its_capacity(cuda: FakeCuda, nvml: FakeNvml) -> None:
    cuda.fraction = 0.5
    reading = read()
    assert reading.capacity == int(4.5 * GIB)
    assert reading.free == int(2.5 * GIB)
    cuda.fraction = 0.1  # below what is reserved already
    assert read().free == 0
    assert read().capacity == int(0.9 * GIB)


def test_a_torch_that_cannot_tell_its_cap_has_none(cuda: FakeCuda, nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.cuda, "get_per_process_memory_fraction")
    assert read().capacity == 8 * GIB


def test_capacity_never_exceeds_the_device(cuda: FakeCuda, nvml: FakeNvml) -> None:
    nvml.free = 9 * GIB
    assert read() == Headroom(7 * GIB, 9 * GIB, 0, "nvml", 5.0)


@pytest.mark.parametrize("reserved", [[1 * GIB, 2 * GIB], [2 * GIB, 1 * GIB]])
def test_memory_that_moves_during_the_reading_is_not_counted_twice(cuda: FakeCuda, nvml: FakeNvml, reserved: list[int]) -> None:
    cuda.reserved = reserved
    assert read().capacity == 7 * GIB


def test_a_gpu_without_memory_of_its_own_is_read_from_the_host(cuda: FakeCuda, nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    cuda.properties.is_integrated = True
    monkeypatch.setattr(psutil, "virtual_memory", lambda: types.SimpleNamespace(available=30 * GIB, total=100 * GIB))
    assert read() == Headroom(30 * GIB, 100 * GIB, 68 * GIB, "host", 5.0)
    assert nvml.calls == []


@pytest.mark.parametrize("error", [torch.AcceleratorError("CUDA error: device lost"), AssertionError("no driver"), OSError("x")])
def test_a_lost_device_is_unavailable(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", raiser(error))
    assert CudaSensor("cuda:1", clock=lambda: 5.0).read() == Unavailable(f"cuda:1: {type(error).__name__}: {error}", 5.0)


def test_the_current_device_is_taken_where_none_is_named(cuda: FakeCuda, nvml: FakeNvml) -> None:
    assert read("cuda").capacity == 8 * GIB  # memory_reserved of the fake insists on an index
    CudaMeter("cuda").reset_peak()
    assert cuda.resets == [torch.device("cuda:3")]


def test_the_allocator_tells_our_use(cuda: FakeCuda) -> None:
    cuda.stats = {
        "active_bytes.all.current": 10,
        "active_bytes.all.peak": 30,
        "reserved_bytes.all.current": 20,
        "reserved_bytes.all.peak": 45,
        "num_alloc_retries": 2,
    }
    meter = CudaMeter("cuda:0")
    usage = meter.usage()
    assert usage == Usage(10, 20, 30, 45, 2)
    assert usage is not None
    assert usage.fragmentation == 1.5
    meter.reset_peak()
    assert (meter.resets, cuda.resets) == (1, [torch.device("cuda:0")])
    del cuda.stats["num_alloc_retries"]
    assert meter.usage() == Usage(10, 20, 30, 45, 0)


@pytest.mark.parametrize(
    "stats",
    [
        {},
        {"active_bytes.all.current": 10, "reserved_bytes.all.current": 20},
        {"active_bytes.all.current": 10, "active_bytes.all.peak": 10, "reserved_bytes.all.current": 20, "reserved_bytes.all.peak": 0},
    ],
)
def test_statistics_that_cannot_be_true_are_no_statistics(cuda: FakeCuda, stats: dict[str, int]) -> None:
    cuda.stats = stats
    assert CudaMeter("cuda:0").usage() is None


def test_a_meter_without_a_device_does_not_raise(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("memory_stats", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, raiser(torch.AcceleratorError("lost")))
    monkeypatch.setattr(torch.cuda, "current_device", raiser(RuntimeError("no driver")))
    meter = CudaMeter("cuda")
    meter.reset_peak()
    assert meter.usage() is None
    assert meter.resets == 1


@pytest.mark.gpu
def test_a_real_gpu_is_read() -> None:
    x = torch.empty(64 * 1024**2, device="cuda", dtype=torch.uint8)
    sensor, meter = sensor_for("cuda")
    reading, usage = sensor.read(), meter.usage()
    assert isinstance(reading, Headroom)
    assert usage is not None
    assert reading.source == "nvml"
    assert usage.reserved >= usage.allocated >= x.numel()
    free, total = torch.cuda.mem_get_info()
    assert reading.total == torch.cuda.get_device_properties(0).total_memory
    assert abs(reading.capacity - usage.reserved - free) < 0.02 * total
    torch.cuda.set_per_process_memory_fraction(0.25)
    try:
        capped = sensor.read()
        assert isinstance(capped, Headroom)
        if hasattr(torch.cuda, "get_per_process_memory_fraction"):
            assert capped.capacity == int(0.25 * reading.total)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
