"""Which sensor and which meter a device has."""

from __future__ import annotations

import torch

from elastic_mbs.memory.budget import MemoryBudget
from elastic_mbs.memory.cuda import CudaMeter, CudaSensor
from elastic_mbs.memory.host import HostMeter, HostSensor
from elastic_mbs.memory.sensor import MemorySensor, Reading, Unavailable, Usage, UsageMeter


def sensor_for(device: torch.device | str) -> tuple[MemorySensor, UsageMeter]:
    """The sensor and the meter of a device: the active `MemoryBudget` if it counts that device, else the device's own.

    On any device but CUDA and the CPU a sensor that always answers `Unavailable`, with which
    training goes on but never grows.
    """
    device = torch.device(device)
    budget = MemoryBudget.current()
    if budget is not None and budget.covers(device):
        return budget, budget
    if device.type == "cuda":
        return CudaSensor(device), CudaMeter(device)
    if device.type == "cpu":
        return HostSensor(), HostMeter()
    return NoSensor(f"no memory sensor for device {str(device)!r}: pass sensor=..."), NoMeter()


class NoSensor:
    """The sensor of a device that has none: always `Unavailable`, with the reason given."""

    def __init__(self, reason: str) -> None:
        self._reason = reason

    def read(self) -> Reading:
        """No reading."""
        return Unavailable(self._reason)


class NoMeter:
    """The meter of a device whose allocator cannot be read."""

    resets = 0

    def usage(self) -> Usage | None:
        """Always None."""
        return None

    def reset_peak(self) -> None:
        """Counts the call; there is nothing to reset."""
        self.resets += 1
