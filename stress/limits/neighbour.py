"""A co-tenant that is another process: it holds as much memory as it is told to, and exits when its parent does.

```
   parent                         child
   hold BYTES  ──────────────►    frees, or takes what it can get at once
               ◄──────────────    holding BYTES
                                  goes on trying to get the rest, as any process does that waits for memory
```

Only the standard library is used here, so that the process is there in a moment: run as a file, it holds blocks of the heap. The one that holds a
GPU's memory is `elastic_mbs.cli.demo.ballast.Ballast`.
"""

from __future__ import annotations

import contextlib
import ctypes
import queue
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Protocol, Self, TextIO

PATIENCE = 0.01
"""Seconds between two attempts to get the rest."""
HEAP_GRAIN = 1 << 16
"""Bytes that blocks of the heap are multiples of."""
_ALIGNMENT = 64  # as torch's allocator has it on a CPU


class Holder(Protocol):
    """Memory that is held for nothing.

    Attributes:
        wanted: bytes to hold.
        held: bytes held.
        grain: bytes of the smallest block that it takes; less than that may be missing.
    """

    wanted: int
    grain: int

    @property
    def held(self) -> int:
        """Bytes held."""

    def adjust(self) -> None:
        """Brings what is held as close to what is wanted as there is memory."""


class Heap:
    """Blocks of the heap, aligned as tensors are."""

    def __init__(self) -> None:
        self.wanted = 0
        self.grain = HEAP_GRAIN
        self._blocks: list[tuple[ctypes.c_void_p, int]] = []
        self._libc = ctypes.CDLL(None)
        self._libc.posix_memalign.argtypes = [ctypes.POINTER(ctypes.c_void_p), ctypes.c_size_t, ctypes.c_size_t]

    @property
    def held(self) -> int:
        """Bytes held."""
        return sum(size for _, size in self._blocks)

    def adjust(self) -> None:
        """Frees whole blocks until no more than what is wanted is left, then takes what is missing, in the largest blocks that it gets."""
        while self.held > self.wanted:
            block, _ = self._blocks.pop()
            self._libc.free(block)
        size = self.wanted - self.held
        while size >= self.grain:
            size = min(size, self.wanted - self.held) if self._take(size) else size // 2 // self.grain * self.grain

    def _take(self, size: int) -> bool:
        block = ctypes.c_void_p()
        if self._libc.posix_memalign(ctypes.byref(block), _ALIGNMENT, size):
            return False
        self._blocks.append((block, size))
        return True


def serve(holder: Holder, source: TextIO | None = None) -> None:
    """Does what the parent says until it says no more.

    Args:
        holder: what holds the memory.
        source: where the parent's lines come from; None for standard input.
    """
    lines = queue.SimpleQueue[str]()
    threading.Thread(target=_read, args=(source or sys.stdin, lines), name="neighbour-input", daemon=True).start()
    print("ready", flush=True)
    while True:
        short = holder.wanted - holder.held >= holder.grain
        try:
            line = lines.get(timeout=PATIENCE if short else None)
        except queue.Empty:
            holder.adjust()
            continue
        if not line:
            return
        holder.wanted = int(line.removeprefix("hold "))
        holder.adjust()
        print(f"holding {holder.held}", flush=True)


def _read(source: TextIO, lines: queue.SimpleQueue[str]) -> None:
    """Hands on every line, and an empty one at the end."""
    for line in source:
        lines.put(line)
    lines.put("")


class Neighbour:
    """The parent's end. A context manager: the process is there inside the block.

    Args:
        command: what to start.
        environment: its variables; None for this process's.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str] | None = None) -> None:
        self._command = list(command)
        self._environment = environment
        self._process: subprocess.Popen[str] | None = None

    @classmethod
    def on_heap(cls, environment: Mapping[str, str] | None = None) -> Neighbour:
        """One that holds blocks of the heap."""
        return cls([sys.executable, "-P", "-S", __file__], environment)

    @property
    def pid(self) -> int:
        """The process."""
        assert self._process is not None
        return self._process.pid

    def __enter__(self) -> Self:
        """Starts the process, and waits until it has what it needs for itself.

        Raises:
            RuntimeError: it ends, or says something else.
        """
        self._process = subprocess.Popen(self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=self._environment)
        try:
            self._answer("ready")
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Ends the process, and with it what it holds."""
        assert self._process is not None
        with contextlib.suppress(BrokenPipeError), self._process:  # closes the pipes, which ends it, and waits for that
            pass
        self._process.wait()

    def hold(self, size: int) -> int:
        """Tells it how many bytes to hold; returns how many it holds.

        Raises:
            RuntimeError: the process has ended.
        """
        assert self._process is not None
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended, which its answer will tell
            self._process.stdin.write(f"hold {size}\n")
            self._process.stdin.flush()
        return int(self._answer("holding"))

    def _answer(self, word: str) -> str:
        """The rest of a line that begins with `word`.

        Raises:
            RuntimeError: the process has ended, or says something else.
        """
        assert self._process is not None
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line.startswith(word):
            raise RuntimeError(f"the ballast process said {line!r} where {word!r} was expected (exit code {self._process.poll()})")
        return line.removeprefix(word)


if __name__ == "__main__":  # pragma: no cover  # in a process of its own
    serve(Heap())
