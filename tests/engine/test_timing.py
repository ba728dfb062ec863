"""Seconds of a call come once, in order, when its device is done, and are never waited for."""

from __future__ import annotations

from typing import ClassVar

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from elastic_mbs.engine.timing import CallClock

CPU = torch.device("cpu")


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@given(st.lists(st.tuples(st.floats(0, 1e3), st.floats(0, 1e3), st.booleans()), max_size=8))
def test_on_a_cpu_the_seconds_of_a_call_are_known_when_it_ends(calls: list[tuple[float, float, bool]]) -> None:
    host = Clock()
    clock: CallClock[int] = CallClock(host)
    for number, (pause, seconds, ends) in enumerate(calls):
        host.now += pause
        clock.start(CPU)
        began = host.now
        host.now += seconds
        if ends:  # one that ended by an exception leaves no time
            clock.stop(number)
        assert list(clock.done()) == ([(number, host.now - began)] if ends else [])


class DeviceEvent:
    """A device event on a device whose work is done when the test says so."""

    now: ClassVar[float] = 0.0
    horizon: ClassVar[float] = 0.0
    lost: ClassVar[bool] = False
    streams: ClassVar[list[torch.device]] = []

    def __init__(self, *, enable_timing: bool) -> None:
        assert enable_timing
        self.at = 0.0

    def record(self, stream: torch.device) -> None:
        self.at = DeviceEvent.now
        DeviceEvent.streams.append(stream)

    def query(self) -> bool:
        if DeviceEvent.lost:
            raise RuntimeError("CUDA error: unspecified launch failure")
        return self.at <= DeviceEvent.horizon

    def synchronize(self) -> None:
        DeviceEvent.horizon = max(DeviceEvent.horizon, self.at)

    def elapsed_time(self, end: DeviceEvent) -> float:
        if DeviceEvent.lost:
            raise RuntimeError("CUDA error: unspecified launch failure")
        return 1000 * (end.at - self.at)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> torch.device:
    monkeypatch.setattr(torch.cuda, "Event", DeviceEvent)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: device)
    for name, value in {"now": 0.0, "horizon": 0.0, "lost": False, "streams": []}.items():
        monkeypatch.setattr(DeviceEvent, name, value)
    return torch.device("cuda", 1)


def test_times_of_a_device_come_when_its_work_is_done_once_each_and_in_order(device: torch.device) -> None:
    clock: CallClock[int] = CallClock()
    for number in range(4):
        clock.start(device)
        DeviceEvent.now += 1 + number
        clock.stop(number)
    assert list(clock.done()) == []
    DeviceEvent.horizon = 3
    assert list(clock.done()) == [(0, 1.0), (1, 2.0)]
    assert list(clock.done()) == []
    assert list(clock.done(wait=True)) == [(2, 3.0), (3, 4.0)]
    assert DeviceEvent.streams == [device] * 8  # the model's, whichever is current


def test_a_device_that_is_lost_leaves_times_unknown_and_raises_nothing(device: torch.device) -> None:
    clock: CallClock[int] = CallClock()
    clock.start(device)
    clock.stop(0)
    DeviceEvent.lost = True
    assert list(clock.done()) == [(0, None)]
