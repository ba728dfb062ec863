"""pynvml and torch.cuda as far as the sensors use them, without a driver."""

from __future__ import annotations

import types

import pytest
import torch

GIB = 1024**3


class NVMLError(Exception):
    """Behaves as the real one: not comparable with other types, not hashable."""

    def __eq__(self, other: object) -> bool:
        return bool(self.value == other.value)  # type: ignore[attr-defined]  # fails for other types, as the real one does

    __hash__ = None  # type: ignore[assignment]  # the real ones have no hash either


class NVMLLibraryMismatchError(Exception):
    """What the binding raises for an unversioned call that the library does not have: no NVMLError."""


ERRORS = [
    "LibraryNotFound",
    "DriverNotLoaded",
    "NotFound",
    "InvalidArgument",
    "FunctionNotFound",
    "GpuIsLost",
    "NotSupported",
    "NoPermission",
    "Unknown",
    "Uninitialized",
]

Process = tuple[int, int | None]


class FakeNvml(types.ModuleType):
    """The functions of pynvml that are used, over one device. `fail` maps a function's name to the class that it raises."""

    nvmlMemory_v2 = 0x02000028

    def __init__(self) -> None:
        super().__init__("pynvml")
        self.NVMLError = NVMLError
        self.NVMLLibraryMismatchError = NVMLLibraryMismatchError
        for name in ERRORS:
            setattr(self, f"NVMLError_{name}", type(f"NVMLError_{name}", (NVMLError,), {}))
        self.known = {"GPU-abc": "handle"}
        self.free, self.total = 6 * GIB, 10 * GIB
        self.compute: list[Process] = []
        self.graphics: list[Process] = []
        self.fail: dict[str, str] = {}
        self.calls: list[str] = []
        self.references = 0

    def _call(self, name: str) -> None:
        self.calls.append(name)
        if name in self.fail:
            raise getattr(self, f"NVMLError_{self.fail[name]}")(f"{self.fail[name]} in {name}")
        if name != "init" and self.references < 1:
            raise getattr(self, "NVMLError_Uninitialized")(name)  # noqa: B009 - made in __init__

    def nvmlInit(self) -> None:
        self._call("init")
        self.references += 1

    def nvmlShutdown(self) -> None:
        self._call("shutdown")
        self.references -= 1

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        self._call("open")
        if uuid not in self.known:
            raise getattr(self, "NVMLError_NotFound")(uuid)  # noqa: B009 - made in __init__
        return self.known[uuid]

    def nvmlDeviceGetMemoryInfo(self, handle: str, version: int | None = None) -> types.SimpleNamespace:
        assert handle in self.known.values()
        self._call("v1" if version is None else "v2")
        return types.SimpleNamespace(free=self.free, total=self.total)

    def nvmlDeviceGetComputeRunningProcesses(self, handle: str) -> list[types.SimpleNamespace]:
        return self._processes(handle, "compute", self.compute)

    def nvmlDeviceGetGraphicsRunningProcesses(self, handle: str) -> list[types.SimpleNamespace]:
        return self._processes(handle, "graphics", self.graphics)

    def nvmlDeviceGetComputeRunningProcesses_v2(self, handle: str) -> list[types.SimpleNamespace]:
        return self._processes(handle, "compute_v2", self.compute)

    def nvmlDeviceGetGraphicsRunningProcesses_v2(self, handle: str) -> list[types.SimpleNamespace]:
        return self._processes(handle, "graphics_v2", self.graphics)

    def _processes(self, handle: str, name: str, processes: list[Process]) -> list[types.SimpleNamespace]:
        assert handle in self.known.values()
        if self.fail.get(name) == "mismatch":
            raise NVMLLibraryMismatchError(name)
        self._call(name)
        return [types.SimpleNamespace(pid=pid, usedGpuMemory=size) for pid, size in processes]


class FakeCuda:
    """torch.cuda, as far as the sensors use it: a card of 9 GiB of which 5 are free, 2 are reserved by us."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.properties = types.SimpleNamespace(total_memory=9 * GIB, uuid="abc", is_integrated=False)
        self.reserved = [2 * GIB]
        self.fraction = 1.0
        self.info: tuple[int, int] | Exception = (5 * GIB, 9 * GIB)
        self.stats: dict[str, int] = {}
        self.resets: list[torch.device] = []
        for name in ("get_device_properties", "memory_reserved", "get_per_process_memory_fraction", "mem_get_info", "memory_stats"):
            monkeypatch.setattr(torch.cuda, name, getattr(self, name), raising=False)
        monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", self.resets.append)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)

    def get_device_properties(self, _: torch.device) -> types.SimpleNamespace:
        return self.properties

    def memory_reserved(self, device: torch.device) -> int:
        assert device.index is not None
        return self.reserved.pop(0) if len(self.reserved) > 1 else self.reserved[0]

    def get_per_process_memory_fraction(self, _: torch.device) -> float:
        return self.fraction

    def mem_get_info(self, _: torch.device) -> tuple[int, int]:
        if isinstance(self.info, Exception):
            raise self.info
        return self.info

    def memory_stats(self, _: torch.device) -> dict[str, int]:
        return self.stats


class Clock:
    """A clock that stands still until it is moved."""

    def __init__(self, now: float = 100.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    def pass_(self, seconds: float) -> None:
        self.now += seconds
