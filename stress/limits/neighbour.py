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


def _serve() -> None:  # pragma: no cover  # in a process of its own
    libc = ctypes.CDLL(None)
    libc.posix_memalign.argtypes = [ctypes.POINTER(ctypes.c_void_p), ctypes.c_size_t, ctypes.c_size_t]
    blocks: list[tuple[ctypes.c_void_p, int]] = []
    held = wanted = 0
    while True:
        # one line at a time: the parent waits for each answer
        asked = select.select([sys.stdin], [], [], PATIENCE if wanted - held >= GRAIN else None)[0]
        if asked:
            line = sys.stdin.readline()
            if not line:
                return
            wanted = int(line)
        while held > wanted:
            block, size = blocks.pop()
            libc.free(block)
            held -= size
        size = wanted - held
        while size >= GRAIN:  # in the largest blocks that it gets
            block = ctypes.c_void_p()
            if libc.posix_memalign(ctypes.byref(block), _ALIGNMENT, size):
                size = size // 2 // GRAIN * GRAIN
            else:
                blocks.append((block, size))
                held += size
                size = min(size, wanted - held)
        if asked:
            print(held, flush=True)


if __name__ == "__main__":  # pragma: no cover
    _serve()
