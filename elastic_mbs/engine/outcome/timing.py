"""The time that a call took, and the events that report it.

The time is known once the device is done, and nothing waits for it.
"""

from __future__ import annotations

import copy
import os
from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from time import monotonic
from typing import Any, TypeVar

import torch

from elastic_mbs.device import Accelerator, accelerator_of
from elastic_mbs.engine.outcome.result import StepResult, loss_on_host
from elastic_mbs.events import CallDone, CallFailed, EventLog
from elastic_mbs.memory import Headroom, Monitor, UsageMeter

T = TypeVar("T")


class Stopwatch:
    """The clock of one call.

    Without an `accelerator` it is the host's. An accelerator runs behind the host: there the time
    is taken by events in its queue of work, and stays unknown where it has none.
    """

    # Defaults, so that making one is cheap.
    # seconds of failed attempts, always the host's: an allocator refuses there, while the device
    # still runs earlier work
    lost = 0.0
    waited = 0.0  # seconds for memory that others hold
    _seconds: float | None = None  # where the host knows them
    _start: torch.Event | None = None
    _end: torch.Event | None = None

    def __init__(self, accelerator: Accelerator | None) -> None:
        # the model's, which need not be the thread's current one
        self.accelerator = accelerator
        if accelerator is not None:
            self._start = accelerator.stamp()
        self._began = self._attempted = monotonic()

    def attempt(self) -> None:
        """Note that an attempt at a piece begins."""
        self._attempted = monotonic()

    def failed(self, *, whole_call: bool) -> float:
        """Return the seconds that a failure has cost.

        It cost the attempt, or everything since the call began (`whole_call`).
        """
        now = monotonic()
        whole = now - self._began - self.lost - self.waited
        seconds = whole if whole_call else now - self._attempted
        self._attempted = now
        self.lost += seconds
        return seconds

    def note_wait(self, seconds: float) -> None:
        """Note that the call has waited for memory that others hold."""
        self.waited += seconds

    def elapsed(self) -> float:
        """Return the seconds since the call began, by the host's clock."""
        return monotonic() - self._began

    def stop(self) -> float | None:
        """Note the call's end on the host; return its seconds where the host knows them."""
        if self.accelerator is None:
            self._seconds = monotonic() - self._began
        elif self._start is not None:
            self._end = self.accelerator.stamp()
        return self._seconds

    def done(self, *, wait: bool = False) -> bool:
        """Return whether the device has ended the call, too."""
        if self._end is None:
            return True
        try:
            if wait:
                self._end.synchronize()
            return bool(self._end.query())
        except RuntimeError:
            return True  # a lost device: the next step says more

    def seconds(self) -> float | None:
        """Return the seconds of a call that is done; None where the device does not tell."""
        if self._start is None or self._end is None:
            return self._seconds
        try:
            return float(self._start.elapsed_time(self._end)) / 1000
        except RuntimeError:
            return None


# calls that have ended on the host, each with the thing that waits for its seconds
Timed = deque[tuple[Stopwatch, T]]


def known(timed: Timed[T], *, wait: bool = False) -> Iterator[tuple[T, float | None]]:
    """Take out the calls whose seconds are known by now, in order; with `wait`, all of them."""
    while timed and timed[0][0].done(wait=wait):
        watch, payload = timed.popleft()
        yield payload, watch.seconds()


class Telemetry:
    """The source of a runtime's `CallDone` events; there is one only where something listens."""

    def __init__(self, log: EventLog) -> None:
        self._log = log
        self._timed: Timed[tuple[CallDone, float | torch.Tensor | None]] = deque()
        self._pid = os.getpid()

    def done(self, event: CallDone, watch: Stopwatch, result: StepResult | None) -> None:
        """Note that a call has finished, with a `result` if it trained.

        The events whose times and losses are known by now are emitted.
        """
        loss = None if result is None else _fetch(result, watch.accelerator)
        watch = copy.copy(watch)
        watch.stop()  # again: its callbacks have run since, and the loss is being copied
        self._timed.append(
            (watch, (replace(event, seconds_lost=watch.lost, ended=monotonic()), loss))
        )
        self._emit(wait=False)

    def ended(self, event: CallFailed, watch: Stopwatch, error: BaseException) -> None:
        """Emit that a call has ended by `error`.

        A sink that fails now becomes a note on that error: it must not take its place.
        """
        try:
            self._log.emit(replace(event, seconds=watch.elapsed(), seconds_lost=watch.lost))
        except Exception as problem:
            error.add_note(
                "elastic_mbs: a function in on_event failed at CallFailed: "
                f"{type(problem).__name__}: {problem}"
            )

    def rest(self) -> None:
        """Emit the events that are still open, waiting for the device: a runtime ends.

        In a forked child, which has no device to ask, do nothing.
        """
        if self._pid == os.getpid():
            self._emit(wait=True)

    def _emit(self, *, wait: bool) -> None:
        for (event, loss), seconds in known(self._timed, wait=wait):
            number = None if loss is None or seconds is None else _read(loss)
            self._log.emit(replace(event, seconds=seconds, loss=number))


def _read(loss: float | torch.Tensor) -> float | None:
    """Return a loss that has arrived on the host; None where there is no room for one number."""
    try:
        return float(loss)
    except (RuntimeError, MemoryError):
        return None


def _fetch(result: StepResult, accelerator: Accelerator | None) -> float | torch.Tensor | None:
    """Return the loss, where reading it at the end of the call waits for nothing; else None."""
    try:
        if accelerator is None or (home := accelerator_of(result.loss.device)) is None:
            return loss_on_host(result)
        if not home.copies_ahead:
            return None
        found = home.to_host(result.loss)
        if home.device != accelerator.device:
            # the call is done by the clock of another device, which has to come after the copy
            accelerator.current_stream().wait_event(home.mark())
        return found
    except (RuntimeError, MemoryError):  # there is no room for one number: it stays unknown
        return None


def memory_figures(meter: UsageMeter, monitor: Monitor) -> dict[str, Any]:
    """Return the fields of `CallDone` about memory, asking the device nothing.

    Our own use is the meter's, the rest the monitor's latest reading.
    """
    usage, reading = meter.usage(), monitor.cached()
    seen = reading if isinstance(reading, Headroom) else None
    figures = {
        name: getattr(usage, name, None)
        for name in ("allocated", "reserved", "peak_allocated", "peak_reserved")
    }
    figures |= {name: getattr(seen, name, None) for name in ("free", "held_by_others", "total")}
    if usage is None and seen is not None:
        figures["reserved"] = seen.capacity - seen.free
    return figures
