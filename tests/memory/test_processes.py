"""Who holds the rest: which PIDs can be named, and how they are told."""

from __future__ import annotations

import os
import subprocess
import sys

import pynvml
import pytest

from elastic_mbs.memory import Holder
from elastic_mbs.memory import processes as holders
from elastic_mbs.memory.processes import describe, holders_on, name_of, pids_are_ours
from tests.helpers.fake_nvml import GIB, FakeDriver


@pytest.mark.parametrize(
    ("found", "words"),
    [
        ([], ""),
        ([Holder(8, "python", 3 * GIB), Holder(7, None, GIB), Holder(3)], "python (PID 8) 3.0 GiB, PID 7 1.0 GiB, PID 3"),
        ([Holder(n) for n in range(6)], "PID 0, PID 1, PID 2, and 3 more"),
    ],
    ids=range(3),
)
def test_the_first_three_are_named_and_the_others_counted(found: list[Holder], words: str) -> None:
    assert describe(found) == words


@pytest.mark.parametrize(
    ("ours", "listed", "named"),
    [(True, True, True), (True, False, True), (False, True, True), (False, False, False)],
    ids=["host", "host-no-context", "shared-pids", "container"],
)
def test_a_pid_of_another_namespace_is_not_given_a_name(monkeypatch: pytest.MonkeyPatch, ours: bool, listed: bool, named: bool) -> None:
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
def test_a_container_is_told_by_its_pid_namespace(monkeypatch: pytest.MonkeyPatch, platform: str, link: str | OSError, ours: bool) -> None:
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
        found = name_of(process.pid)
    assert found is not None
    assert "python" in found.lower()
    assert name_of(process.pid) is None
    assert name_of(-1) is None
    assert name_of(2**80) is None
