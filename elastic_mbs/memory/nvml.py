"""Free memory of one GPU by NVML, found by its UUID. The only user of pynvml.

NVML sees the whole device, co-tenants included, without a CUDA context. Devices are found by UUID because CUDA and NVML number them differently
(CUDA orders by speed, and CUDA_VISIBLE_DEVICES hides and reorders). Errors are told apart by class alone: instances of NVMLError cannot be
compared or hashed.
"""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class DeviceMemory:
    """What NVML says of a device, in bytes."""

    free: int
    total: int


class NvmlDevice:
    """One device, opened at the first reading and again after a failure.

    Args:
        uuid: the full UUID as torch gives it in `get_device_properties(device).uuid`, without prefix; of a GPU or of a MIG instance.
    """

    def __init__(self, uuid: str) -> None:
        self._uuid = uuid
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self._handle: Any = None
        self._versioned = True
        self._never: str | None = None

    def memory(self) -> DeviceMemory | str:
        """Free and total bytes, or in words why there are none. Does not raise."""
        if self._pid != os.getpid():
            # after a fork the handle is not good any more, and a thread that is gone may have held the lock
            self._pid, self._lock, self._handle = os.getpid(), threading.Lock(), None
        with self._lock:
            return self._read() if self._never is None else self._never

    def _read(self) -> DeviceMemory | str:
        try:
            import pynvml
        except ImportError as error:
            self._never = f"NVML: {error}"
            return self._never
        try:
            if self._handle is None:
                pynvml.nvmlInit()
                self._handle = self._open(pynvml)
            info = self._info(pynvml)
        except (pynvml.NVMLError_LibraryNotFound, pynvml.NVMLError_DriverNotLoaded) as error:
            self._never = _words(error)
            return self._never
        except pynvml.NVMLError as error:
            self._handle = None
            return _words(error)
        if not info.total:
            return "NVML gives no memory figures for this device (it shares the host's memory)"
        return DeviceMemory(int(info.free), int(info.total))

    def _open(self, pynvml: Any) -> Any:
        try:
            return pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{self._uuid}")
        except (pynvml.NVMLError_NotFound, pynvml.NVMLError_InvalidArgument):
            return pynvml.nvmlDeviceGetHandleByUUID(f"MIG-{self._uuid}")

    def _info(self, pynvml: Any) -> Any:
        version = getattr(pynvml, "nvmlMemory_v2", None)
        if self._versioned and version is not None:
            try:
                return pynvml.nvmlDeviceGetMemoryInfo(self._handle, version=version)
            except pynvml.NVMLError_FunctionNotFound:
                self._versioned = False
        return pynvml.nvmlDeviceGetMemoryInfo(self._handle)


def _words(error: Exception) -> str:
    return f"NVML: {type(error).__name__}: {error}"
