"""The thread that reads the memory sensor, so that a training step never waits for one."""

from __future__ import annotations

import math
import os
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import replace
from types import MethodType

from elastic_mbs.errors import UsageError
from elastic_mbs.events import logger
from elastic_mbs.memory.sensor import Headroom, MemorySensor, Reading, Unavailable, trouble_with

OnChange = Callable[[Reading], None]

_JOIN_SECONDS = 2.0
_forks = 0  # between this process and the one that imported us: to ask for the process's id would be a system call in every step


def _count_fork() -> None:
    global _forks  # noqa: PLW0603  # a number of the process's, not of an object's
    _forks += 1


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_count_fork)


class Monitor:
    """Reads a sensor once per interval in a daemon thread and keeps the latest reading.

    A monitor that is garbage-collected ends its thread. A forked child has none; the first `latest` or `read_now` there starts one again.

    Args:
        sensor: what to read. One that raises, or returns something else than a reading, counts as unavailable.
        interval: seconds between readings. 0 means no thread: every `latest` reads in the caller's thread, for tests and simulated sensors.
        clock: gives the time stamps, in seconds. Every reading is stamped with the time just before the sensor was read, whatever stamp it brought.
        on_change: called with the reading when the sensor is lost (there is none, or it is in doubt), and when it is back. Called in the thread that
            read; an error in it is logged in the monitor's thread and passes through in the caller's. A bound method is held weakly.

    Raises:
        UsageError: the interval is negative or not a number.
    """

    def __init__(
        self,
        sensor: MemorySensor,
        *,
        interval: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
        on_change: OnChange | None = None,
    ) -> None:
        if not (isinstance(interval, int | float) and interval >= 0 and math.isfinite(interval)):
            raise UsageError(f"monitor_interval={interval!r} must be a number of seconds >= 0")
        self._interval = interval
        self._latest = _Latest(sensor, clock, on_change)
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._alarm: _Alarm | None = None
        self._ender: weakref.finalize[[], Monitor] | None = None
        self._forks = _forks

    @property
    def running(self) -> bool:
        """Whether the thread was started, in this process or in the one that it was forked from, or none is wanted."""
        return self._thread is not None or self._interval == 0

    def start(self) -> None:
        """Starts the thread, unless it runs already or the interval is 0. Where there can be no thread the sensor counts as unavailable."""
        self._after_fork(restart=False)
        with self._lock:
            if self._interval == 0 or self._thread is not None:
                return
            alarm = _Alarm()
            thread = threading.Thread(target=_watch, args=(self._latest, self._interval, alarm), name="elastic-mbs-monitor", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:
                self._latest.publish(Unavailable(f"no thread for the memory monitor: {error}", self._latest.clock()))
                return
            self._thread, self._alarm, self._ender = thread, alarm, weakref.finalize(self, alarm.end)

    def stop(self) -> None:
        """Ends the thread, waiting at most two seconds for a sensor that hangs. The latest reading stays."""
        self._after_fork(restart=False)
        with self._lock:
            thread, ender, self._thread, self._alarm, self._ender = self._thread, self._ender, None, None, None
        if thread is not None and ender is not None:
            ender()
            if thread is not threading.current_thread():
                thread.join(_JOIN_SECONDS)

    def request_reading(self) -> None:
        """Requests a reading now and not at the end of the interval, without waiting for it."""
        self._after_fork(restart=True)
        if (alarm := self._alarm) is not None:
            alarm.rung.set()

    def latest(self) -> Reading:
        """The latest reading, without waiting; `Unavailable("no reading yet")` before the first."""
        if self._interval == 0:
            return self.read_now()
        self._after_fork(restart=True)
        return self._latest.reading

    def cached(self) -> Reading:
        """The latest reading and never a new one, not even at interval 0."""
        return self._latest.reading

    def read_now(self) -> Reading:
        """One reading now, in the caller's thread; it becomes the latest."""
        self._after_fork(restart=True)
        return self._latest.update()

    def _after_fork(self, *, restart: bool) -> None:
        """In a forked child, drops the parent's thread and the locks that it may have held; starts a new one if the parent's ran."""
        if self._forks == _forks:
            return
        ran = self._thread is not None
        self._forks, self._lock, self._thread, self._alarm = _forks, threading.Lock(), None, None
        if self._ender is not None:
            self._ender.detach()
            self._ender = None
        self._latest.lock = threading.Lock()
        if ran and restart:
            self.start()


class _Alarm:
    """Wakes the thread before its interval is over: to end, or to read."""

    def __init__(self) -> None:
        self.rung = threading.Event()
        self.ended = False

    def end(self) -> None:
        self.ended = True
        self.rung.set()


class _Latest:
    """The latest reading and how to get the next: all that the thread holds, so that neither a monitor nor the user's model lives as long as it."""

    def __init__(self, sensor: MemorySensor, clock: Callable[[], float], on_change: OnChange | None) -> None:
        self.reading: Reading = Unavailable("no reading yet")
        self.lock = threading.Lock()
        self.clock = clock
        self._sensor = sensor
        self._on_change: Callable[[], OnChange | None]
        self._on_change = weakref.WeakMethod(on_change) if isinstance(on_change, MethodType) else lambda: on_change
        self._available = True

    def update(self, alarm: _Alarm | None = None) -> Reading:
        """Reads and publishes, unless the thread was ended meanwhile."""
        reading = self._read()
        if alarm is None or not alarm.ended:
            self.publish(reading)
        return reading

    def publish(self, reading: Reading) -> None:
        """Keeps the reading, and reports a change."""
        available = trouble_with(reading) is None
        with self.lock:
            changed = available != self._available
            self.reading, self._available = reading, available
        on_change = self._on_change() if changed else None
        if on_change is not None:
            on_change(reading)

    def _read(self) -> Reading:
        at = self.clock()
        try:
            reading = self._sensor.read()
        except Exception as error:  # whatever a sensor does wrong stops growth, never training
            return Unavailable(f"{type(error).__name__}: {error}", at)
        if not isinstance(reading, Headroom | Unavailable):
            return Unavailable(f"{type(self._sensor).__name__}.read returned {type(reading).__name__}, not Headroom or Unavailable", at)
        return replace(reading, at=at)


def _watch(latest: _Latest, interval: float, alarm: _Alarm) -> None:
    while not alarm.ended:
        alarm.rung.clear()  # before the reading: what rings from here on asks for another one
        try:
            latest.update(alarm)
        except Exception:
            logger.exception("an error in on_change of the memory monitor")
        if not alarm.ended:  # `end` may have rung before the line that clears
            alarm.rung.wait(interval)
