"""The memory limit of this process's control group (cgroup), version 2 or 1: what a container may use.

```
/proc/self/cgroup      which group we are in, as a path in its hierarchy
/proc/self/mountinfo   where that hierarchy is mounted, and which group of it is the root of the mount
   both              → a folder; its parents up to the mount point are the groups that we are nested in
```

Every one of these groups limits the sum of what it contains, so the one with the least left counts. In a container the mount's root is often the
container's own group; what lies above is then out of sight (version 1 still shows the tightest limit of all). Page cache is charged to the group too,
but the kernel drops it before it kills a process: it counts as available, except for what is mapped (shared/reference/cpu_memory.md, "RLIMIT fence").
"""

from __future__ import annotations

import os
import re
import threading
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Literal

_NO_LIMIT = 1 << 60  # version 1 writes "no limit" as the largest multiple of a page: more than any machine has
_MOST = 1 << 14  # bytes of a file that are read; the longest, memory.stat, has about 4 KiB


@dataclass(frozen=True)
class CgroupMemory:
    """The group that binds: of all that this process is nested in, the one with the least memory available.

    Attributes:
        version: of the hierarchy that the memory controller is in: 2, or 1.
        path: the group, counted from the root of the mount: "/" for a container's own group inside of it.
        limit: bytes that the group may use. Version 2: the smaller of `memory.max`, where the kernel kills, and `memory.high`, where it throttles.
        current: bytes charged to the group now, page cache included.
        reclaimable: bytes of `current` that are page cache and not mapped, which the kernel drops when it must.
        available: bytes that could still be charged to the group: `limit - (current - reclaimable)`, between 0 and `limit`.
        source: the file that the limit is from.
    """

    version: Literal[1, 2]
    path: str
    limit: int
    current: int
    reclaimable: int
    available: int
    source: str


def cgroup_memory(root: Path = Path("/")) -> CgroupMemory | None:
    """The group with the least memory available; None where no limit is in force, the files cannot be read, or this is not Linux. Does not raise.

    Args:
        root: the folder taken for `/` (a copy of another machine's files).
    """
    reader = CgroupReader(root)
    try:
        return reader.read()
    finally:
        reader.close()


class OpenFiles:
    """Files that are read repeatedly, each from its start, and stay open: that leaves a few µs for each.

    A forked child opens its own (/proc/self is the process that opened it), and has a lock that no thread of its parent holds.
    """

    def __init__(self) -> None:
        self.descriptors: dict[str, int] = {}
        self._pid = os.getpid()
        self._lock = threading.RLock()
        weakref.finalize(self, _close, self.descriptors)

    @property
    def lock(self) -> threading.RLock:
        """Held by a thread that reads several files together."""
        if self._pid != os.getpid():
            self._pid, self._lock = os.getpid(), threading.RLock()
            _close(self.descriptors)
        return self._lock

    def read(self, path: str) -> bytes | None:
        """The content of a file, or None."""
        with self.lock:
            try:
                if path not in self.descriptors:
                    self.descriptors[path] = os.open(path, os.O_RDONLY)
                return os.pread(self.descriptors[path], _MOST, 0)
            except (OSError, ValueError):
                # a group that is gone, or a controller that was switched off: opened again the next time
                _close(self.descriptors, only=path)
                return None

    def close(self, keep: str | None = None) -> None:
        """Closes all files but one; the next reading opens them again."""
        with self.lock:
            for path in self.descriptors.keys() - {keep}:
                _close(self.descriptors, only=path)


class CgroupReader:
    """Reads the limit repeatedly: looks the groups up once. Follows the process to another group and into a forked child. Threads may share it."""

    def __init__(self, root: Path = Path("/")) -> None:
        self._root = root
        self._membership_file = os.fspath(root / "proc/self/cgroup")
        self._files = OpenFiles()
        self._groups: list[Group] = []
        self._membership = b""

    def read(self) -> CgroupMemory | None:
        """See `cgroup_memory`."""
        with self._files.lock:
            membership = self._files.read(self._membership_file) or b""
            if membership != self._membership:
                self._files.close(keep=self._membership_file)
                self._groups = list(groups_of(self._root, membership.decode(errors="surrogateescape")))
                self._membership = membership
            found = [memory for group in self._groups if (memory := self._memory(group)) is not None]
        return min(found, key=lambda memory: memory.available, default=None)

    def close(self) -> None:
        """Closes the files; the next reading opens them again."""
        self._files.close()

    def _memory(self, group: Group) -> CgroupMemory | None:
        limits = [(limit, source) for source in group.limits if (limit := self._number(group.folder + source)) is not None]
        stat: dict[str, int] = {}
        if group.version == 1 and group.top:
            # the only trace of groups above the root of the mount
            stat = self._stat(group)
            limits.append((stat.get("hierarchical_memory_limit", _NO_LIMIT), "memory.stat"))
        limit, source = min(limits, default=(_NO_LIMIT, ""))
        current = self._number(group.folder + group.usage) if limit < _NO_LIMIT else None
        if current is None:
            return None
        stat = stat or self._stat(group)
        cache = stat.get(group.prefix + "inactive_file", 0) + stat.get(group.prefix + "active_file", 0)
        reclaimable = min(current, max(0, cache - stat.get(group.mapped, 0)))
        available = min(limit, max(0, limit - current + reclaimable))
        return CgroupMemory(group.version, group.path, limit, current, reclaimable, available, source)

    def _number(self, path: str) -> int | None:
        return _as_number((self._files.read(path) or b"").strip())

    def _stat(self, group: Group) -> dict[str, int]:
        """`memory.stat`; lines that are not a name and a number are left out."""
        fields = (line.split() for line in (self._files.read(group.folder + "memory.stat") or b"").splitlines())
        pairs = ((pair[0].decode(errors="replace"), _as_number(pair[1])) for pair in fields if len(pair) == 2)
        return {name: number for name, number in pairs if number is not None}


class Group:
    """One group: where its files are and what they are called."""

    def __init__(self, version: Literal[1, 2], top: str, inside: PurePosixPath) -> None:
        self.version = version
        self.folder = os.path.join(top, inside, "")
        self.path = str(PurePosixPath("/") / inside)  # from the folder that the hierarchy is mounted at
        self.top = inside == PurePosixPath()
        self.limits = ("memory.max", "memory.high") if version == 2 else ("memory.limit_in_bytes",)
        self.usage = "memory.current" if version == 2 else "memory.usage_in_bytes"
        # version 1 counts a group alone, and under names with "total_" together with those inside it
        self.prefix = "" if version == 2 else "total_"
        self.mapped = "file_mapped" if version == 2 else "total_mapped_file"


def groups_of(root: Path, membership: str) -> Iterator[Group]:
    """The groups that a process is nested in, as far as they can be seen, from its own outwards."""
    paths: dict[Literal[1, 2], str] = {}
    for line in membership.splitlines():
        hierarchy, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if "memory" in controllers.split(","):
            paths[1] = path
        elif hierarchy == "0" and not controllers:
            paths[2] = path
    mounts = list(_mounts(root))
    # in a hybrid the controller is in one of the two, and the other's folders have no memory files; version 1 says so in its list of controllers
    for version, path in sorted(paths.items()):
        candidates = [(mount, _inside(path, mount.root)) for mount in mounts if mount.version == version]
        seen = [(mount, inside) for mount, inside in candidates if inside is not None and os.path.isdir(root / mount.folder / inside)]
        # the mount that shows the most ancestors; where none shows our group, the root of a mount is at least one of its ancestors
        for mount, inside in sorted(seen, key=lambda pair: -len(pair[1].parts))[:1] or [(mount, PurePosixPath()) for mount, _ in candidates[:1]]:
            yield from _upwards(version, os.fspath(root / mount.folder), inside)


def _upwards(version: Literal[1, 2], top: str, inside: PurePosixPath) -> Iterator[Group]:
    for relative in (inside, *inside.parents):
        group = Group(version, top, relative)
        if version == 1 and relative != inside and _flat(group.folder):
            return
        yield group


def _flat(folder: str) -> bool:
    """Whether a group of version 1 does not count the groups inside of it (before Linux 5.11 this could be chosen)."""
    try:
        return Path(folder, "memory.use_hierarchy").read_bytes().strip() == b"0"
    except OSError:
        return False


@dataclass(frozen=True)
class _Mount:
    """A mounted hierarchy."""

    version: Literal[1, 2]
    root: str  # the group that appears at `folder`
    folder: str  # relative to the root of the file system


def _mounts(root: Path) -> Iterator[_Mount]:
    try:
        lines = (root / "proc/self/mountinfo").read_text("utf-8", "surrogateescape").splitlines()
    except OSError:
        return
    for line in lines:
        mount, separator, file_system = line.partition(" - ")
        fields, kind = mount.split(" "), file_system.split(" ")
        if not separator or len(fields) < 5 or len(kind) < 3:
            continue
        top, folder = _unescaped(fields[3]), _unescaped(fields[4]).lstrip("/")
        if kind[0] == "cgroup2":
            yield _Mount(2, top, folder)
        elif kind[0] == "cgroup" and "memory" in kind[2].split(","):
            yield _Mount(1, top, folder)


def _inside(path: str, top: str) -> PurePosixPath | None:
    """A group's path from the root of a mount; None where the mount does not show it, or it lies outside of our cgroup namespace ("/..")."""
    try:
        inside = PurePosixPath(path).relative_to(PurePosixPath(top))
    except ValueError:
        return None
    return None if ".." in inside.parts else inside


def _unescaped(text: str) -> str:
    """Without the octal that stands for spaces, tabs, newlines and backslashes in mountinfo."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)


def _as_number(text: bytes) -> int | None:
    return int(text) if text.isdigit() and len(text) < 20 else None


def _close(descriptors: dict[str, int], only: str | None = None) -> None:
    for path in [path for path in descriptors if only in (None, path)]:
        os.close(descriptors.pop(path))
