"""The co-tenant's process on CUDA: holds as much memory as it is told to, and exits when its parent does.

Run as `python -m elastic_mbs.demo.ballast INDEX`. It says `ready` once it has the device. Then it reads lines `hold BYTES`, does what can be done at
once, and answers `holding BYTES`. What it could not get it goes on trying to get, as any process does that waits for memory.
"""

from __future__ import annotations

import queue
import sys
import threading
from typing import TextIO

import torch

GRAIN = 20 * 2**20
"""The allocator takes at least this much from the device at once: smaller pieces would hold more than they count for."""
PATIENCE = 0.01
"""Seconds between two attempts to get the rest."""


class Ballast:
    """Memory that is held for nothing.

    Args:
        device: where.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._blocks: list[torch.Tensor] = []
        self.wanted = 0
        torch.empty(1, device=device)  # the context's own memory is taken before anybody counts

    @property
    def held(self) -> int:
        """Bytes held."""
        return sum(block.numel() for block in self._blocks)

    def adjust(self) -> None:
        """Brings what is held as close to what is wanted as the device allows."""
        if self.held > self.wanted:
            self._blocks.clear()
            torch.cuda.empty_cache()
        while self.wanted - self.held >= GRAIN:
            size = min(self.wanted - self.held, torch.cuda.mem_get_info(self._device)[0]) // GRAIN * GRAIN
            if not self._take(size):
                return

    def _take(self, size: int) -> bool:
        """One block of `size` bytes, or of the largest half, quarter, … of it that the device gives."""
        while size >= GRAIN:
            try:
                self._blocks.append(torch.empty(size, dtype=torch.uint8, device=self._device))
            except torch.OutOfMemoryError:
                size = size // 2 // GRAIN * GRAIN
            else:
                return True
        return False


def main(device: torch.device) -> None:
    """Serves the parent on standard input until that ends.

    Args:
        device: where to hold memory.
    """
    ballast, lines = Ballast(device), queue.SimpleQueue[str]()
    threading.Thread(target=_read, args=(sys.stdin, lines), name="ballast-input", daemon=True).start()
    print("ready", flush=True)
    while True:
        short = ballast.wanted - ballast.held >= GRAIN
        try:
            line = lines.get(timeout=PATIENCE if short else None)
        except queue.Empty:
            ballast.adjust()
            continue
        if not line:
            return
        ballast.wanted = int(line.removeprefix("hold "))
        ballast.adjust()
        print(f"holding {ballast.held}", flush=True)


def _read(source: TextIO, lines: queue.SimpleQueue[str]) -> None:
    """Hands on every line, and an empty one at the end."""
    for line in source:
        lines.put(line)
    lines.put("")


if __name__ == "__main__":  # cuda-only
    main(torch.device("cuda", int(sys.argv[1])))
