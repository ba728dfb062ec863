"""The sensor and the meter of each device."""

from __future__ import annotations

import torch

from elastic_mbs.device import accelerator_of
from elastic_mbs.memory.accelerator import CudaSensor, DeviceMeter, DeviceSensor
from elastic_mbs.memory.budget import MemoryBudget
from elastic_mbs.memory.host import HostMeter, HostSensor
from elastic_mbs.memory.sensor import MemorySensor, Reading, Unavailable, Usage, UsageMeter


def sensor_for(device: torch.device | str) -> tuple[MemorySensor, UsageMeter]:
    """Return the sensor and the meter of a device.

    They are the active `MemoryBudget` if it counts that device, else the device's own. A device
    without figures answers `Unavailable`: training goes on, and no size grows.
    """
    device = torch.device(device)
    budget = MemoryBudget.current()
    if budget is not None and budget.covers(device):
        return budget, budget
    if device.type == "cpu":
        return HostSensor(), HostMeter()
    if device.type == "cuda":
        return CudaSensor(device), DeviceMeter(device)
    if accelerator_of(device) is not None:
        return DeviceSensor(device), DeviceMeter(device)
    return NoSensor(f"no memory sensor for device {str(device)!r}: pass sensor=..."), NoMeter()


class NoSensor:
    """The sensor of a device that has none: always `Unavailable`, with the reason given."""

    def __init__(self, reason: str) -> None:
        self._reason = reason

    def read(self) -> Reading:
        """Return no reading."""
        return Unavailable(self._reason)


class NoMeter:
    """The meter of a device whose allocator cannot be read."""

    resets = 0

    def usage(self) -> Usage | None:
        """Return None, always."""
        return None

    def reset_peak(self) -> None:
        """Count the call; there is nothing to reset."""
        self.resets += 1
