"""A device for several processes: the file that they share, and the library that enforces it.

`fence.c` is the library.
"""

from __future__ import annotations

import atexit
import functools
import mmap
import os
import platform
import shlex
import shutil
import struct
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple, Self

from elastic_mbs.errors import UsageError

from . import sources
from .limit import HostLimit, switch_onednn_off

SOURCE = Path(__file__).with_name("fence.c")
VARIABLE = "ELASTIC_MBS_FENCE"  # names the file, in the environment of the processes that share it
UNLIMITED = 2**63 - 1
# Bytes from which a block counts and can be refused: more than the state of a random generator (5
# KiB) and other bookkeeping, which is on the host where there is a real device.
MINIMUM = 8192
_FILE_SIZE = 4096
_PLACES = range(16, _FILE_SIZE // 8, 8)  # where slots begin, in words


class Slot(NamedTuple):
    pid: int  # of the account's process
    started: int  # see `start_time`
    live: int  # bytes that it holds
    peak: int  # most bytes that it held since `Fence.reset_peak`
    failures: int  # allocations that were refused


def _word(place: int) -> property:
    """Return a number in the file, at the place where fence.c has it."""
    return property(
        lambda fence: fence._words[place],
        lambda fence, value: fence._words.__setitem__(place, min(value, UNLIMITED)),
    )


class Fence:
    """The shared file, mapped.

    A context manager: closed at the end, and deleted by the one that has created it.
    """

    budget = _word(0)  # bytes that all processes may hold together; may be set at any time
    # bytes of the largest single block there is room for, however much is free; likewise
    largest = _word(1)

    def __init__(self, path: Path) -> None:
        self.path = path
        self._created = False
        try:
            with path.open("r+b") as file:
                self._map = mmap.mmap(file.fileno(), _FILE_SIZE)
        except (OSError, ValueError) as error:
            raise UsageError(f"{path} is no fence file: {error}") from error
        self._words = memoryview(self._map).cast("q")

    @classmethod
    def create(cls, budget: int = UNLIMITED) -> Fence:
        """Make a new device of so many bytes for all its processes together."""
        # in memory, where there is such a place
        folder = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
        number, name = tempfile.mkstemp(prefix="elastic_mbs_fence_", dir=folder)
        with open(number, "wb") as file:
            file.write(struct.pack("3q", budget, UNLIMITED, MINIMUM).ljust(_FILE_SIZE, b"\0"))
        fence = cls(Path(name))
        fence._created = True
        return fence

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        """Unmap the file; processes that have it mapped keep it."""
        self._words.release()
        self._map.close()
        if self._created:
            self.path.unlink(missing_ok=True)

    def leave(self, size: int | None, *, held: int = 0) -> None:
        """Set the budget, in which `held` counts already; None lifts it."""
        self.budget = UNLIMITED if size is None else size

    def slots(self) -> list[Slot]:
        """Return the processes that are alive."""
        return [slot for slot in self._used() if start_time(slot.pid) == slot.started]

    def live(self) -> int:
        """Return the bytes that all processes hold."""
        return sum(slot.live for slot in self.slots())

    def of(self, pid: int) -> Slot:
        """Return the account of one process, all zero before its first block."""
        return next((slot for slot in self._used() if slot.pid == pid), Slot(pid, 0, 0, 0, 0))

    def _used(self) -> list[Slot]:
        return [Slot(*self._words[place : place + 5]) for place in _PLACES if self._words[place]]

    def reset_peak(self, pid: int) -> None:
        """Start a new interval for the peak of a process."""
        for place in _PLACES:
            if self._words[place] == pid:
                self._words[place + 3] = self._words[place + 2]


class ShimLimit(HostLimit):
    """The device that `fence.c` makes, in a process that `run_child` has started under it.

    It counts tensors of 8 KiB and more.
    """

    kind = "shim"

    def __init__(self, *, shared: bool = False) -> None:
        super().__init__()
        path = os.environ.get(VARIABLE)
        if path is None:
            raise UsageError(
                "the limit 'shim' works in a process that was started under it only: run the job "
                "by run_child('shim', …)"
            )
        self.fence = Fence(Path(path))
        self._pid = os.getpid()
        # with others, for whom its capacity stays as it is when this one leaves
        self._shared = shared

    def __enter__(self) -> Self:
        self._undo.callback(switch_onednn_off())
        return self

    def lift(self) -> None:
        if not self._shared:
            self.fragment(None)
            super().lift()

    def fragment(self, largest: int | None) -> None:
        # for all processes on the device
        self.fence.largest = UNLIMITED if largest is None else largest

    def total(self) -> int | None:
        return None if self.fence.budget == UNLIMITED else self.fence.budget + self._held

    def others(self) -> int:
        return self._held + sum(slot.live for slot in self.fence.slots() if slot.pid != self._pid)

    def live(self) -> int:
        return self.fence.of(self._pid).live

    def failures(self) -> int:
        return self.fence.of(self._pid).failures

    def apply(self) -> None:
        self.fence.budget = (
            UNLIMITED if self.capacity is None else max(0, self.capacity - self._held)
        )

    def peak_of_interval(self) -> int:
        return self.fence.of(self._pid).peak

    def begin_interval(self) -> None:
        self.fence.reset_peak(self._pid)


def start_time(pid: int) -> int:
    """Return the start of a process, in the machine's clock ticks; -1 if it has ended.

    A zombie has ended.
    """
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return -1
    fields = text.rpartition(")")[2].split()
    return -1 if fields[0] in {"Z", "X", "x"} else int(fields[19])


def environment(fence: Fence) -> dict[str, str]:
    """Return the variables under which a process shares the device."""
    # a library that was preloaded before is left out: an allocator of its own would not know the
    # blocks of this one
    return {VARIABLE: os.fspath(fence.path), "LD_PRELOAD": os.fspath(library())}


def trouble() -> str | None:
    if sys.platform != "linux" or platform.libc_ver()[0] != "glibc":
        system = f"{sys.platform} {platform.libc_ver()[0]}".rstrip()
        return f"the shim needs Linux with glibc, and this is {system}"
    if shutil.which(_compiler()[0]) is None:
        return (
            f"the shim needs a C compiler, and there is no {_compiler()[0]!r}: install one (apt "
            "install gcc), or name yours in the variable CC"
        )
    return sources.missing(SOURCE, "the shim")


@functools.cache
def library() -> Path:
    problem = trouble()
    if problem is not None:
        raise UsageError(problem)
    folder = tempfile.mkdtemp(prefix="elastic_mbs_")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    made = Path(folder, "fence.so")
    command = [*_compiler(), "-O2", "-shared", "-fPIC", "-pthread"]
    done = subprocess.run(
        [*command, "-o", made, SOURCE], capture_output=True, text=True, check=False
    )
    if done.returncode:
        said = next(iter(done.stderr.strip().splitlines()), "nothing")
        raise UsageError(
            f"the shim's {SOURCE.name} does not compile with {shlex.join(command)}, which said: "
            f"{said}"
        )
    return made


def _compiler() -> list[str]:
    return shlex.split(os.environ.get("CC", "")) or ["cc"]
