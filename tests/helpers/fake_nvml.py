"""A fake driver under the real pynvml, and a fake torch.cuda for sensors; no GPU is needed."""

import ctypes
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pynvml
import pytest
import torch

from elastic_mbs.memory import CudaSensor, Headroom

GIB = 1024**3
NOT_AVAILABLE = 2**64 - 1  # the driver's figure for unknown bytes

LOST, UNKNOWN, ABSENT = 15, 999, 9  # GPU_IS_LOST, UNKNOWN, DRIVER_NOT_LOADED
_WORDS = {LOST: b"GPU is lost", UNKNOWN: b"Unknown Error"}

Process = tuple[int, int | None]


@dataclass
class Card:
    """A GPU, or one of its MIG instances."""

    uuid: str
    free: int
    total: int
    mode: int = 0
    instances: list["Card"] = field(default_factory=list)
    compute: list[Process] = field(default_factory=list)
    graphics: list[Process] = field(default_factory=list)


class FakeDriver:
    """A stand-in for libnvidia-ml, which pynvml calls through ctypes.

    `fail` maps a function (the middle of its name) to the code that it returns.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.cards = [Card("GPU-abc", 6 * GIB, 10 * GIB)]
        self.fail: dict[str, int] = {}
        self.calls: list[str] = []
        self.references = 0
        # An epoch ends when the driver is loaded again; references from before are stale.
        self.epoch = self.epoch_of_init = 0
        self._handles: list[str] = []
        monkeypatch.setattr(pynvml, "nvmlLib", self)
        monkeypatch.setattr(pynvml, "_nvmlGetFunctionPointer_cache", {})

    def __getattr__(self, name: str) -> Callable[..., int | bytes]:
        if not name.startswith("nvml"):
            raise AttributeError(name)
        if name == "nvmlErrorString":
            return partial(lambda code: _WORDS[code])
        return partial(
            self._call, name.removeprefix("nvml").replace("DeviceGet", "").partition("_v")[0]
        )

    def _call(self, name: str, *args: Any) -> int:
        self.calls.append(name)
        if name in self.fail:
            return self.fail[name]
        if name == "InitWithFlags":
            self.references += 1
            self.epoch_of_init = self.epoch if self.references == 1 else self.epoch_of_init
            return 0
        if self.references < 1:
            return int(pynvml.NVML_ERROR_UNINITIALIZED)
        if name == "Shutdown":
            self.references -= 1
            return 0
        return self._answer(name, *args) if self.epoch == self.epoch_of_init else UNKNOWN

    def _answer(self, name: str, *args: Any) -> int:
        first = args[0]
        if name == "HandleByUUID":
            return self._open(
                next((card for card in self._all() if card.uuid == first.value.decode()), None),
                args[1],
            )
        if name == "HandleByIndex":
            return self._open(self.cards[first.value], args[1])
        if name == "Count":
            first._obj.value = len(self.cards)
        elif name == "SystemGetDriverVersion":
            first.value = b"580.12.34"
        elif name == "SystemGetCudaDriverVersion":
            first._obj.value = 13000
        else:
            known = self._handles[ctypes.c_void_p.from_buffer(first).value or 0]
            card = next((card for card in self._all() if card.uuid == known), None)
            return LOST if card is None else self._tell(name, card, *args[1:])
        return 0

    def _tell(self, name: str, card: Card, *args: Any) -> int:
        if name == "MemoryInfo":
            args[0]._obj.free, args[0]._obj.total = card.free, card.total
        elif name in ("ComputeRunningProcesses", "GraphicsRunningProcesses"):
            return _list(card.compute if name.startswith("Compute") else card.graphics, *args)
        elif name == "MigDeviceHandleByIndex":
            index = args[0].value
            return self._open(
                card.instances[index] if index < len(card.instances) else None, args[1]
            )
        elif name in ("UUID", "Name"):
            args[0].value = (
                card.uuid.encode() if name == "UUID" else b"Stub " + card.uuid[:3].encode()
            )
        else:
            args[0]._obj.value = {
                "MigMode": bool(card.instances),
                "MaxMigDeviceCount": 7,
                "ComputeMode": card.mode,
            }[name]
        return 0

    def _all(self) -> list[Card]:
        return [each for card in self.cards for each in (card, *card.instances)]

    def _open(self, card: Card | None, handle: Any) -> int:
        if card is None:
            return int(pynvml.NVML_ERROR_NOT_FOUND)
        ctypes.c_void_p.from_buffer(handle._obj).value = len(self._handles)
        self._handles.append(card.uuid)
        return 0


def _list(processes: list[Process], count: Any, into: Any) -> int:
    count._obj.value, room = len(processes), count._obj.value
    if len(processes) > room:
        return int(pynvml.NVML_ERROR_INSUFFICIENT_SIZE)
    for place, (pid, size) in enumerate(processes):
        into[place].pid, into[place].usedGpuMemory = pid, NOT_AVAILABLE if size is None else size
    return 0


def raiser(error: BaseException) -> Callable[..., Any]:
    def fail(*_: Any, **__: Any) -> Any:
        raise error

    return fail


def read_cuda(device: str = "cuda:0") -> Headroom:
    """Return a reading of the CUDA sensor, five seconds after the start."""
    reading = CudaSensor(device, clock=lambda: 5.0).read()
    assert isinstance(reading, Headroom), reading
    return reading


class FakeCuda:
    """The functions of torch.cuda that sensors use.

    The card has 9 GiB: 5 are free, and this process reserves 2.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.properties = types.SimpleNamespace(
            total_memory=9 * GIB, uuid="abc", is_integrated=False
        )
        self.reserved = [2 * GIB]
        self.fraction = 1.0
        self.info: tuple[int, int] | Exception = (5 * GIB, 9 * GIB)
        self.stats: dict[str, int] = {}
        self.resets: list[torch.device] = []
        for name in (
            "get_device_properties",
            "memory_reserved",
            "get_per_process_memory_fraction",
            "mem_get_info",
            "memory_stats_as_nested_dict",
        ):
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

    def memory_stats_as_nested_dict(self, _: torch.device) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name, value in self.stats.items():
            kind, *rest = name.split(".")
            if rest:
                found.setdefault(kind, {}).setdefault("all", {})[rest[-1]] = value
            else:
                found[kind] = value
        return found
