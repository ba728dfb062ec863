"""Memory of the machine and of this process, by psutil: what a CPU trains in.

A container's own limit (cgroups) is not looked at here; see `MemoryBudget` for a limit that raises.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import psutil

from elastic_mbs.memory.sensor import Headroom, Reading, Unavailable, Usage

try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]  # a module elsewhere, absent on Windows


class HostSensor:
    """Headroom of the machine: what the kernel says is available without swapping."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock

    def read(self) -> Reading:
        """Available memory, the machine's total, and what all others hold (the total without what is available and our resident set)."""
        at = self._clock()
        try:
            memory, ours = psutil.virtual_memory(), psutil.Process().memory_info().rss
        except (OSError, psutil.Error) as error:
            return Unavailable(f"host memory: {type(error).__name__}: {error}", at)
        return Headroom(memory.available, memory.total, max(0, memory.total - memory.available - ours), "host", at)


class HostMeter:
    """Resident memory of this process.

    The kernel keeps one high-water mark for the life of the process and nobody can reset it. It tells the peak of an interval only if it rose in that
    interval; where it did not, the peak lies somewhere below the mark and is not known, and `usage` says so with None instead of giving a bound that
    belongs to another call. What a CPU's meter teaches is therefore the sizes that set a new record, which are the ones that matter for growth.
    """

    def __init__(self) -> None:
        self.resets = 0
        self._mark = _high_water_mark()

    def usage(self) -> Usage | None:
        """Resident bytes and their peak since `reset_peak`; None while no new record has been set, or where the process cannot be read."""
        mark = _high_water_mark()
        if mark <= self._mark:
            return None
        try:
            resident = psutil.Process().memory_info().rss
        except (OSError, psutil.Error):
            return None
        # the kernel updates the two at different times; the peak is never below what is resident
        peak = max(mark, resident)
        return Usage(resident, resident, peak, peak, 0)

    def reset_peak(self) -> None:
        """Remembers the mark: only what rises above it belongs to the new interval."""
        self._mark = _high_water_mark()
        self.resets += 1


def _high_water_mark() -> int:
    """Most bytes that were ever resident at once in this process; 0 where the system does not tell."""
    if resource is None:
        return int(getattr(psutil.Process().memory_info(), "peak_wset", 0))
    mark = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return mark if sys.platform == "darwin" else mark * 1024
