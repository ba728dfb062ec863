"""NVML by the real pynvml over a driver that is not there, and the CUDA sensor over both."""

import os
import subprocess
import sys
import types
from dataclasses import replace
from pathlib import Path

import psutil
import pynvml
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from elastic_mbs.memory import CudaSensor, Headroom, Holder, Monitor, Reading, Unavailable
from elastic_mbs.memory import processes as holders
from elastic_mbs.memory.nvml import NoAnswer, NvmlDevice
from elastic_mbs.memory.processes import holders_on, name_of, pids_are_ours
from tests.helpers.device_sim import Clock
from tests.helpers.fake_nvml import (
    ABSENT,
    GIB,
    LOST,
    UNKNOWN,
    Card,
    FakeCuda,
    FakeDriver,
    read_cuda,
)
from tests.helpers.steps import there

FREE = 6 * GIB
OPEN = ["InitWithFlags", "HandleByUUID", "MemoryInfo"]
NOT_SUPPORTED, NOT_FOUND = pynvml.NVML_ERROR_NOT_SUPPORTED, pynvml.NVML_ERROR_NOT_FOUND


def no_answer(code: int, *, lost: bool) -> NoAnswer:
    error = pynvml.NVMLError(code)
    return NoAnswer(f"NVML: {type(error).__name__}: {error}", lost)


def test_devices_are_found_by_uuid_whatever_their_order_and_opened_once(driver: FakeDriver) -> None:
    driver.cards.append(Card("GPU-def", 5, 9, instances=[Card("MIG-ghi", 1, 2)]))
    devices = [NvmlDevice(uuid) for uuid in ("abc", "def", "ghi")]
    for _ in range(2):
        assert [device.memory() for device in devices] == [FREE, 5, 1]
        driver.cards.reverse()
    assert driver.calls.count("HandleByUUID") == 4, "a MIG instance is looked for as a GPU first"
    assert driver.calls.count("MemoryInfo") == 6


@pytest.mark.parametrize(
    "text",
    [
        None,
        "raise FutureWarning('The pynvml package is deprecated')",
        "NVMLError, nvmlInit = ValueError, int",
    ],
)
def test_a_binding_that_is_missing_or_deprecated_or_foreign_is_no_loss(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str | None
) -> None:
    monkeypatch.delitem(sys.modules, "pynvml")
    if text is None:
        monkeypatch.setitem(sys.modules, "pynvml", None)
    else:
        (tmp_path / "pynvml.py").write_text(text)
        monkeypatch.syspath_prepend(tmp_path)
    device = NvmlDevice("abc")
    answer = device.memory()
    assert isinstance(answer, NoAnswer)
    assert "pynvml" in answer.reason
    assert not answer.lost
    assert device.memory() is answer
    assert device.holders() == ()


def test_figures_that_never_were_are_no_loss(driver: FakeDriver) -> None:
    there = NvmlDevice("abc")
    there.memory()
    driver.cards[0].total = 0
    assert there.memory() == NoAnswer("NVML gives no memory figures for this device", lost=True), (
        "it had some before"
    )
    assert NvmlDevice("abc").memory() == NoAnswer(
        "NVML gives no memory figures for this device", lost=False
    )


@pytest.mark.parametrize("code", [LOST, UNKNOWN, ABSENT, NOT_SUPPORTED])
def test_a_loss_is_latched_and_nvml_is_left_alone_until_a_try_is_due(
    driver: FakeDriver, code: int
) -> None:
    clock = Clock()
    device = NvmlDevice("abc", clock=clock)
    assert device.memory() == FREE
    driver.fail = {"MemoryInfo": code, "Shutdown": UNKNOWN}
    driver.calls.clear()
    lost = no_answer(code, lost=True)
    assert device.memory() == lost
    clock.now += 9.9
    driver.fail, driver.references = {}, 0
    assert device.memory() == lost
    assert driver.calls == ["MemoryInfo", "Shutdown"]
    clock.now += 0.1
    assert device.memory() == FREE
    assert driver.calls == ["MemoryInfo", "Shutdown", *OPEN]


def test_after_the_driver_was_loaded_again_all_references_are_given_back(
    driver: FakeDriver,
) -> None:
    # a stale reference would go on failing: the library looks for the driver only when it has none,
    # and two devices hold one each
    driver.cards.append(Card("GPU-def", 5, 9))
    clock = Clock()
    devices = [NvmlDevice(uuid, clock=clock) for uuid in ("abc", "def")]
    assert [device.memory() for device in devices] == [FREE, 5]
    [gone] = driver.cards[1:]
    driver.cards.remove(gone)
    assert [device.memory() for device in devices] == [FREE, no_answer(LOST, lost=True)], (
        "one that falls off the bus is lost alone"
    )
    driver.cards.append(gone)
    clock.now += 10.0
    assert [device.memory() for device in devices] == [FREE, 5]
    driver.epoch = 1
    driver.fail = {"InitWithFlags": ABSENT}
    assert [device.memory() for device in devices] == [no_answer(UNKNOWN, lost=True)] * 2
    assert driver.references == 0
    driver.fail = {}
    clock.now += 10.0
    assert [device.memory() for device in devices] == [FREE, 5]


STATES: list[dict[str, int]] = [
    {},
    {"MemoryInfo": LOST},
    {"InitWithFlags": UNKNOWN, "MemoryInfo": UNKNOWN},
    {"InitWithFlags": ABSENT, "MemoryInfo": UNKNOWN},
    {"HandleByUUID": NOT_FOUND},
]


@given(st.lists(st.tuples(st.sampled_from(STATES), st.integers(1, 90)), max_size=8))
def test_a_failing_driver_is_asked_seldom_and_found_within_ten_seconds(
    story: list[tuple[dict[str, int], int]],
) -> None:
    clock = Clock()
    with pytest.MonkeyPatch.context() as patch:
        driver = FakeDriver(patch)
        device = NvmlDevice("abc", clock=clock)
        assert device.memory() == FREE
        for state, seconds in [*story, ({}, 11)]:
            driver.fail = state
            failures = 0
            for _ in range(seconds):
                before = len(driver.calls)
                answer = device.memory()
                device.holders()
                assert driver.references == (answer == FREE)
                assert not isinstance(answer, NoAnswer) or answer.lost
                failures += len(driver.calls) > before and answer != FREE
                clock.now += 1.0
            assert failures <= 1 + seconds // 10, "no more than one try every ten seconds"
        assert answer == FREE


@pytest.fixture
def named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give PIDs the same meaning here and for the driver, and names to some."""
    monkeypatch.setattr("elastic_mbs.memory.processes.pids_are_ours", lambda: True)
    monkeypatch.setattr("elastic_mbs.memory.processes.name_of", {10: "python", 11: "Xorg"}.get)


@pytest.mark.usefixtures("named")
def test_holders_are_of_both_lists_without_us_biggest_first(
    driver: FakeDriver,
) -> None:
    card, clock = driver.cards[0], Clock()
    card.compute = [(12, None), (os.getpid(), 5 * GIB), (11, 1), (10, 3 * GIB)]
    card.graphics = [(11, 2 * GIB), (10, None)]
    device = NvmlDevice("abc", clock=clock)
    assert device.holders() == (), "before the first reading there is no handle to ask with"
    device.memory()
    found = (Holder(10, "python", 3 * GIB), Holder(11, "Xorg", 2 * GIB), Holder(12, None, None))
    assert device.holders() == found
    card.graphics = [(10, GIB)]
    assert device.holders() == found
    clock.now += 5.0
    assert len(device.holders()) == 3
    driver.fail = {"MemoryInfo": LOST}
    device.memory()
    assert device.holders() == (), "after a loss they are forgotten"


@pytest.mark.parametrize("which", ["ComputeRunningProcesses", "GraphicsRunningProcesses"])
@pytest.mark.parametrize("code", [NOT_SUPPORTED, LOST, pynvml.NVML_ERROR_FUNCTION_NOT_FOUND])
def test_a_list_that_is_refused_costs_no_reading(driver: FakeDriver, which: str, code: int) -> None:
    device = NvmlDevice("abc")
    device.memory()
    driver.fail = {which: code}
    assert device.holders() == ()
    assert device.memory() == FREE


@pytest.mark.parametrize(
    ("ours", "listed", "named"),
    [(True, True, True), (True, False, True), (False, True, True), (False, False, False)],
    ids=["host", "host-no-context", "shared-pids", "container"],
)
def test_a_pid_of_another_namespace_is_not_given_a_name(
    monkeypatch: pytest.MonkeyPatch, ours: bool, listed: bool, named: bool
) -> None:
    # in a container the driver's PID 42 is the host's: who has that number in here is somebody else
    monkeypatch.setattr(holders, "pids_are_ours", lambda: ours)
    card = FakeDriver(monkeypatch).cards[0]
    card.compute = [(os.getppid(), GIB)]
    card.graphics = [(os.getpid(), GIB)] if listed else []
    pynvml.nvmlInit()
    [found] = holders_on(pynvml, pynvml.nvmlDeviceGetHandleByUUID(card.uuid))
    assert (found.pid, found.bytes) == (os.getppid(), GIB)
    assert (found.name is not None) == named


@pytest.mark.parametrize(
    ("platform", "link", "ours"),
    [
        ("linux", "pid:[4026531836]", True),
        ("linux", "pid:[4026532201]", False),
        ("linux", OSError("no /proc"), False),
        ("win32", OSError("no /proc"), True),
        ("darwin", OSError("no /proc"), True),
    ],
    ids=["host", "container", "no-proc", "windows", "macos"],
)
def test_a_container_is_told_by_its_pid_namespace(
    monkeypatch: pytest.MonkeyPatch, platform: str, link: str | OSError, ours: bool
) -> None:
    def readlink(path: str) -> str:
        assert path == "/proc/self/ns/pid"
        if isinstance(link, OSError):
            raise link
        return link

    monkeypatch.setattr(sys, "platform", platform)
    monkeypatch.setattr(os, "readlink", readlink)
    assert pids_are_ours() == ours


def test_a_process_has_a_name_while_it_is_there() -> None:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    with process:
        assert "python" in there(name_of(process.pid)).lower()
    assert name_of(process.pid) is None
    assert name_of(-1) is None
    assert name_of(2**80) is None


def test_nvml_that_is_lost_leaves_the_runtimes_figures_in_doubt_until_it_is_back(
    cuda: FakeCuda, driver: FakeDriver
) -> None:
    clock, changes = Clock(5.0), list[Reading]()
    monitor = Monitor(
        CudaSensor("cuda:0", clock=clock), interval=0, clock=clock, on_change=changes.append
    )
    good = Headroom(6 * GIB, 9 * GIB, 1 * GIB, "nvml", 5.0)
    doubtful = Headroom(
        5 * GIB, 9 * GIB, 2 * GIB, "cuda", 5.0, doubt=no_answer(LOST, lost=True).reason
    )
    assert monitor.latest() == good
    driver.fail = {"MemoryInfo": LOST}
    assert monitor.latest() == doubtful
    driver.fail = {}
    assert monitor.latest() == doubtful
    clock.now += 10.0
    back = replace(good, at=15.0)
    assert monitor.latest() == back
    assert changes == [doubtful, back]


def test_a_device_that_neither_answers_for_is_unavailable(
    cuda: FakeCuda, driver: FakeDriver
) -> None:
    driver.fail = {"MemoryInfo": LOST}
    cuda.info = torch.AcceleratorError("CUDA error: unspecified launch failure")
    assert CudaSensor("cuda:0", clock=Clock(5.0)).read() == Unavailable(
        "cuda:0: AcceleratorError: CUDA error: unspecified launch failure", 5.0
    )


@pytest.mark.parametrize(
    ("where", "code", "lost"),
    [
        ("InitWithFlags", ABSENT, False),
        ("InitWithFlags", pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, False),
        ("InitWithFlags", pynvml.NVML_ERROR_NO_PERMISSION, False),
        ("HandleByUUID", NOT_FOUND, False),
        ("HandleByUUID", pynvml.NVML_ERROR_INVALID_ARGUMENT, False),
        ("HandleByUUID", pynvml.NVML_ERROR_FUNCTION_NOT_FOUND, False),
        ("MemoryInfo", NOT_SUPPORTED, False),
        ("InitWithFlags", UNKNOWN, True),
        ("HandleByUUID", LOST, True),
        ("MemoryInfo", LOST, True),
    ],
)
def test_growth_is_stopped_where_nvml_fails_and_not_where_it_was_never_there(
    cuda: FakeCuda, driver: FakeDriver, where: str, code: int, lost: bool
) -> None:
    driver.fail = {where: code}
    reading = read_cuda()
    assert (reading.source, reading.free, reading.capacity) == ("cuda", 5 * GIB, 7 * GIB)
    assert reading.doubt == (no_answer(code, lost=True).reason if lost else None)


@pytest.mark.parametrize("integrated", [True, False])
@pytest.mark.parametrize("how", ["not supported", "total 0"])
def test_only_a_board_that_shares_the_hosts_memory_is_read_from_the_host(
    cuda: FakeCuda, driver: FakeDriver, monkeypatch: pytest.MonkeyPatch, integrated: bool, how: str
) -> None:
    # a discrete card that fails says the same to NVML: taking the host's memory for its own would
    # let it grow without end
    cuda.properties.is_integrated = integrated
    driver.cards[0].total = 0
    driver.fail = {"MemoryInfo": NOT_SUPPORTED} if how == "not supported" else {}
    monkeypatch.setattr(
        psutil, "virtual_memory", lambda: types.SimpleNamespace(available=30 * GIB, total=100 * GIB)
    )
    reading = read_cuda()
    assert (reading.source, reading.total) == (
        ("host", 100 * GIB) if integrated else ("cuda", 9 * GIB)
    )


def test_a_torch_that_tells_no_uuid_is_read_through_the_runtime(
    cuda: FakeCuda, driver: FakeDriver
) -> None:
    del cuda.properties.uuid
    assert read_cuda() == Headroom(5 * GIB, 9 * GIB, 2 * GIB, "cuda", 5.0)
    assert driver.calls == []


@pytest.mark.usefixtures("named")
def test_a_reading_names_who_holds_the_rest(cuda: FakeCuda, driver: FakeDriver) -> None:
    driver.cards[0].compute = [(10, 3 * GIB)]
    assert read_cuda().holders == (Holder(10, "python", 3 * GIB),)
