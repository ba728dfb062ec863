"""A co-tenant that is another process: it holds as much of the heap as its parent asks for, and exits when its parent does.

Each line of its input is a number of bytes to hold, each line of its output the number that it got at once; it goes on trying to get the rest.
Imports the standard library only, so that the process starts in a moment. A GPU's co-tenant is `elastic_mbs.cli.demo.ballast.Ballast`.
"""

from __future__ import annotations

import contextlib
import ctypes
import select
import subprocess
import sys
from typing import Self

PATIENCE = 0.01  # seconds between two attempts to get the rest
GRAIN = 1 << 16  # bytes of the smallest block that it takes; less than that may be missing
_ALIGNMENT = 64  # as torch's allocator has it on a CPU


class Heap:
    """Blocks of the heap, aligned as tensors are."""

    def __init__(self) -> None:
        self.wanted = 0
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
        while size >= GRAIN:
            size = min(size, self.wanted - self.held) if self._take(size) else size // 2 // GRAIN * GRAIN

    def _take(self, size: int) -> bool:
        block = ctypes.c_void_p()
        if self._libc.posix_memalign(ctypes.byref(block), _ALIGNMENT, size):
            return False
        self._blocks.append((block, size))
        return True


def _serve(heap: Heap) -> None:
    while True:
        short = heap.wanted - heap.held >= GRAIN
        asked = select.select([sys.stdin], [], [], PATIENCE if short else None)[0]  # one line at a time: the parent waits for each answer
        if asked:
            line = sys.stdin.readline()
            if not line:
                return
            heap.wanted = int(line)
        heap.adjust()
        if asked:
            print(heap.held, flush=True)


class Neighbour:
    """The parent's end. A context manager: the process runs inside the block."""

    def __enter__(self) -> Self:
        self._process = subprocess.Popen([sys.executable, "-P", "-S", __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.pid = self._process.pid
        return self

    def __exit__(self, *error: object) -> None:
        with contextlib.suppress(BrokenPipeError), self._process:  # closes the pipes, which ends it, and waits for that
            pass
        self._process.wait()

    def hold(self, size: int) -> int:
        """Makes it hold so many bytes; returns how many it holds. RuntimeError where the process has ended."""
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended, which its answer shows
            print(size, file=self._process.stdin, flush=True)
        answer = self._process.stdout.readline()
        if not answer:
            raise RuntimeError(f"the neighbour process has ended (exit code {self._process.wait()})")
        return int(answer)


if __name__ == "__main__":  # pragma: no cover  # in a process of its own
    _serve(Heap())
