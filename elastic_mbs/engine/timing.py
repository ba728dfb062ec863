"""How long a call took, known once its device is done and never waited for; and the events that report it."""

from __future__ import annotations

import copy
import os
from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from time import monotonic
from typing import Any, TypeVar

import torch

from elastic_mbs.engine.result import StepResult, loss_on_host
from elastic_mbs.events import CallDone, CallFailed, EventLog
from elastic_mbs.memory import Headroom, Monitor, UsageMeter

T = TypeVar("T")


class Stopwatch:
    """Times one call: by the host's clock, or by events in the queue of work of the `device` that is given, which is asynchronous."""

    # Defaults, so that making one is cheap.
    # seconds of failed attempts, always the host's: an allocator refuses there, while the device
    # still runs earlier work
    lost = 0.0
    _seconds: float | None = None  # where the host knows them
    _start: torch.cuda.Event | None = None
    _end: torch.cuda.Event | None = None

    def __init__(self, device: torch.device | None) -> None:
        self.device = device  # the model's, which need not be the thread's current one
        if device is not None:
            self._start = _stamp(device)
        self._began = self._attempted = monotonic()

    def attempt(self) -> None:
        """An attempt at a piece begins."""
        self._attempted = monotonic()

    def failed(self, *, whole_call: bool) -> float:
        """An attempt has failed and is undone, or everything since the call began; returns the seconds that this has cost."""
        now = monotonic()
        seconds = now - self._began - self.lost if whole_call else now - self._attempted
        self._attempted = now
        self.lost += seconds
        return seconds

    def elapsed(self) -> float:
        """Seconds since the call began, by the host's clock."""
        return monotonic() - self._began

    def stop(self) -> float | None:
        """The call has ended on the host; returns its seconds where the host knows them."""
        if self.device is None:
            self._seconds = monotonic() - self._began
        elif self._start is not None:
            self._end = _stamp(self.device)
        return self._seconds

    def done(self, *, wait: bool = False) -> bool:
        """Whether the device has ended the call, too."""
        if self._end is None:
            return True
        try:  # cuda-only
            if wait:
                self._end.synchronize()
            return bool(self._end.query())
        except RuntimeError:  # cuda-only
            return True  # a lost device: the next step says more

    def seconds(self) -> float | None:
        """Seconds of a call that is done; None where the device was lost."""
        if self._start is None or self._end is None:
            return self._seconds
        try:  # cuda-only
            return float(self._start.elapsed_time(self._end)) / 1000
        except RuntimeError:  # cuda-only
            return None


# calls that have ended on the host, each with what its seconds are wanted for
Timed = deque[tuple[Stopwatch, T]]


def known(timed: Timed[T], *, wait: bool = False) -> Iterator[tuple[T, float | None]]:
    """Takes out the calls whose seconds are known by now, in order; with `wait`, all of them."""
    while timed and timed[0][0].done(wait=wait):
        watch, payload = timed.popleft()
        yield payload, watch.seconds()


class Telemetry:
    """Emits a `CallDone` for each call of one runtime.

    A runtime has one only where something listens.
    """

    def __init__(self, log: EventLog) -> None:
        self._log = log
        self._timed: Timed[tuple[CallDone, float | torch.Tensor | None]] = deque()
        self._pid = os.getpid()

    def done(self, event: CallDone, watch: Stopwatch, result: StepResult | None) -> None:
        """A call has finished, with a `result` if it trained.

        Fills in times and losses, and emits what is known by now.
        """
        loss = None if result is None else _fetch(result, watch.device)
        watch = copy.copy(watch)
        watch.stop()  # again: its callbacks have run since, and the loss is being copied
        self._timed.append(
            (watch, (replace(event, seconds_lost=watch.lost, ended=monotonic()), loss))
        )
        self._emit(wait=False)

    def ended(self, event: CallFailed, watch: Stopwatch, error: BaseException) -> None:
        """A call has ended by `error`.

        A sink that fails now is noted on it: it must not take its place.
        """
        try:
            self._log.emit(replace(event, seconds=watch.elapsed(), seconds_lost=watch.lost))
        except Exception as problem:
            error.add_note(
                "elastic_mbs: a function in on_event failed at CallFailed: "
                f"{type(problem).__name__}: {problem}"
            )

    def rest(self) -> None:
        """Emits what is still open, waiting for the device: for the end of a runtime.

        Does nothing in a forked child, which has no device to ask.
        """
        if self._pid == os.getpid():
            self._emit(wait=True)

    def _emit(self, *, wait: bool) -> None:
        for (event, loss), seconds in known(self._timed, wait=wait):
            self._log.emit(
                replace(
                    event,
                    seconds=seconds,
                    loss=None if loss is None or seconds is None else float(loss),
                )
            )


def _stamp(device: torch.device) -> torch.cuda.Event | None:
    """A time stamp in the device's own queue of work; None where the device is lost."""
    try:  # cuda-only
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(device))
        return event
    except RuntimeError:  # cuda-only
        return None  # a lost device: the step itself says more


def _fetch(result: StepResult, device: torch.device | None) -> float | torch.Tensor | None:
    """The loss, where reading it at the end of the call on `device` waits for nothing; None where it cannot be had so."""
    try:
        if device is None or not (loss := result.loss).is_cuda:
            return loss_on_host(result)
        found = torch.empty_like(loss, device="cpu", pin_memory=True).copy_(
            loss, non_blocking=True
        )  # cuda-only
        if loss.device != device and (copied := _stamp(loss.device)) is not None:  # cuda-only
            torch.cuda.current_stream(device).wait_event(copied)
        return found  # cuda-only
    except (RuntimeError, MemoryError):  # there is no room for one number: it stays unknown
        return None


def memory_figures(meter: UsageMeter, monitor: Monitor) -> dict[str, Any]:
    """The fields of `CallDone` about memory: our own use by the meter, the rest by the monitor's latest reading. Asks the device nothing."""
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
