"""Fragmented memory of a GPU: a checkerboard of blocks in this process's caching allocator."""

from __future__ import annotations

import torch

PIN = 2 * 2**20  # bytes of a block that is kept: the smallest that comes out of the allocator's large segments
LEAST = 16 * 2**20  # bytes of the smallest hole: with smaller ones memory would be full of pins
APART = 64 * 2**20  # bytes that stay outside, at most: small tensors have segments of their own, of 2 MiB each
GAPS = 64  # free blocks between older tensors that pins may fall into


class Checkerboard:
    """Holds a pin after each hole of one long segment.

    ```
        segment   hole  │pin│  hole  │pin│  hole  │pin│ …
    ```

    A segment in which one block is alive is never given back to the device. So memory is free in total, but the largest block of it is a hole. With
    expandable segments the pages of the holes are given back, and mapped again in one piece: then nothing is fragmented.
    """

    def __init__(self, device: torch.device, size: int, largest: int) -> None:
        hole = max(LEAST, largest) // PIN * PIN
        torch.cuda.empty_cache()  # or the blocks would lie in what is cached already
        segment = _block(device, size // PIN * PIN)
        del segment  # its memory stays, and the allocator cuts the blocks from it one after the other
        holes: list[torch.Tensor] = []
        self.pins: list[torch.Tensor] = []
        for _ in range(size // (hole + PIN)):
            holes.append(_block(device, hole))
            for _ in range(GAPS):  # gaps between tensors that were there before fit a pin better, so they are filled before the place behind the hole
                self.pins.append(_block(device, PIN))
                if self.pins[-1].data_ptr() == holes[-1].data_ptr() + hole:
                    break
        holes.clear()
        torch.cuda.empty_cache()  # gives back what the device can have: pages of the holes, where segments are expandable


def _block(device: torch.device, size: int) -> torch.Tensor:
    return torch.empty(size, dtype=torch.uint8, device=device)
