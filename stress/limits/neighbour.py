"""A GPU's co-tenant in another process: it holds the memory that its parent asks for.

It exits when its parent does. Each line of its input is a number of bytes to hold, each line of its
output the number that it got at once; it goes on trying to get the rest.
"""

from __future__ import annotations

import contextlib
import select
import subprocess
import sys
from typing import Any, Self

import torch

PATIENCE = 0.01  # seconds between two attempts to get the rest
# bytes of the smallest block that it takes: torch's allocator takes at least this much from a GPU
# at once
GRAIN = 20 << 20


class Neighbour:
    """The parent's end.

    A context manager: the process runs inside the block, on a GPU whose index is given.
    """

    def __init__(self, device: Any) -> None:
        self.device = device

    def __enter__(self) -> Self:
        """Start the process; wait until it holds its own share of the device, as a CUDA context."""
        command = [sys.executable, "-P", __file__, str(self.device)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.pid = self._process.pid
        self.hold(0)
        return self

    def __exit__(self, *error: object) -> None:
        # closes the pipes, which ends it, and waits for that
        with contextlib.suppress(BrokenPipeError), self._process:
            pass
        self._process.wait()

    def hold(self, size: int) -> int:
        """Make it hold so many bytes; return how many it holds.

        Raises:
            RuntimeError: the process has ended.
        """
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended, which its answer shows
            print(size, file=self._process.stdin, flush=True)
        answer = self._process.stdout.readline()
        if not answer:
            raise RuntimeError(
                f"the neighbour process has ended (exit code {self._process.wait()})"
            )
        return int(answer)


def _take(
    size: int, device: str
) -> torch.Tensor | None:  # pragma: no cover  # in a process of its own
    try:
        return torch.empty(size, dtype=torch.uint8, device=device)
    except RuntimeError as error:
        if not isinstance(error, torch.OutOfMemoryError) and device != "cpu":
            raise
        return None


def _serve(device: str) -> None:  # pragma: no cover  # likewise
    # the context's own memory is taken before anything is counted
    blocks = [torch.empty(1, device=device)]
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
            held -= blocks.pop().nbytes
            torch.cuda.empty_cache()
        size = (wanted - held) // GRAIN * GRAIN
        while size >= GRAIN:  # in the largest blocks that it gets
            if (block := _take(size, device)) is None:
                size = size // 2 // GRAIN * GRAIN
            else:
                blocks.append(block)
                held += size
                size = min(size, (wanted - held) // GRAIN * GRAIN)
            del block
        if asked:
            print(held, flush=True)


if __name__ == "__main__":  # pragma: no cover
    _serve(sys.argv[1])
