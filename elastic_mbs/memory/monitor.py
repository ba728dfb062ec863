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
_WAIT = 0.1  # seconds
# a reading rests for this many times its own seconds: where every step asks for one, readings take
# at most 1/500 of the time
REST = 500

_process = [object()]
"""A token of this process, exchanged in a forked child: the PID would be a system call."""

if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=lambda: _process.__setitem__(0, object()))


class Monitor:
    """A daemon thread that reads a sensor once per interval and keeps the latest reading.

    A monitor that is garbage-collected ends its thread. A forked child has none until `start` is
    called there.

    Args:
        sensor: the sensor. One that raises, or returns something else than a reading, counts as
            unavailable.
        interval: seconds between readings. 0 means no thread: every `latest` reads in the caller's
            thread, for tests and simulated sensors.
        clock: gives the time stamps, in seconds: each reading gets the time just before the sensor
            was read, whatever stamp it brought.
        on_change: called with the reading when the sensor is lost (there is none, or it is in
            doubt), and when it is back. Called in the thread that read; an error in it is logged in
            the monitor's thread and passes through in the caller's. A bound method is held weakly.

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
        self._sensor = sensor
        self._interval = interval
        self._clock = clock
        self._on_change: Callable[[], OnChange | None]
        self._on_change = (
            weakref.WeakMethod(on_change)
            if isinstance(on_change, MethodType)
            else lambda: on_change
        )
        self._reading: Reading = Unavailable("no reading yet")
        self._available = True
        self._rested_at = -math.inf
        # the one that reads; another one that finds this changed ends
        self._thread: threading.Thread | None = None
        self._wake = threading.Event()  # ends the thread's sleep: to read, or to end
        self._news = threading.Condition()  # there is a new reading
        # the token of the process that started the thread; None without one
        self._started: object = None

    @property
    def running(self) -> bool:
        """True where the thread was started in this process, or none is wanted."""
        return self._started is _process[0] or self._interval == 0

    def start(self) -> None:
        """Start the thread, unless it runs already or the interval is 0.

        Where there can be no thread the sensor counts as unavailable.
        """
        if self.running:
            return
        self._started = _process[0]
        self._wake = threading.Event()
        self._news = threading.Condition()
        weakref.finalize(self, self._wake.set)
        arguments = weakref.ref(self), self._wake, self._interval
        self._thread = threading.Thread(
            target=_watch, args=arguments, name="elastic-mbs-monitor", daemon=True
        )
        try:
            self._thread.start()
        except RuntimeError as error:
            self._thread = self._started = None
            self._publish(Unavailable(f"no thread for the memory monitor: {error}", self._clock()))

    def stop(self) -> None:
        """End the thread, waiting at most two seconds for a sensor that hangs.

        The latest reading stays.
        """
        thread = self._thread if self.running else None
        self._thread = self._started = None
        if thread is not None:
            self._wake.set()
            if thread is not threading.current_thread():
                thread.join(_JOIN_SECONDS)

    def request_reading(self, *, rested: bool = False) -> None:
        """Request a reading now and not at the end of the interval, without waiting for it.

        Args:
            rested: request none where too little time has passed since the last one (`REST`).
        """
        # What a fork left behind is not touched: another thread may have held its lock.
        if self.running and (not rested or self._clock() >= self._rested_at):
            self._wake.set()

    def renew(self) -> bool:
        """Wait for a reading made from now on, but no longer than `_WAIT`; return whether it came.

        For failures, which cost more than that.
        """
        if self._interval == 0:
            self.read_now()
            return True
        if not self.running:
            return False
        asked = self._clock()
        self._wake.set()
        with self._news:
            return self._news.wait_for(lambda: self._reading.at >= asked, _WAIT)

    def latest(self) -> Reading:
        """Return the latest reading, without waiting; `Unavailable` before the first."""
        return self.read_now() if self._interval == 0 else self._reading

    def cached(self) -> Reading:
        """Return the latest reading and never a new one, not even at interval 0."""
        return self._reading

    def read_now(self) -> Reading:
        """Read in the caller's thread; the reading becomes the latest."""
        reading = self._read()
        self._publish(reading)
        return reading

    def _publish(self, reading: Reading) -> None:
        """Keep the reading, and report a change."""
        available = trouble_with(reading) is None
        changed = available != self._available
        self._reading, self._available = reading, available
        with self._news:
            self._news.notify_all()
        on_change = self._on_change() if changed else None
        if on_change is not None:
            on_change(reading)

    def _read(self) -> Reading:
        at = self._clock()
        try:
            reading = self._sensor.read()
            done = self._clock()
            self._rested_at = done + REST * (done - at)
        except Exception as error:  # whatever a sensor does wrong stops growth, never training
            return Unavailable(f"{type(error).__name__}: {error}", at)
        if not isinstance(reading, Headroom | Unavailable):
            return Unavailable(
                f"{type(self._sensor).__name__}.read returned {type(reading).__name__}, not "
                "Headroom or Unavailable",
                at,
            )
        return replace(reading, at=at)


def _watch(reference: weakref.ref[Monitor], wake: threading.Event, interval: float) -> None:
    """Run the thread, which holds its monitor, and so the user's model, only while it reads."""
    while (monitor := reference()) is not None:
        # before all else: an event set from here on asks for another reading, or for the end
        wake.clear()
        if monitor._thread is not threading.current_thread():
            return
        reading = monitor._read()
        try:
            if monitor._thread is threading.current_thread():  # it may have been ended meanwhile
                monitor._publish(reading)
        except Exception:
            logger.exception("an error in on_change of the memory monitor")
        del monitor
        wake.wait(interval)
