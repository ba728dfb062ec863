"""Memory: readings of free and used bytes, and a virtual device for tests."""

from elastic_mbs.memory.accelerator import CudaSensor, DeviceMeter, DeviceSensor
from elastic_mbs.memory.budget import MemoryBudget
from elastic_mbs.memory.cgroup import CgroupMemory, cgroup_memory
from elastic_mbs.memory.devices import NoMeter, NoSensor, sensor_for
from elastic_mbs.memory.host import HostMeter, HostSensor
from elastic_mbs.memory.host_guard import HostGuard
from elastic_mbs.memory.monitor import Monitor
from elastic_mbs.memory.processes import Holder
from elastic_mbs.memory.sensor import (
    Headroom,
    MemorySensor,
    Reading,
    Unavailable,
    Usage,
    UsageMeter,
    parse_bytes,
)

__all__ = [
    "CgroupMemory",
    "CudaSensor",
    "DeviceMeter",
    "DeviceSensor",
    "Headroom",
    "Holder",
    "HostGuard",
    "HostMeter",
    "HostSensor",
    "MemoryBudget",
]
__all__ += [
    "MemorySensor",
    "Monitor",
    "NoMeter",
    "NoSensor",
    "Reading",
    "Unavailable",
    "Usage",
    "UsageMeter",
]
__all__ += [
    "cgroup_memory",
    "parse_bytes",
    "sensor_for",
]
