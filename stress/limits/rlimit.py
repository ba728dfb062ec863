"""The process limit: beyond RLIMIT_DATA the kernel refuses memory to every allocator in here."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import sys
import weakref
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Self

import torch

from .limit import HostLimit, switch_onednn_off

try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]  # a module elsewhere, absent on Windows

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # mallopt's numbers for them
# bytes from which a block of the heap is a mapping of its own, so that mapped memory is memory in
# use
_MAPPED = 65536
_PARALLEL = 2**20  # elements, enough for all threads
# bytes to be mapped until the heap has no hole that fits such a block: a hole is used first, and
# other mappings are small
_FULL = 4 * 2**20


class ProcessLimit(HostLimit):
    """RLIMIT_DATA of this process, moved while it trains.

    It counts all private memory that was mapped since the block was entered. It needs a process of
    its own: the heap's settings cannot be undone, and a library that expects no refusal ends it, so
    `warm` runs each size first.
    """

    kind = "rlimit"

    def __init__(self) -> None:
        super().__init__()
        self.base = 0
        self._limit = resource.getrlimit(resource.RLIMIT_DATA)
        # opened while there is room
        self._statm, self._status = (
            os.open(f"/proc/self/{name}", os.O_RDONLY) for name in ("statm", "status")
        )
        for number in (self._statm, self._status):
            weakref.finalize(self, os.close, number)
        self._live_at_start = self._resident_at_start = 0

    def __enter__(self) -> Self:
        for number in (_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD):
            ctypes.CDLL(None).mallopt(number, _MAPPED)
        self._undo.callback(switch_onednn_off())
        # torch's thread pools end the process where they are refused memory, and the first backward
        # imports
        torch.zeros(_PARALLEL, dtype=torch.uint8).add_(1)
        torch.autograd.backward(torch.zeros((), requires_grad=True).clone(), torch.ones(()))
        self._fill_holes()
        self.base = self._mapped()
        self.begin_interval()
        return self

    def _fill_holes(self) -> None:
        """Take the heap's free memory, which is mapped already: no limit would count its use."""
        full, holes = self._mapped() + _FULL, []
        while self._mapped() < full:
            holes.append(torch.empty(_MAPPED, dtype=torch.uint8))
        self._undo.callback(holes.clear)

    def warm(self, run: Callable[[int], object], sizes: Iterable[int]) -> None:
        """Run each size once without a limit, the largest last: libraries fill their caches."""
        resource.setrlimit(resource.RLIMIT_DATA, self._limit)
        try:
            for size in sorted(set(sizes)):
                run(size)
        finally:
            self.apply()

    def live(self) -> int:
        return max(0, self._mapped() - self.base)

    def failures(self) -> None:
        return  # the kernel does not count its refusals

    def apply(self) -> None:
        soft, hard = self._limit
        if self.capacity is not None:
            soft = self.base + max(0, self.capacity - self._held)
            soft = soft if hard == resource.RLIM_INFINITY else min(soft, hard)
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))

    def peak_of_interval(self) -> int:
        """Return the bytes live at its start plus the rise of resident memory since.

        The kernel keeps no peak of the mapped bytes.
        """
        return max(
            self.live(), self._live_at_start + self._resident("VmHWM") - self._resident_at_start
        )

    def begin_interval(self) -> None:
        with contextlib.suppress(OSError):  # then it is the mark of the whole run
            Path("/proc/self/clear_refs").write_text("5")
        self._live_at_start, self._resident_at_start = self.live(), self._resident("VmRSS")

    def _mapped(self) -> int:
        return int(os.pread(self._statm, 256, 0).split()[5]) * mmap.PAGESIZE

    def _resident(self, which: str) -> int:
        lines = (line.split() for line in os.pread(self._status, 8192, 0).decode().splitlines())
        return next(
            (int(words[1]) * 1024 for words in lines if words and words[0] == f"{which}:"), 0
        )


def trouble() -> str | None:
    if resource is None or sys.platform != "linux":
        return (
            "the limit 'rlimit' needs Linux, which holds all private memory of a process to "
            f"RLIMIT_DATA, and this is {sys.platform}"
        )
    if not hasattr(ctypes.CDLL(None), "mallopt"):
        return "the limit 'rlimit' needs glibc, whose heap can map large blocks one by one"
    return None
