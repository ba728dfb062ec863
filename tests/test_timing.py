from __future__ import annotations

import time

import torch
from hypothesis import given
from hypothesis import strategies as st

from elastic_mbs.timing import Stopwatch


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_nothing_is_known_before_a_call_ended() -> None:
    watch: Stopwatch[str] = Stopwatch(torch.device("cpu"), Clock())
    assert watch.finished() == []
    watch.start()
    assert watch.finished() == []


@given(st.lists(st.tuples(st.floats(0, 1e3), st.floats(0, 1e3), st.booleans()), max_size=8))
def test_every_call_is_given_once_with_its_own_time_in_order(calls: list[tuple[float, float, bool]]) -> None:
    clock, found = Clock(), []
    watch: Stopwatch[int] = Stopwatch(torch.device("cpu"), clock)
    expected = []
    for number, (pause, seconds, look) in enumerate(calls):
        clock.now += pause
        watch.start()
        began = clock.now
        clock.now += seconds
        watch.stop(number)
        expected.append((number, clock.now - began))
        if look:
            found += watch.finished()
    found += watch.finished()
    assert found == expected
    assert watch.finished() == []


def test_a_call_that_ended_early_leaves_no_time() -> None:
    clock = Clock()
    watch: Stopwatch[str] = Stopwatch(torch.device("cpu"), clock)
    watch.start()
    clock.now += 50
    watch.start()  # the next call; the one before ended by an exception
    clock.now += 2
    watch.stop("second")
    assert watch.finished() == [("second", 2.0)]


def test_the_default_clock_counts_seconds() -> None:
    watch: Stopwatch[None] = Stopwatch(torch.device("cpu"))
    before = time.perf_counter()
    watch.start()
    time.sleep(0.01)
    watch.stop(None)
    ((_, seconds),) = watch.finished()
    assert 0.009 <= seconds <= time.perf_counter() - before
