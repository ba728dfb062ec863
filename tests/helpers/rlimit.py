"""Limits of Linux: control group files, written into a folder, and a fake of RLIMIT_DATA."""

import errno
import types
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import psutil
import pytest

from elastic_mbs.memory import HostGuard, host_guard

Version = Literal[1, 2]
ROOT_OF: dict[Version, str] = {1: "sys/fs/cgroup/memory", 2: "sys/fs/cgroup"}
NO_LIMIT: dict[Version, int | str] = {1: 9223372036854771712, 2: "max"}
"""Text in the limit file of a group without a limit."""


def write_group(
    top: Path,
    path: str,
    version: Version,
    limit: int | str | None,
    used: int | str = 0,
    *,
    inactive: int = 0,
    active: int = 0,
    mapped: int = 0,
    high: int | str | None = None,
    **stat: int,
) -> Path:
    """Write the files of a group under `top`, the folder of its hierarchy.

    With a limit of None, the group has no memory controller.
    """
    folder = top / path.strip("/")
    folder.mkdir(parents=True, exist_ok=True)
    prefix, mapped_name = ("total_", "total_mapped_file") if version == 1 else ("", "file_mapped")
    lines = {
        f"{prefix}inactive_file": inactive,
        f"{prefix}active_file": active,
        mapped_name: mapped,
        **stat,
    }
    (folder / "cgroup.procs").write_text("")
    if limit is not None:
        (folder / ("memory.limit_in_bytes" if version == 1 else "memory.max")).write_text(
            f"{limit}\n"
        )
        (folder / ("memory.usage_in_bytes" if version == 1 else "memory.current")).write_text(
            f"{used}\n"
        )
        (folder / "memory.stat").write_text(
            "".join(f"{name} {value}\n" for name, value in lines.items())
        )
    if high is not None:
        (folder / "memory.high").write_text(f"{high}\n")
    return folder


def write_membership(
    root: Path,
    paths: Mapping[Version, str],
    mount_roots: Mapping[Version, str] | None = None,
    more: str = "",
) -> None:
    """Write /proc/self/cgroup and /proc/self/mountinfo.

    `paths` are the groups of this process, `mount_roots` the groups that the mounts begin with.
    """
    proc = root / "proc/self"
    proc.mkdir(parents=True, exist_ok=True)
    lines = {1: "4:hugetlb,memory:{}", 2: "0::{}"}
    kinds = {1: "cgroup cgroup rw,hugetlb,memory", 2: "cgroup2 cgroup2 rw,nsdelegate"}
    mounts = {1: "/" + ROOT_OF[1], 2: "/" + (ROOT_OF[2] + "/unified" if 1 in paths else ROOT_OF[2])}
    (proc / "cgroup").write_text(
        "".join(lines[version].format(path) + "\n" for version, path in paths.items())
        + "3:cpuset:/elsewhere\n"
    )
    tops = mount_roots or {}
    (proc / "mountinfo").write_text(
        "22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/root rw\n"
        + "".join(
            f"3{version} 22 0:3{version} {tops.get(version, '/')} {mounts[version]} rw shared:9 - "
            f"{kinds[version]}\n"
            for version in paths
        )
        + "40 22 0:40 / /sys/fs/cgroup/cpuset rw - cgroup cgroup rw,cpuset\n"
        + more
    )


MEBI = 1 << 20


class Limit:
    """A fake of RLIMIT_DATA: a variable that does not limit this process."""

    RLIMIT_DATA = 2
    RLIM_INFINITY = -1

    def __init__(self) -> None:
        self.soft = self.hard = -1
        self.refuse: Exception | None = None  # raised where the limit is set
        self.enforced = True  # mappings beyond the limit fail
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
    """Give the guard a `Limit` in the place of RLIMIT_DATA, and yield it.

    The process has mapped 150 MiB, and the machine has 900 MiB left.
    """
    fake = Limit()
    monkeypatch.setattr(host_guard, "resource", fake)
    monkeypatch.setattr("mmap.mmap", fake.mmap)
    monkeypatch.setattr(host_guard, "_process", host_guard._ProcessLimit())
    monkeypatch.setattr(host_guard, "own_memory", lambda: (100 * MEBI, 150 * MEBI))
    monkeypatch.setattr(
        psutil,
        "virtual_memory",
        lambda: types.SimpleNamespace(available=900 * MEBI, total=2000 * MEBI),
    )
    yield fake
    assert not host_guard._process._wanted, "a guard was left up"


def guard_of(root: Path, margin: str | None = "10MiB", **options: Any) -> HostGuard:
    return HostGuard(margin, root=root, **options)
