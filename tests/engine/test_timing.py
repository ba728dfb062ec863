"""Seconds of a call come once, in order, when its device is done, and are never waited for."""

from __future__ import annotations

from collections import deque
from typing import ClassVar

import pytest
import torch

from elastic_mbs.engine import timing
from elastic_mbs.engine.timing import Stopwatch, Timed, known

CPU = torch.device("cpu")


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(timing, "monotonic", clock)
    return clock


def test_on_a_cpu_the_seconds_of_a_call_are_known_when_it_ends(host: Clock) -> None:
    watch = Stopwatch(CPU)
    host.now += 3
    watch.stop()
    host.now += 1
    assert list(known(deque([(watch, "it")]))) == [("it", 3.0)]


def test_what_a_replay_from_the_start_loses_is_counted_once(host: Clock) -> None:
    watch = Stopwatch(CPU)
    host.now += 1  # a piece that commits
    watch.attempt()
    host.now += 2
    assert watch.failed("piece") == 2
    watch.attempt()
    host.now += 4
    assert watch.failed("step") == 5  # this attempt and the piece that had committed
    watch.attempt()
    host.now += 8
    assert watch.failed("isolate") == 8
    assert (watch.lost, watch.elapsed()) == (15, 15)


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
    timed: Timed[int] = deque()
    for number in range(4):
        watch = Stopwatch(device)
        DeviceEvent.now += 1 + number
        watch.stop()
        timed.append((watch, number))
    assert list(known(timed)) == []
    DeviceEvent.horizon = 3
    assert list(known(timed)) == [(0, 1.0), (1, 2.0)]
    assert list(known(timed)) == []
    assert list(known(timed, wait=True)) == [(2, 3.0), (3, 4.0)]
    assert DeviceEvent.streams == [device] * 8  # the model's, whichever is current


def test_a_device_that_is_lost_leaves_times_unknown_and_raises_nothing(device: torch.device) -> None:
    watch = Stopwatch(device)
    watch.stop()
    DeviceEvent.lost = True
    assert list(known(deque([(watch, 0)]))) == [(0, None)]
