"""The memory limit of this process's control group (cgroup), version 2 or 1, as a container has it.

/proc/self/cgroup has our group's path, /proc/self/mountinfo the place where its hierarchy is
mounted, and the group that is the mount's root. Each of the nested groups limits the sum of its
contents, so the one with the least left counts. Groups above a container's mount are out of sight
(version 1 still shows the tightest limit of all). Page cache counts as available unless it is
mapped, since the kernel drops it before it kills (docs/internals/memory-counting.md).
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path, PurePosixPath
from typing import Literal, NamedTuple

# version 1 writes "no limit" as the largest multiple of a page: more than any machine has
_NO_LIMIT = 1 << 60


@dataclass(frozen=True)
class CgroupMemory:
    """The group with the least memory available, of all around this process; sizes in bytes."""

    version: Literal[1, 2]  # of the hierarchy that the memory controller is in
    # the group, counted from the root of the mount: "/" for a container's own group inside of it
    path: str
    # bytes the group may use. Version 2: the smaller of `memory.max`, where the kernel kills, and
    # `memory.high`, where it throttles
    limit: int
    current: int  # charged to the group now, page cache included
    # page cache in `current` that is not mapped, which the kernel drops when it must
    reclaimable: int
    # bytes that could still be charged to the group: `limit - (current - reclaimable)`, between 0
    # and `limit`
    available: int
    source: str  # the file that the limit is from


def cgroup_memory(root: Path = Path("/")) -> CgroupMemory | None:
    """Return the group with the least memory available. Does not raise.

    None where no limit is in force, where the files cannot be read, and off Linux.

    Args:
        root: the folder taken for `/` (a copy of another machine's files).
    """
    membership = content_of(root / "proc/self/cgroup") or b""
    found = [
        memory for group in groups_of(root, membership) if (memory := group.read()) is not None
    ]
    return min(found, key=lambda memory: memory.available, default=None)


class _Names(NamedTuple):
    """The names of a group's files in one version, and of the lines in their statistics."""

    version: Literal[1, 2]
    limits: tuple[str, ...]
    usage: str
    cache: tuple[str, ...]
    mapped: str


_NAMES: dict[Literal[1, 2], _Names] = {
    # version 1 counts a group alone, and under names with "total_" together with those inside it
    1: _Names(
        1,
        ("memory.limit_in_bytes",),
        "memory.usage_in_bytes",
        ("total_inactive_file", "total_active_file"),
        "total_mapped_file",
    ),
    2: _Names(
        2,
        ("memory.max", "memory.high"),
        "memory.current",
        ("inactive_file", "active_file"),
        "file_mapped",
    ),
}


@dataclass(frozen=True)
class Group:
    """A control group, by the place of its files."""

    names: _Names  # of its files
    folder: str  # with a slash at its end
    path: str  # from the folder that the hierarchy is mounted at

    def read(self) -> CgroupMemory | None:
        """Return its figures now; None where it has no limit."""
        names = self.names
        limits = [
            (limit, source)
            for source in names.limits
            if (limit := self._number(source)) is not None
        ]
        current = self._number(names.usage) if limits else None
        if current is None:
            return None
        stat = self._statistics()
        # the tightest of all groups around it, also of those above the root of the mount
        if names.version == 1:
            limits.append((stat.get("hierarchical_memory_limit", _NO_LIMIT), "memory.stat"))
        limit, source = min(limits)
        if limit >= _NO_LIMIT:
            return None
        cache = sum(stat.get(name, 0) for name in names.cache)
        reclaimable = min(current, max(0, cache - stat.get(names.mapped, 0)))
        available = min(limit, max(0, limit - current + reclaimable))
        return CgroupMemory(
            names.version, self.path, limit, current, reclaimable, available, source
        )

    def _number(self, name: str) -> int | None:
        return _as_number((content_of(self.folder + name) or b"").strip())

    def _statistics(self) -> dict[str, int]:
        """Read `memory.stat`; lines that are not a name and a number are left out."""
        lines = [
            line.split() for line in (content_of(self.folder + "memory.stat") or b"").splitlines()
        ]
        pairs = [
            (line[0].decode(errors="replace"), _as_number(line[1]))
            for line in lines
            if len(line) == 2
        ]
        return {name: number for name, number in pairs if number is not None}


@lru_cache(maxsize=8)  # the guard reads before each piece, and a process seldom changes its group
def groups_of(root: Path, membership: bytes) -> tuple[Group, ...]:
    """Return the groups that a process is nested in, from its own outwards, as far as they show.

    Args:
        root: the folder taken for `/`.
        membership: the content of the process's /proc/self/cgroup.
    """
    paths: dict[Literal[1, 2], str] = {}
    for line in membership.decode(errors="surrogateescape").splitlines():
        hierarchy, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if "memory" in controllers.split(","):
            paths[1] = path
        elif hierarchy == "0" and not controllers:
            paths[2] = path
    found = []
    # in a hybrid the controller is in one of the two, and the other's folders have no memory files;
    # version 1 says so in its list of controllers
    for version, path in sorted(paths.items()):
        mounts = [
            (root / folder, _inside(path, top))
            for kind, top, folder in _mounts(root)
            if kind == version
        ]
        seen = [
            (folder, inside)
            for folder, inside in mounts
            if inside is not None and os.path.isdir(folder / inside)
        ]
        # where no mount shows our group, the root of one is at least one of its ancestors
        for folder, inside in seen or [(folder, PurePosixPath()) for folder, _ in mounts[:1]]:
            nested = (inside, *inside.parents)
            found += [
                Group(
                    _NAMES[version],
                    os.path.join(folder, relative, ""),
                    str(PurePosixPath("/") / relative),
                )
                for relative in nested
            ]
    return tuple(found)


def _mounts(root: Path) -> Iterator[tuple[Literal[1, 2], str, str]]:
    """Yield the mounted hierarchies: version, group at the mount's root, folder below `/`."""
    for line in (
        (content_of(root / "proc/self/mountinfo") or b"")
        .decode(errors="surrogateescape")
        .splitlines()
    ):
        mount, separator, file_system = line.partition(" - ")
        fields, kind = mount.split(" "), file_system.split(" ")
        if not separator or len(fields) < 5 or len(kind) < 3:
            continue
        # mountinfo writes spaces, tabs, newlines and backslashes in octal
        top, folder = (
            re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), field)
            for field in fields[3:5]
        )
        if kind[0] == "cgroup2":
            yield 2, top, folder.lstrip("/")
        elif kind[0] == "cgroup" and "memory" in kind[2].split(","):
            yield 1, top, folder.lstrip("/")


def _inside(path: str, top: str) -> PurePosixPath | None:
    """Return a group's path from the root of a mount.

    None where the mount does not show it, or it lies outside of our cgroup namespace ("/..").
    """
    try:
        inside = PurePosixPath(path).relative_to(PurePosixPath(top))
    except ValueError:
        return None
    return None if ".." in inside.parts else inside


def content_of(path: str | Path) -> bytes | None:
    """Return the whole content of a file of the kernel's, or None where it cannot be read."""
    try:
        with open(path, "rb", buffering=0) as file:
            return file.read()
    except (OSError, ValueError):
        return None


def _as_number(text: bytes) -> int | None:
    return int(text) if text.isdigit() and len(text) < 20 else None
