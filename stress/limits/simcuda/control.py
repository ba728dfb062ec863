"""Faults on the simulated devices, and counts of the calls that the runtime received.

Works in a process under the simulation only.
"""

from __future__ import annotations

import ctypes
from typing import Literal

from elastic_mbs.errors import UsageError

from .build import inside

Fact = Literal["total", "nvml_error", "nvml_hides", "mig", "unified", "lost"]
# errors of CUDA; the last three ruin the process's context
OUT_OF_MEMORY, ECC, ILLEGAL_ADDRESS, ASSERT, LAUNCH_FAILURE = 2, 214, 700, 710, 719
# raised by the operations that these libraries would carry out
CUBLAS_ALLOC_FAILED, CUDNN_ALLOC_FAILED = 1001, 1002
NVML_GPU_IS_LOST, NVML_UNKNOWN = 15, 999


class Simulation:
    """The simulated devices, as seen from this process.

    A context manager: every setting is taken back at its end.
    """

    def __init__(self) -> None:
        if not inside():
            raise UsageError(
                "this process does not run under the simulated CUDA: start it with the variables "
                "of `simcuda.environment()`"
            )
        self._library = ctypes.CDLL(None)
        self._library.simcuda_free.restype = self._library.simcuda_get.restype = ctypes.c_size_t
        self._library.simcuda_waits.restype = self._library.simcuda_calls.restype = ctypes.c_long
        self._changed: dict[Fact, int] = {}

    def __enter__(self) -> Simulation:
        return self

    def __exit__(self, *error: object) -> None:
        for fact, before in self._changed.items():
            self._set(fact, before)
        self.foreign(0)
        self.refuse_memory(0)
        self.fail_operation(0)

    def set(self, fact: Fact, value: int) -> None:
        """Set a fact of all devices, for all processes: runtime/simcuda.h explains each."""
        self._changed.setdefault(fact, self._library.simcuda_get(fact.encode()))
        self._set(fact, value)

    def _set(self, fact: Fact, value: int) -> None:
        if self._library.simcuda_set(fact.encode(), ctypes.c_size_t(value)):
            raise ValueError(f"the simulated devices know nothing of {fact!r}")

    def foreign(self, size: int, device: int = 0) -> None:
        """Let another user's process, which NVML does not list, hold so many bytes."""
        self._library.simcuda_set_foreign(device, ctypes.c_size_t(size))

    def refuse_memory(self, times: int) -> None:
        """Make the next allocations of this process fail, however much is free."""
        self._library.simcuda_refuse_memory(ctypes.c_size_t(times))

    def fail_operation(self, error: int, *, after: int = 0, late: int = 0) -> None:
        """Make the operation after the next `after` ones fail, in this process.

        Args:
            error: of CUDA, or of a library; 0 for none after all.
            after: operations that succeed before it. For a library's error, operations that the
                library would carry out.
            late: operations after the failed one that still seem to work, unless the host waits for
                the device.
        """
        self._library.simcuda_fail_operation(error, ctypes.c_long(after), ctypes.c_long(late))

    def free(self, device: int = 0) -> int:
        """Return the bytes of a device that nobody holds."""
        return int(self._library.simcuda_free(device))

    def waits(self) -> int:
        """Return how often this process has waited for a device so far."""
        return int(self._library.simcuda_waits())

    def calls(self, function: str) -> int:
        """Return this process's calls of one function so far, as `cudaMalloc`.

        The function is the runtime's, the driver's or NVML's.
        """
        return int(self._library.simcuda_calls(function.encode()))
