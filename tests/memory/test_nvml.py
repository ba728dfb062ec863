"""NVML and the CUDA sensor over a matrix of drivers, with bindings that are not there: what each of them leaves of a reading."""

from __future__ import annotations

import os
import sys
import types
from pathlib import Path

import psutil
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from elastic_mbs.memory import CudaSensor, Headroom, Holder, Reading, Unavailable
from elastic_mbs.memory.nvml import DeviceMemory, NoAnswer, NvmlDevice
from tests.helpers.fake_nvml import GIB, Clock, FakeCuda, FakeNvml

MEMORY = DeviceMemory(6 * GIB, 10 * GIB)


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    fake = FakeNvml()
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    return fake


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    return FakeCuda(monkeypatch)


# ---------------------------------------------------------------------- one device, found and read


def test_a_gpu_is_read_by_its_uuid_and_opened_once(nvml: FakeNvml) -> None:
    device = NvmlDevice("abc")
    assert [device.memory(), device.memory()] == [MEMORY] * 2
    assert nvml.calls == ["init", "open", "v2", "v2"]


def test_a_mig_instance_is_found_by_its_uuid(nvml: FakeNvml) -> None:
    nvml.known = {"MIG-abc": "slice"}
    assert NvmlDevice("abc").memory() == MEMORY


def test_an_old_binding_is_asked_in_the_old_way(nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(FakeNvml, "nvmlMemory_v2")
    assert NvmlDevice("abc").memory() == MEMORY
    assert nvml.calls == ["init", "open", "v1"]


def test_a_forked_child_opens_nvml_for_itself_and_leaves_the_parents_reference(nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    device = NvmlDevice("abc")
    device.memory()
    device._lock.acquire()  # as a thread of the parent may have at the fork
    monkeypatch.setattr(os, "getpid", lambda: -1)
    assert device.memory() == MEMORY
    assert nvml.calls == ["init", "open", "v2", "init", "open", "v2"]


# ---------------------------------------------------------------------- never there


@pytest.mark.parametrize("name", ["LibraryNotFound", "DriverNotLoaded", "NoPermission"])
def test_where_there_is_no_nvml_it_is_asked_once_and_nothing_is_in_doubt(nvml: FakeNvml, name: str) -> None:
    nvml.fail = {"init": name}
    clock = Clock()
    device = NvmlDevice("abc", clock=clock)
    assert device.memory() == NoAnswer(f"NVML: NVMLError_{name}: {name} in init", lost=False)
    clock.pass_(10_000)
    assert device.memory() == NoAnswer(f"NVML: NVMLError_{name}: {name} in init", lost=False)
    assert nvml.calls == ["init"]


def test_without_the_binding_there_is_a_reason_and_no_doubt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    device = NvmlDevice("abc")
    answer = device.memory()
    assert isinstance(answer, NoAnswer)
    assert "pynvml" in answer.reason
    assert not answer.lost
    assert device.memory() is answer
    assert device.holders() == ()


def test_a_binding_that_cannot_be_imported_is_no_binding(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The deprecated package of that name warns, and whoever turns warnings into errors gets one."""
    (tmp_path / "pynvml.py").write_text("raise FutureWarning('The pynvml package is deprecated')")
    monkeypatch.delitem(sys.modules, "pynvml", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    device = NvmlDevice("abc")
    assert device.memory() == NoAnswer("NVML: FutureWarning: The pynvml package is deprecated", lost=False)


def test_a_binding_that_lacks_what_is_needed_is_no_loss(nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(FakeNvml, "nvmlDeviceGetHandleByUUID")
    answer = NvmlDevice("abc").memory()
    assert isinstance(answer, NoAnswer)
    assert "nvmlDeviceGetHandleByUUID" in answer.reason
    assert not answer.lost
    assert nvml.references == 0


def test_a_device_that_nvml_does_not_know_is_no_loss_and_asked_for_again_later(nvml: FakeNvml) -> None:
    clock = Clock()
    device = NvmlDevice("xyz", clock=clock)
    assert device.memory() == NoAnswer("NVML: NVMLError_NotFound: MIG-xyz", lost=False)
    assert device.memory() == NoAnswer("NVML: NVMLError_NotFound: MIG-xyz", lost=False)
    assert nvml.calls == ["init", "open", "open", "shutdown"]
    nvml.known["GPU-xyz"] = "handle"
    clock.pass_(5.0)
    assert device.memory() == MEMORY


def test_figures_that_never_were_are_no_loss(nvml: FakeNvml) -> None:
    there = NvmlDevice("abc")
    there.memory()
    nvml.total = nvml.free = 0
    assert there.memory() == NoAnswer("NVML gives no memory figures for this device", lost=True), "it had some before"
    assert NvmlDevice("abc").memory() == NoAnswer("NVML gives no memory figures for this device", lost=False)
    nvml.fail = {"v2": "NotSupported"}
    assert NvmlDevice("abc").memory() == NoAnswer("NVML: NVMLError_NotSupported: NotSupported in v2", lost=False)


@pytest.mark.parametrize("name", ["GpuIsLost", "Unknown"])
@pytest.mark.parametrize("where", ["init", "open", "v2"])
def test_a_device_that_fails_at_the_first_try_is_in_doubt(nvml: FakeNvml, name: str, where: str) -> None:
    nvml.fail = {where: name}
    assert NvmlDevice("abc").memory() == NoAnswer(f"NVML: NVMLError_{name}: {name} in {where}", lost=True)


# ---------------------------------------------------------------------- lost in the middle, and back


@pytest.mark.parametrize("name", ["GpuIsLost", "Unknown", "NotSupported", "DriverNotLoaded", "NotFound", "Uninitialized"])
def test_a_loss_is_latched_and_nvml_is_left_alone_until_a_try_is_due(nvml: FakeNvml, name: str) -> None:
    clock = Clock()
    device = NvmlDevice("abc", clock=clock)
    assert device.memory() == MEMORY
    nvml.fail = {"v2": name}
    lost = NoAnswer(f"NVML: NVMLError_{name}: {name} in v2", lost=True)
    nvml.calls.clear()
    assert device.memory() == lost
    clock.pass_(4.9)
    nvml.fail = {}
    assert device.memory() == lost
    assert nvml.calls == ["v2", "shutdown"]
    clock.pass_(0.1)
    assert device.memory() == MEMORY
    assert nvml.calls == ["v2", "shutdown", "init", "open", "v2"]
    assert nvml.references == 1


def tries(nvml: FakeNvml, device: NvmlDevice, clock: Clock, seconds: int) -> list[float]:
    """When NVML was asked, in seconds from now, by a monitor that reads every second."""
    start, found = clock.now, []
    for _ in range(seconds):
        before = len(nvml.calls)
        device.memory()
        if len(nvml.calls) > before:
            found.append(clock.now - start)
        clock.pass_(1.0)
    return found


def test_the_time_between_two_tries_doubles_up_to_a_minute(nvml: FakeNvml) -> None:
    clock = Clock()
    device = NvmlDevice("abc", clock=clock)
    device.memory()
    nvml.fail = {"init": "Unknown", "v2": "Unknown"}
    assert tries(nvml, device, clock, 300) == [0, 5, 15, 35, 75, 135, 195, 255]
    assert nvml.references == 0, "every reference that was taken was given back"


def test_a_driver_that_comes_and_goes_is_not_asked_more_and_more(nvml: FakeNvml) -> None:
    clock = Clock()
    device = NvmlDevice("abc", clock=clock)
    device.memory()
    nvml.fail = {"v2": "GpuIsLost"}
    assert tries(nvml, device, clock, 6) == [0, 5]
    nvml.fail = {}
    clock.pass_(10)
    assert device.memory() == MEMORY
    nvml.fail = {"v2": "GpuIsLost"}
    assert tries(nvml, device, clock, 30) == [0, 20], "the back-off goes on where it was: it answered for less than a minute"
    nvml.fail = {}
    clock.pass_(60)
    assert device.memory() == MEMORY
    clock.pass_(60)
    nvml.fail = {"v2": "GpuIsLost"}
    assert tries(nvml, device, clock, 10) == [0, 5], "it has answered for a minute: from the start"


def test_a_shutdown_that_fails_is_no_matter(nvml: FakeNvml) -> None:
    device = NvmlDevice("abc")
    device.memory()
    nvml.fail = {"v2": "GpuIsLost", "shutdown": "Uninitialized"}
    assert device.memory() == NoAnswer("NVML: NVMLError_GpuIsLost: GpuIsLost in v2", lost=True)


STATES: list[dict[str, str]] = [
    {},
    {"v2": "GpuIsLost"},
    {"init": "Unknown", "v2": "Unknown"},
    {"init": "DriverNotLoaded", "v2": "Unknown"},
    {"open": "NotFound"},
]


@given(st.lists(st.tuples(st.sampled_from(STATES), st.integers(1, 90)), max_size=8))
def test_whatever_the_driver_does_it_is_asked_seldom_and_found_again_within_a_minute(story: list[tuple[dict[str, str], int]]) -> None:
    nvml, clock = FakeNvml(), Clock()
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "pynvml", nvml)
        device = NvmlDevice("abc", clock=clock)
        assert device.memory() == MEMORY
        for state, seconds in [*story, ({}, 61)]:
            nvml.fail = state
            failures = 0
            for _ in range(seconds):
                before = len(nvml.calls)
                answer = device.memory()
                device.holders()
                assert nvml.references in (0, 1)
                assert (answer == MEMORY) == (nvml.references == 1)
                assert isinstance(answer, DeviceMemory) or answer.lost
                failures += len(nvml.calls) > before and answer != MEMORY
                clock.pass_(1.0)
            assert failures <= 2 + seconds // 5, "no more than one try every five seconds"
        assert answer == MEMORY


# ---------------------------------------------------------------------- who holds the rest


@pytest.fixture
def named(monkeypatch: pytest.MonkeyPatch) -> None:
    """PIDs that mean the same here and for the driver, and names for some."""
    monkeypatch.setattr("elastic_mbs.memory.processes.pids_are_ours", lambda: True)
    monkeypatch.setattr("elastic_mbs.memory.processes.name_of", {10: "python", 11: "Xorg"}.get)


@pytest.mark.usefixtures("named")
def test_the_holders_are_those_of_both_lists_without_us_the_biggest_first(nvml: FakeNvml) -> None:
    nvml.compute = [(12, None), (os.getpid(), 5 * GIB), (11, 1), (10, 3 * GIB)]
    nvml.graphics = [(11, 2 * GIB), (10, None)]
    device = NvmlDevice("abc")
    assert device.holders() == (), "before the first reading there is no handle to ask with"
    device.memory()
    assert device.holders() == (Holder(10, "python", 3 * GIB), Holder(11, "Xorg", 2 * GIB), Holder(12, None, None))


@pytest.mark.parametrize("error", ["NoPermission", "NotSupported", "GpuIsLost", "Unknown"])
def test_a_list_that_is_refused_costs_no_reading(nvml: FakeNvml, error: str) -> None:
    device = NvmlDevice("abc")
    device.memory()
    nvml.fail = {"compute": error}
    assert device.holders() == ()
    nvml.fail = {"graphics": error}
    assert device.holders() == ()
    nvml.nvmlDeviceGetComputeRunningProcesses = lambda _: 42  # type: ignore[method-assign, assignment, return-value]  # nonsense
    assert device.holders() == ()
    assert device.memory() == MEMORY


@pytest.mark.usefixtures("named")
def test_after_a_loss_the_holders_are_forgotten(nvml: FakeNvml) -> None:
    device = NvmlDevice("abc")
    nvml.compute = [(10, GIB)]
    device.memory()
    assert device.holders()
    nvml.fail = {"v2": "GpuIsLost"}
    device.memory()
    assert device.holders() == ()


# ---------------------------------------------------------------------- the driver matrix, through the CUDA sensor


def read(clock: Clock | None = None) -> Reading:
    return CudaSensor("cuda:0", clock=clock or Clock(5.0)).read()


def test_nvml_that_is_lost_leaves_the_runtimes_figures_in_doubt(cuda: FakeCuda, nvml: FakeNvml) -> None:
    clock = Clock(5.0)
    sensor = CudaSensor("cuda:0", clock=clock)
    assert sensor.read() == Headroom(6 * GIB, 9 * GIB, 1 * GIB, "nvml", 5.0)
    nvml.fail = {"v2": "GpuIsLost"}
    doubt = "NVML: NVMLError_GpuIsLost: GpuIsLost in v2"
    assert sensor.read() == Headroom(5 * GIB, 9 * GIB, 2 * GIB, "cuda", 5.0, doubt=doubt)
    nvml.fail = {}
    assert sensor.read() == Headroom(5 * GIB, 9 * GIB, 2 * GIB, "cuda", 5.0, doubt=doubt)
    clock.pass_(5.0)
    assert sensor.read() == Headroom(6 * GIB, 9 * GIB, 1 * GIB, "nvml", 10.0)


def test_a_device_that_neither_answers_for_is_unavailable(cuda: FakeCuda, nvml: FakeNvml) -> None:
    nvml.fail = {"v2": "GpuIsLost"}
    cuda.info = torch.AcceleratorError("CUDA error: unspecified launch failure")
    assert read() == Unavailable("cuda:0: AcceleratorError: CUDA error: unspecified launch failure", 5.0)


@pytest.mark.parametrize(
    ("fail", "lost"),
    [
        ({"init": "LibraryNotFound"}, False),
        ({"init": "DriverNotLoaded"}, False),
        ({"open": "NotFound"}, False),
        ({"open": "InvalidArgument"}, False),
        ({"v2": "NotSupported"}, False),
        ({"v2": "FunctionNotFound", "v1": "NotSupported"}, False),
        ({"init": "Unknown"}, True),
        ({"open": "GpuIsLost"}, True),
        ({"v2": "GpuIsLost"}, True),
        ({"v2": "FunctionNotFound", "v1": "Unknown"}, True),
    ],
    ids=lambda value: "-".join(f"{place}-{name}" for place, name in value.items()) if isinstance(value, dict) else str(value),
)
def test_growth_is_stopped_where_nvml_fails_and_not_where_it_was_never_there(
    cuda: FakeCuda, nvml: FakeNvml, fail: dict[str, str], lost: bool
) -> None:
    nvml.fail = fail
    reading = read()
    assert isinstance(reading, Headroom)
    assert (reading.source, reading.free, reading.capacity) == ("cuda", 5 * GIB, 7 * GIB)
    assert (reading.doubt is not None) == lost


@pytest.mark.parametrize("integrated", [True, False])
@pytest.mark.parametrize("how", ["not supported", "total 0"])
def test_only_a_board_that_shares_the_hosts_memory_is_read_from_the_host(
    cuda: FakeCuda, nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch, integrated: bool, how: str
) -> None:
    """A discrete card that fails says the same to NVML: taking the host's memory for its own would let it grow without end."""
    cuda.properties.is_integrated = integrated
    if how == "total 0":
        nvml.total = nvml.free = 0
    else:
        nvml.fail = {"v2": "NotSupported"}
    monkeypatch.setattr(psutil, "virtual_memory", lambda: types.SimpleNamespace(available=30 * GIB, total=100 * GIB))
    reading = read()
    assert isinstance(reading, Headroom)
    assert (reading.source, reading.total) == (("host", 100 * GIB) if integrated else ("cuda", 9 * GIB))


def test_a_torch_that_tells_no_uuid_is_read_through_the_runtime(cuda: FakeCuda, nvml: FakeNvml) -> None:
    del cuda.properties.uuid
    assert read() == Headroom(5 * GIB, 9 * GIB, 2 * GIB, "cuda", 5.0)
    assert nvml.calls == []


@pytest.mark.parametrize("size", [3 * GIB, None], ids=["told", "not-told"])
@pytest.mark.usefixtures("named")
def test_a_reading_names_who_holds_the_rest(cuda: FakeCuda, nvml: FakeNvml, size: int | None) -> None:
    """On WDDM and WSL the driver does not tell how much."""
    nvml.compute = [(10, size)]
    reading = read()
    assert isinstance(reading, Headroom)
    assert reading.holders == (Holder(10, "python", size),)
