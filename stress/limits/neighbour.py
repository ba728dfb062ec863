"""A co-tenant that is another process: it holds as much of the heap as the parent says, and exits when its parent does.

```
   parent                         child
   hold BYTES  ──────────────►    frees, or takes what it can get at once
               ◄──────────────    holding BYTES
                                  goes on trying to get the rest, as any process does that waits for memory
```

Imports the standard library only, so that the process is there in a moment. A GPU's co-tenant is `elastic_mbs.cli.demo.ballast.Ballast`.
"""

from __future__ import annotations

import contextlib
import ctypes
import select
import subprocess
import sys
from collections.abc import Mapping
from types import TracebackType
from typing import Self

PATIENCE = 0.01
"""Seconds between two attempts to get the rest."""
GRAIN = 1 << 16
"""Bytes of the smallest block that it takes; less than that may be missing."""
_ALIGNMENT = 64  # as torch's allocator has it on a CPU


class Heap:
    """Blocks of the heap, aligned as tensors are."""

    def __init__(self) -> None:
        self.wanted = 0
        self.grain = GRAIN
        self._blocks: list[tuple[ctypes.c_void_p, int]] = []
        self._libc = ctypes.CDLL(None)
        self._libc.posix_memalign.argtypes = [ctypes.POINTER(ctypes.c_void_p), ctypes.c_size_t, ctypes.c_size_t]

    @property
    def held(self) -> int:
        return sum(size for _, size in self._blocks)

    def adjust(self) -> None:
        """Frees whole blocks until no more than what is wanted is left, then takes what is missing, in the largest blocks that it gets."""
        while self.held > self.wanted:
            self._libc.free(self._blocks.pop()[0])
        size = self.wanted - self.held
        while size >= self.grain:
            size = min(size, self.wanted - self.held) if self._take(size) else size // 2 // self.grain * self.grain

    def _take(self, size: int) -> bool:
        block = ctypes.c_void_p()
        if self._libc.posix_memalign(ctypes.byref(block), _ALIGNMENT, size):
            return False
        self._blocks.append((block, size))
        return True


def _serve(heap: Heap) -> None:
    """Does what the lines of standard input say, until there are no more."""
    print("ready", flush=True)
    while True:
        short = heap.wanted - heap.held >= heap.grain
        if select.select([sys.stdin], [], [], PATIENCE if short else None)[0]:  # one line at a time: the parent waits for each answer
            line = sys.stdin.readline()
            if not line:
                return
            heap.wanted = int(line.removeprefix("hold "))
            heap.adjust()
            print(f"holding {heap.held}", flush=True)
        else:
            heap.adjust()


class Neighbour:
    """The parent's end. A context manager: the process is there inside the block.

    Args:
        environment: its variables; None for this process's.
    """

    def __init__(self, environment: Mapping[str, str] | None = None) -> None:
        self._environment = environment

    def __enter__(self) -> Self:
        """Starts the process, and waits until it has what it needs for itself."""
        command = [sys.executable, "-P", "-S", __file__]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=self._environment)
        self.pid = self._process.pid
        try:
            self._answer("ready")
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        with contextlib.suppress(BrokenPipeError), self._process:  # closes the pipes, which ends it, and waits for that
            pass
        self._process.wait()

    def hold(self, size: int) -> int:
        """Makes it hold so many bytes; returns how many it holds. RuntimeError where the process has ended."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended, which its answer shows
            self._process.stdin.write(f"hold {size}\n")
            self._process.stdin.flush()
        return int(self._answer("holding"))

    def _answer(self, word: str) -> str:
        """The rest of a line that begins with `word`."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line.startswith(word):
            raise RuntimeError(f"the neighbour process said {line!r} where {word!r} was expected (exit code {self._process.poll()})")
        return line.removeprefix(word)


if __name__ == "__main__":  # pragma: no cover  # in a process of its own
    _serve(Heap())
