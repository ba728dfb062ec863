"""What a call was like, told once it is known, and never waited for.

A runtime has a `Telemetry` only where somebody listens. Times of failed attempts are the host's: an allocator refuses on the host, at the moment of
the request, but work that was queued on the device before may still have been running.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol, TypedDict

import torch

from elastic_mbs.engine.result import StepResult
from elastic_mbs.events import CallDone, CallFailed, EventLog
from elastic_mbs.memory import Headroom, Monitor, UsageMeter


class Telemetry:
    """Watches the calls of one runtime and emits a `CallDone` for each.

    Args:
        log: where events go.
        clock: the host's clock, in seconds.
    """

    def __init__(self, log: EventLog, clock: Callable[[], float] = time.monotonic) -> None:
        self._log = log
        self._clock = clock
        self._open: deque[tuple[CallDone, Figures]] = deque()
        self._start: torch.cuda.Event | None = None
        self._began = self._attempted = self._lost = 0.0
        self._pid = os.getpid()

    def begin(self, device: torch.device) -> None:
        """A call begins, with its model on `device`."""
        self._log.begin()
        self._start = _stamp(device)
        self._began = self._attempted = self._clock()
        self._lost = 0.0

    def attempt(self) -> None:
        """An attempt at a piece begins."""
        self._attempted = self._clock()

    def failed(self, mode: str) -> float:
        """An attempt has failed and is undone; with `mode` "step" everything since the call began is.

        Returns:
            Seconds that this failure has cost.
        """
        now = self._clock()
        seconds = now - self._began - self._lost if mode == "step" else now - self._attempted
        self._attempted = now
        self._lost += seconds
        return seconds

    def done(self, event: CallDone, result: StepResult | None) -> None:
        """A call has finished. Emits what is known by now, of this one and of those before it.

        Args:
            event: of the call; its times, and its figures of memory, are filled in here.
            result: of a call that trained, for the loss.
        """
        ended = self._clock()
        event = replace(event, seconds_lost=self._lost, ended=ended)
        self._open.append((event, self._figures(result, ended - self._began)))
        while self._open and self._open[0][1].ready():
            self._emit()

    def ended(self, event: CallFailed, error: BaseException) -> None:
        """A call has ended by `error`. A sink that fails now is noted on it: it must not take its place."""
        try:
            self._log.emit(replace(event, seconds=self._clock() - self._began, seconds_lost=self._lost))
        except Exception as problem:
            error.add_note(f"elastic_mbs: a function in on_event failed at CallFailed: {type(problem).__name__}: {problem}")

    def rest(self) -> None:
        """Emits what is still open, waiting for the device: for the end of a runtime. Does nothing in a forked child, which has no device to ask."""
        while self._open and self._pid == os.getpid():
            self._open[0][1].wait()
            self._emit()

    def _emit(self) -> None:
        event, figures = self._open.popleft()
        seconds, loss = figures.read()
        self._log.emit(replace(event, seconds=seconds, loss=loss))

    def _figures(self, result: StepResult | None, seconds: float) -> Figures:
        if self._start is not None:  # cuda-only
            return _OnDevice(self._start, result)
        return _Known(seconds, None if result is None else _loss_on_host(result))


class Figures(Protocol):
    """Seconds and loss of a call, which a device may still be working on."""

    def ready(self) -> bool:
        """Whether they are known. Does not wait."""

    def wait(self) -> None:
        """Returns when they are."""

    def read(self) -> tuple[float | None, float | None]:
        """Seconds and loss; None for what cannot be known any more. Only after they are ready."""


@dataclass(frozen=True)
class _Known:
    """The figures of a call that the host has run by itself."""

    seconds: float
    loss: float | None

    def ready(self) -> bool:
        return True

    def wait(self) -> None:
        return

    def read(self) -> tuple[float | None, float | None]:
        return self.seconds, self.loss


class _OnDevice:  # cuda-only
    """The figures of a call whose work is queued on a CUDA device.

    The loss goes to pinned memory in its stream's order, and an event behind the copy tells when it has arrived. A device that is lost meanwhile
    makes figures unknown and raises nothing: the next step says more.
    """

    def __init__(self, start: torch.cuda.Event, result: StepResult | None) -> None:
        self._start = start
        self._loss: torch.Tensor | None = None
        self._ends: list[torch.cuda.Event] = []
        try:
            if result is not None:
                self._fetch(result.loss)
        except RuntimeError:  # there is no room for one number: it stays unknown
            self._loss = None
        try:
            self._ends.append(_record(start.device))
        except RuntimeError:
            self._ends.clear()

    def _fetch(self, loss: torch.Tensor) -> None:
        if not loss.is_cuda:
            self._loss = loss
            return
        self._loss = torch.empty_like(loss, device="cpu", pin_memory=True).copy_(loss, non_blocking=True)
        self._ends.append(_record(loss.device))

    def ready(self) -> bool:
        try:
            return all(end.query() for end in self._ends)
        except RuntimeError:
            self._ends.clear()
            return True

    def wait(self) -> None:
        try:
            for end in self._ends:
                end.synchronize()
        except RuntimeError:
            self._ends.clear()

    def read(self) -> tuple[float | None, float | None]:
        try:
            seconds = self._start.elapsed_time(self._ends[-1]) / 1000
            return seconds, None if self._loss is None else float(self._loss)
        except (RuntimeError, IndexError):
            return None, None


def _stamp(device: torch.device) -> torch.cuda.Event | None:
    """A time stamp in the device's own stream of work, where it has one that can be asked later."""
    if device.type != "cuda":
        return None
    try:  # cuda-only
        return _record(device)
    except RuntimeError:  # cuda-only
        return None  # a lost device: the step itself says more


def _record(device: torch.device | None) -> torch.cuda.Event:  # cuda-only
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event


def _loss_on_host(result: StepResult) -> float | None:
    """The loss where reading it waits for nothing. Summed here, because a sum of tensors would allocate, at a moment when memory may be short."""
    losses = result._losses
    if any(loss.device.type != "cpu" for loss in losses):
        return None
    try:
        return sum(float(loss) for loss in losses)
    except (RuntimeError, MemoryError):
        return None


class MemoryFigures(TypedDict):
    """The fields of `CallDone` that tell of memory."""

    allocated: int | None
    reserved: int | None
    peak_allocated: int | None
    peak_reserved: int | None
    free: int | None
    held_by_others: int | None
    total: int | None


def memory_figures(meter: UsageMeter, monitor: Monitor) -> MemoryFigures:
    """What is known of memory now, without asking the device.

    Args:
        meter: asked for our own use.
        monitor: its latest reading tells of the others.
    """
    usage, reading = meter.usage(), monitor.last()
    seen = reading if isinstance(reading, Headroom) else None
    reserved = usage.reserved if usage is not None else None if seen is None else seen.capacity - seen.free
    return MemoryFigures(
        allocated=None if usage is None else usage.allocated,
        reserved=reserved,
        peak_allocated=None if usage is None else usage.peak_allocated,
        peak_reserved=None if usage is None else usage.peak_reserved,
        free=None if seen is None else seen.free,
        held_by_others=None if seen is None else seen.held_by_others,
        total=None if seen is None else seen.total,
    )
