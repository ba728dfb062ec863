"""How long a call took on its device, read once it is known and never waited for."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

import torch

Payload = TypeVar("Payload")


class Stopwatch(Generic[Payload]):
    """Times calls: with the host's clock on a CPU, with device events where work is asynchronous.

    Args:
        device: where the work is done.
        clock: the host's clock, in seconds.
    """

    def __init__(self, device: torch.device, clock: Callable[[], float] = time.perf_counter) -> None:
        self._device = device
        self._events = device.type == "cuda"
        self._clock = clock
        self._began = 0.0
        self._start: torch.cuda.Event | None = None
        self._open: deque[tuple[Payload, torch.cuda.Event, torch.cuda.Event]] = deque()

    def start(self) -> None:
        """Starts timing a call."""
        if self._events:  # cuda-only
            self._start = torch.cuda.Event(enable_timing=True)
            self._start.record(torch.cuda.current_stream(self._device))  # the model need not be on the thread's current device
        self._began = self._clock()

    def seconds(self) -> float | None:
        """Since `start`; None where only the device knows, later."""
        return None if self._events else self._clock() - self._began

    def later(self, payload: Payload) -> None:
        """Ends a call whose `seconds` are not known yet; `payload` comes back from `finished` with them."""
        if self._start is not None:  # cuda-only
            end = torch.cuda.Event(enable_timing=True)
            end.record(torch.cuda.current_stream(self._device))
            self._open.append((payload, self._start, end))

    def finished(self) -> list[tuple[Payload, float]]:
        """The calls given to `later` whose time is known by now, in order, with their seconds; each is given once."""
        known: list[tuple[Payload, float]] = []
        while self._open and self._open[0][2].query():  # cuda-only
            payload, start, end = self._open.popleft()
            known.append((payload, start.elapsed_time(end) / 1000))
        return known
