"""A co-tenant that is another process: it holds as much memory as its parent asks for, and exits when its parent does.

Each line of its input is a number of bytes to hold, each line of its output the number that it got at once; it goes on trying to get the rest.
Imports the standard library only, so that the process starts in a moment on a CPU.
"""

from __future__ import annotations

import contextlib
import ctypes
import select
import subprocess
import sys
from collections.abc import Callable
from typing import Any, Self

PATIENCE = 0.01  # seconds between two attempts to get the rest
HEAP_GRAIN = 1 << 16  # bytes of the smallest block that it takes; less than that may be missing
CUDA_GRAIN = 20 << 20  # torch's allocator takes at least this much from a GPU at once
_ALIGNMENT = 64  # as torch's allocator has it on a CPU

Memory = tuple[int, Callable[[int], Any], Callable[[Any], object]]  # its grain, what takes a block of so many bytes or None, and what frees one


class Neighbour:
    """The parent's end. A context manager: the process runs inside the block, on the heap or on a GPU (whose index is given)."""

    def __init__(self, device: Any = "cpu") -> None:
        self.device = device

    def __enter__(self) -> Self:
        """Starts the process and waits until it holds what it needs for itself, as a CUDA context."""
        options = ["-P", "-S"] if self.device == "cpu" else ["-P"]
        command = [sys.executable, *options, __file__, str(self.device)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.pid = self._process.pid
        self.hold(0)
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


def heap() -> Memory:
    libc = ctypes.CDLL(None)
    libc.posix_memalign.argtypes = [ctypes.POINTER(ctypes.c_void_p), ctypes.c_size_t, ctypes.c_size_t]

    def take(size: int) -> ctypes.c_void_p | None:
        block = ctypes.c_void_p()
        return None if libc.posix_memalign(ctypes.byref(block), _ALIGNMENT, size) else block

    return HEAP_GRAIN, take, libc.free


def cuda(device: str) -> Memory:
    import torch

    torch.empty(1, device=device)  # the context's own memory is taken before anything is counted

    def take(size: int) -> torch.Tensor | None:
        try:
            return torch.empty(size, dtype=torch.uint8, device=device)
        except torch.OutOfMemoryError:
            return None

    def free(block: torch.Tensor) -> None:
        block.untyped_storage().resize_(0)
        torch.cuda.empty_cache()

    return CUDA_GRAIN, take, free


def _serve(memory: Memory) -> None:  # pragma: no cover  # in a process of its own
    grain, take, free = memory
    blocks: list[tuple[object, int]] = []
    held = wanted = 0
    while True:
        # one line at a time: the parent waits for each answer
        asked = select.select([sys.stdin], [], [], PATIENCE if wanted - held >= grain else None)[0]
        if asked:
            line = sys.stdin.readline()
            if not line:
                return
            wanted = int(line)
        while held > wanted:
            block, size = blocks.pop()
            free(block)
            held -= size
        size = (wanted - held) // grain * grain
        while size >= grain:  # in the largest blocks that it gets
            if (taken := take(size)) is None:
                size = size // 2 // grain * grain
            else:
                blocks.append((taken, size))
                held += size
                size = min(size, (wanted - held) // grain * grain)
        if asked:
            print(held, flush=True)


if __name__ == "__main__":  # pragma: no cover
    _serve(heap() if sys.argv[1] == "cpu" else cuda(sys.argv[1]))
