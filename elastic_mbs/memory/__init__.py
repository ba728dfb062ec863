"""How much memory there is, how much of it we use, and a virtual device for tests."""

from __future__ import annotations

import torch

from elastic_mbs.memory.budget import MemoryBudget
from elastic_mbs.memory.cgroup import CgroupMemory, cgroup_memory
from elastic_mbs.memory.cuda import CudaMeter, CudaSensor
from elastic_mbs.memory.host import HostMeter, HostSensor
from elastic_mbs.memory.host_guard import HostGuard, margin_of, refuse_devices
from elastic_mbs.memory.monitor import Monitor
from elastic_mbs.memory.processes import Holder
from elastic_mbs.memory.sensor import Headroom, MemorySensor, NoMeter, NoSensor, Reading, Unavailable, Usage, UsageMeter, trouble_with
from elastic_mbs.memory.size import parse_bytes

__all__ = [
    "CgroupMemory",
    "CudaMeter",
    "CudaSensor",
    "Headroom",
    "Holder",
    "HostGuard",
    "HostMeter",
    "HostSensor",
    "MemoryBudget",
    "MemorySensor",
    "Monitor",
    "NoMeter",
    "NoSensor",
    "Reading",
    "Unavailable",
    "Usage",
    "UsageMeter",
    "cgroup_memory",
    "margin_of",
    "parse_bytes",
    "refuse_devices",
    "sensor_for",
    "trouble_with",
]


def sensor_for(device: torch.device | str) -> tuple[MemorySensor, UsageMeter]:
    """The sensor and the meter of a device: the active `MemoryBudget` if it counts that device, else the device's own.

    On any device but CUDA and the CPU a sensor that always answers `Unavailable`, with which training goes on but never grows.
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
