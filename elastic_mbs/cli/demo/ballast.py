"""The co-tenant's process on CUDA: holds as much of a GPU's memory as it is told to.

Run as `python -m elastic_mbs.cli.demo.ballast INDEX`; `elastic_mbs.cli.demo.neighbour` has what the two processes say to each other.
"""

from __future__ import annotations

import sys

import torch

from elastic_mbs.cli.demo.neighbour import serve

GRAIN = 20 * 2**20
"""The allocator takes at least this much from the device at once: smaller pieces would hold more than they count for."""


class Ballast:
    """Memory that is held for nothing.

    Args:
        device: where.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._blocks: list[torch.Tensor] = []
        self.wanted = 0
        self.grain = GRAIN
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
    serve(Ballast(device))


if __name__ == "__main__":  # cuda-only
    main(torch.device("cuda", int(sys.argv[1])))
