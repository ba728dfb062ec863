"""Memory that a CPU trains in: the machine's, this process's cgroup's, and the process's own."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from elastic_mbs.memory.cgroup import cgroup_memory
from elastic_mbs.memory.sensor import Headroom, Reading, Unavailable, Usage

try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]  # a module elsewhere, absent on Windows


class HostSensor:
    """Headroom of the machine or of the cgroup (a container's limit), whichever leaves less.

    Args:
        clock: gives the time stamps of readings, in seconds.
        root: the folder taken for `/`.
    """

    def __init__(
        self, *, clock: Callable[[], float] = time.monotonic, root: Path = Path("/")
    ) -> None:
        self._clock = clock
        self._root = root

    def read(self) -> Reading:
        """Take one reading.

        Free is the memory available without swapping. All that is neither free nor our resident set
        counts as held by others.
        """
        at = self._clock()
        try:
            before, memory = psutil.Process().memory_info().rss, psutil.virtual_memory()
            # a backward can take memory meanwhile; no byte is counted twice
            ours = min(before, psutil.Process().memory_info().rss)
        except (OSError, psutil.Error) as error:
            return Unavailable(f"host memory: {type(error).__name__}: {error}", at)
        free, total, source = memory.available, memory.total, "host"
        group = cgroup_memory(self._root)
        if group is not None:
            total = min(total, group.limit)
            if group.available < free:
                free, source = group.available, "cgroup"
        return Headroom(min(free, total), total, max(0, total - free - ours), source, at)


class HostMeter:
    """Resident memory of this process.

    The kernel's high-water mark cannot be reset, so it is the peak of an interval only if it rose
    in it; else the peak is not known, and `usage` is None. So peaks are known for sizes that set a
    new record, which are those that matter for growth.
    """

    def __init__(self) -> None:
        self.resets = 0
        self._mark = _high_water_mark()

    def usage(self) -> Usage | None:
        """Return the resident bytes and their peak since `reset_peak`.

        None while there is no new record, and where the process cannot be read.
        """
        mark = _high_water_mark()
        if mark <= self._mark:
            return None
        try:
            resident = psutil.Process().memory_info().rss
        except (OSError, psutil.Error):
            return None
        # the kernel updates the two at different times; the peak is never below the resident bytes
        peak = max(mark, resident)
        return Usage(resident, resident, peak, peak, 0)

    def reset_peak(self) -> None:
        """Remember the mark: only a rise above it belongs to the new interval."""
        self._mark = _high_water_mark()
        self.resets += 1


def _high_water_mark() -> int:
    """Return the most bytes ever resident at once in this process; 0 where it is not known."""
    if resource is None:
        return int(getattr(psutil.Process().memory_info(), "peak_wset", 0))
    mark = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return mark if sys.platform == "darwin" else mark * 1024
