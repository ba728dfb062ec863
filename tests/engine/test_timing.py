from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from elastic_mbs.engine.timing import Stopwatch


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@given(st.lists(st.tuples(st.floats(0, 1e3), st.floats(0, 1e3)), max_size=8))
def test_on_a_cpu_the_seconds_since_the_start_are_known_at_once(calls: list[tuple[float, float]]) -> None:
    clock = Clock()
    watch: Stopwatch[int] = Stopwatch(torch.device("cpu"), clock)
    for number, (pause, seconds) in enumerate(calls):
        clock.now += pause
        watch.start()
        began = clock.now
        clock.now += seconds
        assert watch.seconds() == clock.now - began
        watch.later(number)
        assert watch.finished() == []  # nothing is left to find out


def test_a_call_that_ended_early_leaves_no_time() -> None:
    clock = Clock()
    watch: Stopwatch[str] = Stopwatch(torch.device("cpu"), clock)
    watch.start()
    clock.now += 50
    watch.start()  # the next call; the one before ended by an exception
    clock.now += 2
    assert watch.seconds() == 2.0


def test_the_default_clock_counts_seconds() -> None:
    watch: Stopwatch[None] = Stopwatch(torch.device("cpu"))
    before = time.perf_counter()
    watch.start()
    seconds = watch.seconds()
    assert seconds is not None
    assert 0 <= seconds <= time.perf_counter() - before


class Event:
    """A device event on a device whose work is done when the test says so."""

    done: Callable[[float], bool] = staticmethod(lambda at: False)
    clock = Clock()
    streams: ClassVar[list[torch.device]] = []

    def __init__(self, *, enable_timing: bool) -> None:
        assert enable_timing
        self.at = 0.0

    def record(self, stream: torch.device) -> None:
        self.at = Event.clock.now
        Event.streams.append(stream)

    def query(self) -> bool:
        return Event.done(self.at)

    def elapsed_time(self, end: Event) -> float:
        return 1000 * (end.at - self.at)


def test_times_of_a_device_come_when_its_work_is_done_once_each_and_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: device)
    horizon = 0.0
    monkeypatch.setattr(Event, "done", staticmethod(lambda at: at <= horizon))
    watch: Stopwatch[Any] = Stopwatch(torch.device("cuda", 0))
    for number in range(3):
        watch.start()
        Event.clock.now += 1 + number
        assert watch.seconds() is None
        watch.later(number)
    assert watch.finished() == []
    horizon = Event.clock.now - 3  # the first two
    assert watch.finished() == [(0, 1.0), (1, 2.0)]
    assert watch.finished() == []
    horizon = Event.clock.now
    assert watch.finished() == [(2, 3.0)]


def test_work_is_timed_on_the_models_device_whichever_is_current(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: device)
    monkeypatch.setattr(Event, "streams", [])
    watch: Stopwatch[None] = Stopwatch(torch.device("cuda", 1))
    watch.start()
    watch.later(None)
    assert Event.streams == [torch.device("cuda", 1)] * 2
