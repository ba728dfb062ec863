"""Memory of an accelerator: headroom from its runtime, use from torch's caching allocator.

Nothing here synchronises the device.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import psutil
import torch

from elastic_mbs.device import Accelerator, with_index
from elastic_mbs.memory.nvml import NoAnswer, NvmlDevice
from elastic_mbs.memory.processes import Holder
from elastic_mbs.memory.sensor import Headroom, Reading, Unavailable, Usage

# torch asserts that there is a driver, raises ValueError for a device of another accelerator, and
# RuntimeError for a lost device and for a function that the device's module lacks
_NO_FIGURES = (RuntimeError, AssertionError, ValueError)


class DeviceSensor:
    """Headroom of one accelerator, from its own module.

    capacity = min(free + reserved, fraction · total): bytes that the device still has and bytes
    that our allocator took already, below the cap of `set_per_process_memory_fraction`.

    Args:
        device: the device; without an index, the one that is current now in this thread.
        clock: gives the time stamps of readings, in seconds.
    """

    def __init__(
        self, device: torch.device | str, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._accelerator = _accelerator(device)
        self._clock = clock

    def read(self) -> Reading:
        """Take one reading, now; `Unavailable` where nothing answers."""
        at = self._clock()
        try:
            return self._headroom(at)
        except (*_NO_FIGURES, OSError, psutil.Error) as error:
            where = self._accelerator.device
            return Unavailable(f"{where}: {type(error).__name__}: {error}", at)

    def _headroom(self, at: float) -> Headroom:
        accelerator = self._accelerator
        before = accelerator.memory_reserved()
        free, total, source, doubt = self._free()
        # the allocator of another thread may take or return memory between the readings; the
        # smaller figure never counts a byte twice
        reserved = min(before, accelerator.memory_reserved())
        capacity = min(free + reserved, int(accelerator.memory_fraction() * total), total)
        return Headroom(
            max(0, capacity - reserved),
            total,
            total - capacity,
            source,
            at,
            doubt,
            self._holders(),
        )

    def _free(self) -> tuple[int, int, str, str | None]:
        """Return free and total bytes, their source, and the doubt about them."""
        return *self._accelerator.memory_info(), self._accelerator.device.type, None

    def _holders(self) -> tuple[Holder, ...]:
        return ()


class CudaSensor(DeviceSensor):
    """Headroom of one CUDA device.

    Free bytes come from NVML (by UUID), from `cudaMemGetInfo` where NVML does not answer (in doubt
    where it did before), and on a GPU that shares the host's memory from the machine's available
    memory. On Windows (WDDM) and WSL a request for more than is free can spill into the host's
    memory: there the capacity is where spilling begins.
    """

    def __init__(
        self, device: torch.device | str, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__(device, clock=clock)
        self._nvml: NvmlDevice | None = None

    def _free(self) -> tuple[int, int, str, str | None]:
        properties = self._accelerator.properties()
        if getattr(properties, "is_integrated", False):
            memory = psutil.virtual_memory()
            return memory.available, memory.total, "host", None
        uuid = getattr(properties, "uuid", None)
        if self._nvml is None and uuid is not None:
            self._nvml = NvmlDevice(str(uuid), clock=self._clock)
        free = NoAnswer("torch knows no UUID") if self._nvml is None else self._nvml.memory()
        if isinstance(free, NoAnswer):
            return *self._accelerator.memory_info(), "cuda", free.reason if free.lost else None
        # NVML's total has the driver's share in it, of which a process gets nothing and a fraction
        # counts nothing: torch's is the one to use
        return free, properties.total_memory, "nvml", None

    def _holders(self) -> tuple[Holder, ...]:
        return () if self._nvml is None else self._nvml.holders()


class DeviceMeter:
    """Use of one accelerator, named as for `DeviceSensor`, by the statistics of torch's allocator.

    `allocated` is its *active* bytes.
    """

    def __init__(self, device: torch.device | str) -> None:
        self._accelerator = _accelerator(device)
        self._idle = 0
        self.resets = 0

    def usage(self) -> Usage | None:
        """Return the figures now.

        None before the device is initialised, where its allocator keeps no statistics, and where
        the device is lost.
        """
        try:
            stats = self._accelerator.memory_stats()
        except _NO_FIGURES:
            return None
        allocated, peak_allocated = _now_and_peak(stats, "active_bytes")
        reserved, peak_reserved = _now_and_peak(stats, "reserved_bytes")
        if not reserved or peak_allocated < allocated or peak_reserved < reserved:
            return None  # cudaMallocAsync reports zero for some of these
        retries = stats.get("num_alloc_retries", 0)
        return Usage(allocated, reserved, peak_allocated, peak_reserved, retries, self._idle)

    def reset_peak(self) -> None:
        """Start a new interval for the peaks.

        They belong to the process: others who read them see the reset too.
        """
        self.resets += 1
        try:
            self._accelerator.reset_peaks()
        except _NO_FIGURES:
            return  # without a device there is no peak either, and `usage` says so
        now = self.usage()
        self._idle = now.reserved - now.allocated if now is not None else 0


def _now_and_peak(stats: Mapping[str, Any], name: str) -> tuple[int, int]:
    """Return the present and the largest value of a statistic, 0 where there is none."""
    both = stats.get(name, {}).get("all", {})
    return both.get("current", 0), both.get("peak", 0)


def _accelerator(device: torch.device | str) -> Accelerator:
    """Return the accelerator with the index that is current now.

    The monitor reads in a thread of its own, where another index may be current.
    """
    device = torch.device(device)
    with suppress(*_NO_FIGURES):  # no driver: each reading says so
        device = with_index(device)
    return Accelerator(device)
