"""Memory of a CUDA device: headroom from NVML or the runtime, use from torch's caching allocator.

Nothing here synchronises the device.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import psutil
import torch

from elastic_mbs.memory.nvml import NoAnswer, NvmlDevice
from elastic_mbs.memory.sensor import Headroom, Reading, Unavailable, Usage


class CudaSensor:
    """Headroom of one CUDA device.

    capacity = min(free + reserved, fraction · total): what the device still has and what our
    allocator took already, below the cap of `torch.cuda.set_per_process_memory_fraction`. `free`
    comes from NVML (by UUID), from `cudaMemGetInfo` where NVML does not answer (in doubt where it
    did before), and on a GPU that shares the host's memory from what the machine has available. On
    Windows (WDDM) and WSL a request for more than is free can spill into the host's memory: there
    the capacity is where spilling begins.

    Args:
        device: the device; without an index, the one that is current now in this thread.
        clock: gives the time stamps of readings, in seconds.
    """

    def __init__(
        self, device: torch.device | str, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._device = _with_index(torch.device(device))
        self._clock = clock
        self._nvml: NvmlDevice | None = None

    def read(self) -> Reading:
        """One reading, now; `Unavailable` where neither NVML nor CUDA answers."""
        at = self._clock()
        try:
            return self._headroom(at)
        except (RuntimeError, AssertionError, OSError, psutil.Error) as error:
            # torch asserts that there is a driver, and raises for a lost device
            return Unavailable(f"{self._device}: {type(error).__name__}: {error}", at)

    def _headroom(self, at: float) -> Headroom:
        device = self._device
        properties = torch.cuda.get_device_properties(device)
        before = torch.cuda.memory_reserved(device)
        if getattr(properties, "is_integrated", False):
            memory = psutil.virtual_memory()
            free, total, source, doubt = memory.available, memory.total, "host", None
        else:
            free, total, source, doubt = self._free(
                getattr(properties, "uuid", None), properties.total_memory
            )
        # the allocator of another thread may take or return memory between the readings; the
        # smaller figure never counts a byte twice
        reserved = min(before, torch.cuda.memory_reserved(device))
        capacity = min(free + reserved, int(_fraction(device) * total), total)
        holders = self._nvml.holders() if self._nvml is not None else ()
        return Headroom(
            max(0, capacity - reserved), total, total - capacity, source, at, doubt, holders
        )

    def _free(self, uuid: object, total: int) -> tuple[int, int, str, str | None]:
        """Free and total bytes, their source, and what is doubtful about them."""
        if self._nvml is None and uuid is not None:
            self._nvml = NvmlDevice(str(uuid), clock=self._clock)
        free = NoAnswer("torch knows no UUID") if self._nvml is None else self._nvml.memory()
        if isinstance(free, NoAnswer):
            return (
                *torch.cuda.mem_get_info(self._device),
                "cuda",
                free.reason if free.lost else None,
            )
        # NVML's total has the driver's share in it, of which a process gets nothing and a fraction
        # counts nothing: torch's is the one to use
        return free, total, "nvml", None


class CudaMeter:
    """What torch's caching allocator holds on one device, named as for `CudaSensor`, by its own statistics; `allocated` is its *active* bytes."""

    def __init__(self, device: torch.device | str) -> None:
        self._device = _with_index(torch.device(device))
        self._idle = 0
        self.resets = 0

    def usage(self) -> Usage | None:
        """The figures now; None before CUDA is initialised, where the allocator keeps no statistics, or where the device is lost."""
        try:
            stats = torch.cuda.memory_stats(self._device)
        except (RuntimeError, AssertionError):
            return None
        allocated, reserved = (
            stats.get("active_bytes.all.current", 0),
            stats.get("reserved_bytes.all.current", 0),
        )
        peaks = stats.get("active_bytes.all.peak", 0), stats.get("reserved_bytes.all.peak", 0)
        if not reserved or peaks[0] < allocated or peaks[1] < reserved:
            return None  # cudaMallocAsync reports zero for some of these
        return Usage(allocated, reserved, *peaks, stats.get("num_alloc_retries", 0), self._idle)

    def reset_peak(self) -> None:
        """Starts a new interval for the peaks.

        They belong to the process: others who read them see the reset too.
        """
        self.resets += 1
        try:
            torch.cuda.reset_peak_memory_stats(self._device)
        except (RuntimeError, AssertionError):
            return  # without a device there is no peak either, and `usage` says so
        now = self.usage()
        self._idle = now.reserved - now.allocated if now is not None else 0


def _with_index(device: torch.device) -> torch.device:
    """The device with its index: the current device is a matter of the thread, and the monitor has its own."""
    try:
        return (
            device
            if device.index is not None
            else torch.device(device.type, torch.cuda.current_device())
        )
    except (RuntimeError, AssertionError):
        return device


def _fraction(device: torch.device) -> float:
    """The share of the device that this process may use; 1 where torch cannot tell (before 2.9 it has no getter)."""
    getter = getattr(torch.cuda, "get_per_process_memory_fraction", None)
    return float(getter(device)) if getter is not None else 1.0
