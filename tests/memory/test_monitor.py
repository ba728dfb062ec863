"""The thread that keeps the latest reading: its times, its news, and its end."""

import gc
import logging
import os
import subprocess
import sys
import textwrap
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import pytest

from elastic_mbs.errors import UsageError
from elastic_mbs.memory import Headroom, Monitor, Reading, Unavailable
from elastic_mbs.memory import monitor as module

LOST = Unavailable("lost", 1.0)


class Script:
    """A sensor that answers, raises or blocks as told: the last answer stays."""

    def __init__(self, *answers: Any) -> None:
        self.answers = list(answers)
        self.reads = 0
        self.read_once = threading.Event()

    def read(self) -> Reading:
        self.reads += 1
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        self.read_once.set()
        if isinstance(answer, BaseException):
            raise answer
        return answer() if callable(answer) else answer  # type: ignore[no-any-return]  # a script may answer anything


def room(free: int = 5, at: float = 1.0) -> Headroom:
    return Headroom(free, 10, 0, "script", at)


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline, "nothing happened in two minutes"
        time.sleep(0.001)


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "elastic-mbs-monitor"]


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Any:
    yield
    wait_until(lambda: not threads())


def test_a_reading_is_stamped_before_the_sensor_is_asked_and_becomes_the_latest() -> None:
    now = [1.0]

    def slow() -> Reading:
        now[0] = 50.0
        return room(at=99.0)

    sensor = Script(slow, LOST)
    monitor = Monitor(sensor, clock=lambda: now[0])
    assert monitor.latest() == Unavailable("no reading yet")
    assert sensor.reads == 0
    assert monitor.read_now() == monitor.latest() == monitor.cached() == room(at=1.0)
    assert monitor.read_now() == monitor.latest() == Unavailable("lost", at=50.0)


def test_an_interval_of_zero_has_no_thread_and_no_time_is_refused() -> None:
    sensor = Script(room(1), room(2))
    monitor = Monitor(sensor, interval=0, clock=lambda: 1.0)
    monitor.start()
    assert threads() == []
    assert [monitor.latest(), monitor.latest(), monitor.cached()] == [room(1), room(2), room(2)]
    assert sensor.reads == 2
    monitor.stop()
    for wrong in (-1, float("nan"), float("inf")):
        with pytest.raises(UsageError, match=f"monitor_interval={wrong!r}"):
            Monitor(sensor, interval=wrong)


def test_the_thread_reads_at_once_and_then_every_interval_until_it_is_stopped() -> None:
    sensor = Script(room(1), room(2), room(3))
    monitor = Monitor(sensor, interval=0.005, clock=lambda: 1.0)
    for _ in range(2):  # it can be started again
        reads = sensor.reads
        monitor.start()
        monitor.start()
        assert len(threads()) == 1
        wait_until(lambda reads=reads: sensor.reads >= reads + 3)  # type: ignore[misc]  # a default is no type that mypy infers
        monitor.stop()
        monitor.stop()
        assert threads() == []
        assert monitor.latest() == room(3)


def test_a_requested_reading_comes_before_the_interval_is_over() -> None:
    sensor = Script(room())
    monitor = Monitor(sensor, interval=3600)
    monitor.request_reading()  # no thread yet: the first reading will come anyway
    monitor.start()
    for reads in (1, 2, 3):
        wait_until(lambda reads=reads: sensor.reads == reads)  # type: ignore[misc]  # a default is no type that mypy infers
        monitor.request_reading()
    wait_until(lambda: sensor.reads == 4)
    monitor.stop()
    monitor.request_reading()
    assert sensor.reads == 4


def test_a_reading_after_a_failure_is_waited_for_but_not_for_long() -> None:
    here, hangs = threading.Event(), threading.Event()

    def read() -> Reading:
        if hangs.is_set():
            here.wait(120)
        return room()

    sensor = Script(read)
    monitor = Monitor(sensor, interval=3600)
    assert not monitor.renew(), "there is no thread"
    monitor.start()
    for _ in range(5):
        asked = time.monotonic()
        while not monitor.renew():  # a busy machine may take longer than a tenth of a second
            pass
        assert monitor.cached().at >= asked
    hangs.set()
    assert not monitor.renew()
    here.set()
    monitor.stop()
    at_once = Monitor(Script(room(1), room(2)), interval=0)
    assert at_once.renew()
    assert getattr(at_once.cached(), "free", None) == 1


def test_requested_readings_leave_the_step_its_time() -> None:
    now, takes = [0.0], 0.01

    def slow() -> Reading:
        now[0] += takes
        return room()

    sensor = Script(slow)
    monitor = Monitor(sensor, interval=3600, clock=lambda: now[0])
    monitor.start()
    wait_until(lambda: isinstance(monitor.latest(), Headroom))
    now[0] = takes + 490 * takes
    monitor.request_reading(rested=True)
    time.sleep(0.1)  # nothing shows that a reading does not come
    assert sensor.reads == 1
    now[0] = takes + 510 * takes
    monitor.request_reading(rested=True)
    wait_until(lambda: sensor.reads == 2)
    monitor.stop()


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (ValueError("bad"), "ValueError: bad"),
        (None, "Script.read returned NoneType, not Headroom or Unavailable"),
    ],
)
def test_a_sensor_that_misbehaves_is_unavailable_and_an_interrupt_passes_through(
    answer: Any, reason: str
) -> None:
    assert Monitor(Script(answer), clock=lambda: 1.0).read_now() == Unavailable(reason, 1.0)
    with pytest.raises(KeyboardInterrupt):
        Monitor(Script(KeyboardInterrupt())).read_now()


@pytest.mark.parametrize(
    ("answers", "told"),
    [([room(), room(6), LOST, LOST, room(), room()], [LOST, room()]), ([LOST], [LOST])],
    ids=["lost and back", "never there"],
)
def test_a_change_is_told_once(answers: list[Reading], told: list[Reading]) -> None:
    seen: list[Reading] = []
    monitor = Monitor(Script(*answers), clock=lambda: 1.0, on_change=seen.append)
    for _ in range(6):
        monitor.read_now()
    assert seen == told


def test_an_error_in_on_change_does_not_end_the_thread(caplog: pytest.LogCaptureFixture) -> None:
    def fail(_: Reading) -> None:
        raise RuntimeError("sink is full")

    sensor = Script(LOST, room())
    monitor = Monitor(sensor, interval=0.005, on_change=fail)
    with caplog.at_level(logging.ERROR, "elastic_mbs"):
        monitor.start()
        wait_until(lambda: sensor.reads > 3)
        monitor.stop()
    assert isinstance(monitor.latest(), Headroom)
    assert [record.message for record in caplog.records] == [
        "an error in on_change of the memory monitor"
    ] * 2
    with pytest.raises(RuntimeError, match="sink is full"):
        Monitor(Script(LOST), on_change=fail).read_now()


class Owner:
    """Holds a monitor and is told of its changes, as the runtime does."""

    def __init__(self, sensor: Script) -> None:
        self.seen: list[Reading] = []
        self.monitor = Monitor(sensor, interval=0.005, on_change=self.changed)
        self.monitor.start()

    def changed(self, reading: Reading) -> None:
        self.seen.append(reading)


def test_the_thread_ends_with_its_owner_and_does_not_keep_it_alive() -> None:
    owner = Owner(Script(LOST, room()))
    seen = owner.seen
    wait_until(lambda: len(seen) == 2)
    gone = weakref.ref(owner)
    del owner
    gc.collect()
    assert gone() is None
    wait_until(lambda: not threads())


def test_stopping_does_not_wait_for_a_sensor_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_JOIN_SECONDS", 0.05)
    release = threading.Event()

    def hang() -> Reading:
        release.wait(120)
        return room()

    sensor = Script(hang)
    monitor = Monitor(sensor, interval=100)
    monitor.start()
    assert sensor.read_once.wait(120)
    monitor.stop()
    assert threads()  # it still hangs
    release.set()
    wait_until(lambda: not threads())
    assert monitor.latest() == Unavailable("no reading yet"), (
        "what comes after the end is not published"
    )


def test_on_change_may_stop_the_monitor() -> None:
    box: list[Monitor] = []
    stopped = threading.Event()

    def stop(_: Reading) -> None:
        box[0].stop()
        stopped.set()

    box.append(Monitor(Script(LOST), interval=100, on_change=stop))
    box[0].start()
    assert stopped.wait(120)


def test_where_there_can_be_no_thread_the_sensor_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    seen: list[Reading] = []
    monkeypatch.setattr(threading.Thread, "start", fail)
    monitor = Monitor(Script(room()), clock=lambda: 2.0, on_change=seen.append)
    monitor.start()
    assert not monitor.running
    assert monitor.latest() == Unavailable(
        "no thread for the memory monitor: can't start new thread", 2.0
    )
    assert seen == [monitor.latest()]


def run(code: str) -> None:
    """Run a script in its own process: fork and the threads of a test runner do not mix."""
    prelude = """
        import os, signal, threading, time
        from elastic_mbs.memory import Headroom, Monitor

        class Sensor:
            def read(self):
                return Headroom(os.getpid(), 10**9, 0, "pid", 0.0)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(prelude) + textwrap.dedent(code)],
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert (done.returncode, done.stdout) == (0, "end\n"), done.stderr


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_child_reads_on_whatever_was_locked_at_the_fork() -> None:
    run("""
        def wait_for(pid):
            deadline = time.monotonic() + 120
            while getattr(monitor.cached(), "free", None) != pid:
                assert time.monotonic() < deadline
                time.sleep(0.001)

        monitor, never, stopped = (Monitor(Sensor(), interval=0.005) for _ in range(3))
        monitor.start(), stopped.start()
        wait_for(os.getpid())
        with monitor._wake._cond, stopped._wake._cond:  # as another thread may at the fork
            pid = os.fork()
        if pid == 0:
            signal.alarm(100)
            assert threading.active_count() == 1
            stopped.stop()
            monitor.request_reading()
            assert not (monitor.running or never.running or stopped.running)
            monitor.start()
            wait_for(os.getpid())
            assert threading.active_count() == 2
            monitor.stop()
            assert threading.active_count() == 1
            os._exit(0)
        assert os.waitpid(pid, 0)[1] == 0
        wait_for(os.getpid())
        print("end")
    """)


def test_a_running_monitor_does_not_hold_up_the_end_of_the_process() -> None:
    run("""
        monitor = Monitor(Sensor(), interval=1000)
        monitor.start()
        print("end")
    """)
