"""Faults: operations that fail as one of several errors, and sensors that fail or lie."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import cycle

import torch

from elastic_mbs.memory import Headroom, MemorySensor, NoSensor, Reading
from elastic_mbs.testing import InjectOOM

from ..models.plan import Fault


class AlienError(Exception):
    """Not a lack of memory: it has to pass through unchanged."""


ERRORS: dict[str, Callable[[str], BaseException]] = {
    "device": lambda name: torch.OutOfMemoryError(
        f"CUDA out of memory. Tried to allocate 2.00 MiB in {name}"
    ),
    "host": lambda name: RuntimeError(
        "[enforce fail at alloc_cpu.cpp:118] err == 0. DefaultCPUAllocator: can't allocate "
        "memory: you tried 64 bytes"
    ),
    "heap": lambda name: MemoryError(),
    "library": lambda name: RuntimeError(
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"
    ),
    "alien": lambda name: AlienError(f"injected into {name}"),
}


def refused(device: str) -> torch.OutOfMemoryError:
    """Return the error of a GPU's own allocator, for more bytes than any device has.

    The allocator tries everything before it raises.
    """
    try:
        torch.empty(1 << 50, dtype=torch.uint8, device=device)
    except torch.OutOfMemoryError as error:
        return error.with_traceback(None)
    raise AssertionError(f"{device} has a petabyte of memory")


class Faults(InjectOOM):
    """Failures of operations in one block, which has about `operations` without a fault."""

    def __init__(self, faults: Sequence[Fault], operations: int, device: str = "cpu") -> None:
        super().__init__()
        self._device = device
        self._faults = [(1 + int(fault.at * operations), fault) for fault in faults]
        # The error that has to pass through, once it was raised.
        self.alien: BaseException | None = None

    def step(self, name: str) -> None:
        self.count += 1
        for first, fault in self._faults:
            past = self.count - first
            if past >= 0 and (
                fault.times == 0 or (past % fault.gap == 0 and past // fault.gap < fault.times)
            ):
                self.hits.append(name)
                error = (
                    refused(self._device)
                    if (fault.error, self._device) == ("device", "cuda")
                    else ERRORS[fault.error](name)
                )
                if fault.error == "alien":
                    self.alien = error
                raise error


class _Sensor:
    """A sensor that gives the next of its answers at each reading; a text is raised."""

    def __init__(self, *answers: Reading | str) -> None:
        self._answers = cycle(answers)

    def read(self) -> Reading:
        answer = next(self._answers)
        if isinstance(answer, str):
            raise OSError(answer)
        return answer


_SILENT = "the driver does not answer"

SENSORS: dict[str, Callable[[], MemorySensor | None]] = {
    "budget": lambda: None,  # its own sensor
    "none": lambda: NoSensor("none in this case"),
    "fails": lambda: _Sensor(_SILENT, _SILENT, Headroom(1 << 20, 1 << 22, 0, "failing", 0.0)),
    "high": lambda: _Sensor(Headroom(1 << 39, 1 << 40, 1 << 39, "constant", 0.0)),
    "low": lambda: _Sensor(Headroom(0, 1 << 40, 1 << 40, "constant", 0.0)),
    "nonsense": lambda: _Sensor(Headroom(-5, -1, 1 << 60, "nonsense", float("nan"))),
}
