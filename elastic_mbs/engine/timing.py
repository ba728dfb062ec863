"""How long a call took, known once its device is done and never waited for; and the events that report it."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, Generic, NamedTuple, TypeVar

import torch

from elastic_mbs.engine.result import StepResult
from elastic_mbs.events import CallDone, CallFailed, EventLog
from elastic_mbs.memory import Headroom, Monitor, UsageMeter

Payload = TypeVar("Payload")


class _Span(NamedTuple):
    """A call that has ended on the host."""

    payload: Any
    start: torch.cuda.Event | None
    end: torch.cuda.Event | None
    seconds: float | None  # where the host knows them

    def ended(self, *, wait: bool) -> bool:
        if self.end is None:
            return True
        try:  # cuda-only
            if wait:
                self.end.synchronize()
            return bool(self.end.query())
        except RuntimeError:  # cuda-only
            return True  # a lost device: the next step says more

    def read(self) -> float | None:
        if self.start is None or self.end is None:
            return self.seconds
        try:  # cuda-only
            return float(self.start.elapsed_time(self.end)) / 1000
        except RuntimeError:  # cuda-only
            return None


class CallClock(Generic[Payload]):
    """Times calls: with the host's clock, or with events in the device's own queue of work where that is asynchronous.

    Args:
        host: the host's clock, in seconds.
    """

    def __init__(self, host: Callable[[], float] = time.monotonic) -> None:
        self.host = host
        self.began = 0.0  # when the call began, by the host's clock
        self.device = torch.device("cpu")  # where its work is done
        self._start: torch.cuda.Event | None = None
        self._open: deque[_Span] = deque()

    def start(self, device: torch.device) -> None:
        """A call begins, with its model on `device`, which need not be the thread's current one."""
        self.device, self._start, self.began = device, _stamp(device), self.host()

    def stop(self, payload: Payload) -> None:
        """The call has ended; `payload` comes back from `done` with its seconds."""
        seconds = None if self.device.type == "cuda" else self.host() - self.began
        self._open.append(_Span(payload, self._start, None if self._start is None else _stamp(self.device), seconds))

    def done(self, *, wait: bool = False) -> Iterator[tuple[Payload, float | None]]:
        """The calls whose seconds are known by now, in order, each once; None where the device was lost. With `wait`, all of them."""
        while self._open and self._open[0].ended(wait=wait):
            span = self._open.popleft()
            yield span.payload, span.read()


class Telemetry:
    """Times the calls of one runtime and emits a `CallDone` for each. A runtime has one only where something listens.

    Times of failed attempts are the host's: an allocator refuses on the host, but work that was queued on the device before can still be running.
    """

    def __init__(self, log: EventLog, clock: CallClock[tuple[CallDone, float | torch.Tensor | None]] | None = None) -> None:
        self._log = log
        self._clock: CallClock[tuple[CallDone, float | torch.Tensor | None]] = clock or CallClock()
        self._attempted = self._lost = 0.0
        self._pid = os.getpid()

    def begin(self, device: torch.device) -> None:
        """A call begins, with its model on `device`."""
        self._log.begin()
        self._clock.start(device)
        self._attempted, self._lost = self._clock.began, 0.0

    def attempt(self) -> None:
        """An attempt at a piece begins."""
        self._attempted = self._clock.host()

    def failed(self, mode: str) -> float:
        """An attempt has failed and is undone; with `mode` "step" everything since the call began is.

        Returns:
            Seconds that this failure has cost.
        """
        now = self._clock.host()
        seconds = now - self._clock.began - self._lost if mode == "step" else now - self._attempted
        self._attempted = now
        self._lost += seconds
        return seconds

    def done(self, event: CallDone, result: StepResult | None) -> None:
        """A call has finished. Emits what is known by now, of this one and of those before it.

        Args:
            event: of the call; its times and its loss are filled in here.
            result: of a call that trained, for the loss.
        """
        loss = None if result is None else _fetch(result, self._clock.device)
        self._clock.stop((replace(event, seconds_lost=self._lost, ended=self._clock.host()), loss))
        self._emit(wait=False)

    def ended(self, event: CallFailed, error: BaseException) -> None:
        """A call has ended by `error`. A sink that fails now is noted on it: it must not take its place."""
        try:
            self._log.emit(replace(event, seconds=self._clock.host() - self._clock.began, seconds_lost=self._lost))
        except Exception as problem:
            error.add_note(f"elastic_mbs: a function in on_event failed at CallFailed: {type(problem).__name__}: {problem}")

    def rest(self) -> None:
        """Emits what is still open, waiting for the device: for the end of a runtime. Does nothing in a forked child, which has no device to ask."""
        if self._pid == os.getpid():
            self._emit(wait=True)

    def _emit(self, *, wait: bool) -> None:
        for (event, loss), seconds in self._clock.done(wait=wait):
            self._log.emit(replace(event, seconds=seconds, loss=None if loss is None or seconds is None else float(loss)))


def _stamp(device: torch.device) -> torch.cuda.Event | None:
    """A time stamp in the device's own queue of work; None where it has none that can be read later."""
    if device.type != "cuda":
        return None
    try:  # cuda-only
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(device))
        return event
    except RuntimeError:  # cuda-only
        return None  # a lost device: the step itself says more


def _fetch(result: StepResult, device: torch.device) -> float | torch.Tensor | None:
    """The loss, where reading it at the end of the call on `device` waits for nothing; None where it cannot be had so."""
    try:
        if device.type != "cuda" or not (loss := result.loss).is_cuda:
            return result.loss_on_host()
        found = torch.empty_like(loss, device="cpu", pin_memory=True).copy_(loss, non_blocking=True)  # cuda-only
        if loss.device != device and (copied := _stamp(loss.device)) is not None:  # cuda-only
            torch.cuda.current_stream(device).wait_event(copied)
        return found  # cuda-only
    except (RuntimeError, MemoryError):  # there is no room for one number: it stays unknown
        return None


def memory_figures(meter: UsageMeter, monitor: Monitor) -> dict[str, Any]:
    """The fields of `CallDone` about memory: our own use by the meter, the rest by the monitor's latest reading. Asks the device nothing."""
    usage, reading = meter.usage(), monitor.cached()
    seen = reading if isinstance(reading, Headroom) else None
    figures = {name: getattr(usage, name, None) for name in ("allocated", "reserved", "peak_allocated", "peak_reserved")}
    figures |= {name: getattr(seen, name, None) for name in ("free", "held_by_others", "total")}
    if usage is None and seen is not None:
        figures["reserved"] = seen.capacity - seen.free
    return figures
