"""RLIMIT_DATA as the guard sees it, without a process that it limits."""

import errno
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from elastic_mbs.memory import HostGuard, host_guard

MEBI = 1 << 20


class Limit:
    """RLIMIT_DATA as a variable; nothing of this process is limited."""

    RLIMIT_DATA = 2
    RLIM_INFINITY = -1

    def __init__(self) -> None:
        self.soft = self.hard = -1
        self.refuse: Exception | None = None  # raised by the next attempts to set it
        self.enforced = True  # whether mappings beyond it fail
        self.seen: list[int] = []

    def getrlimit(self, which: int) -> tuple[int, int]:
        return self.soft, self.hard

    def setrlimit(self, which: int, limits: tuple[int, int]) -> None:
        if self.refuse is not None:
            raise self.refuse
        self.soft, self.hard = limits
        self.seen.append(self.soft)

    def mmap(self, *_: int) -> Any:
        if self.enforced:
            raise OSError(errno.ENOMEM, "Cannot allocate memory")
        return types.SimpleNamespace(close=lambda: None)


def fake_limit(monkeypatch: pytest.MonkeyPatch) -> Iterator[Limit]:
    """The guard sees a `Limit`, a process that has mapped 150 MiB, and a machine with 900 MiB left."""
    fake = Limit()
    monkeypatch.setattr(host_guard, "resource", fake)
    monkeypatch.setattr("mmap.mmap", fake.mmap)
    monkeypatch.setattr(host_guard, "_process", host_guard._ProcessLimit())
    monkeypatch.setattr(host_guard, "own_memory", lambda: (100 * MEBI, 150 * MEBI))
    monkeypatch.setattr(psutil, "virtual_memory", lambda: types.SimpleNamespace(available=900 * MEBI, total=2000 * MEBI))
    yield fake
    assert not host_guard._process._wanted, "a guard was left up"


def guard_of(root: Path, margin: str | None = "10MiB", **options: Any) -> HostGuard:
    return HostGuard(margin, root=root, **options)
