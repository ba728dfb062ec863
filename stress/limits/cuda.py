"""The limit of a GPU: a cap on this process's share, and a co-tenant that takes the memory.

The co-tenant is another process.
"""

from __future__ import annotations

from functools import partial
from typing import Self

import torch

from elastic_mbs.errors import UsageError
from elastic_mbs.events import format_bytes

from . import simcuda
from .limit import MemoryLimit
from .neighbour import GRAIN, Neighbour

# share of the device that must be free: its co-tenant fills it, and other processes must not starve
# of that
MOSTLY_FREE = 0.75
# bytes of a block that is kept: the smallest that comes out of the allocator's large segments
PIN = 2 * 2**20
LEAST = 16 * 2**20  # bytes of the smallest hole: with smaller ones memory would be full of pins
# bytes that stay outside, at most: small tensors have segments of their own, of 2 MiB each
APART = 64 * 2**20
GAPS = 64  # free blocks between older tensors that pins may fall into


class CudaLimit(MemoryLimit):
    """The limit of a CUDA device.

    ```
        total ─┬─ outside    not to be had: of others, or beyond the capacity; held by the
               │             neighbour process
               ├─ held       the co-tenant's; held by the neighbour process, too
               └─ ours       reserved by torch's allocator, at most capacity less held
    ```

    A capacity alone is a memory fraction, which is exact. With a co-tenant, the neighbour process
    fills the device up to what is left to us, so that `cudaMalloc` itself fails. Where it is
    `shared`, another one of us trains there, too, and a `Confined` decides how much both have.
    """

    kind = "cuda"
    sensor = None  # NVML and the allocator's own statistics

    def __init__(self, device: torch.device | str = "cuda", *, shared: bool = False) -> None:
        super().__init__()
        self.device, self._shared = _with_index(device), shared
        self._neighbour: Neighbour | None = None
        self._wanted = 0  # bytes that it was made to hold
        self._largest: int | None = None
        self._board: Checkerboard | None = None
        self._failed_before = self._room = 0

    def __enter__(self) -> Self:
        """Check that the device is free enough.

        Raises:
            UsageError: others use it.
        """
        torch.cuda.init()
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(self.device)
        self._room = free + torch.cuda.memory_reserved(self.device)
        if not self._shared and free < MOSTLY_FREE * total:
            raise UsageError(
                f"{format_bytes(total - free)} of {self.device} are in use, and the stress tool's "
                "co-tenant fills a device to the brim: run it on an "
                "idle one, or leave it out: --kind budget"
            )
        self._failed_before = refusals(self.device)
        return self

    def lift(self) -> None:
        self._wanted = 0
        self._neighbour = self._largest = self._board = None
        torch.cuda.set_per_process_memory_fraction(1.0, self.device)
        torch.cuda.empty_cache()

    def resize(self, capacity: int | None) -> None:
        total = torch.cuda.mem_get_info(self.device)[1]
        if capacity is not None and capacity > total:
            raise UsageError(
                f"{format_bytes(capacity)} is more than {self.device} has ({format_bytes(total)})"
            )
        self.capacity, self._board = capacity, None
        # the fraction is asked when the allocator takes more, not for memory that it has cached
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction(
            1.0 if capacity is None else capacity / total, self.device
        )
        self.occupy(self._held)
        self.fragment(self._largest)

    def fragment(self, largest: int | None) -> None:
        """Break the memory up that the capacity leaves us, now and whenever that changes.

        Expandable segments make it whole again, see `expandable`.
        """
        self._largest, self._board = largest, None
        if largest is None or self.capacity is None:
            return
        torch.cuda.empty_cache()
        size = (
            self.capacity
            - self._held
            - torch.cuda.memory_reserved(self.device)
            - min(APART, largest // 2)
        )
        if size > 0:
            self._board = Checkerboard(self.device, size, largest)

    def expandable(self) -> bool:
        """Return True if the allocator's segments are expandable, by its own account."""
        return any(
            each.get("is_expandable", False) and each["device"] == self.device.index
            for each in torch.cuda.memory_snapshot()
        )

    def occupy(self, held: int) -> None:
        """Make the neighbour take the room that would leave us more than capacity less `held`."""
        self._held = held
        if self._neighbour is None:
            if not held:
                return
            self._neighbour = self._undo.enter_context(Neighbour(self.device))
        torch.cuda.empty_cache()  # nobody could take our allocator's reserve
        # it may have got more since it was last asked
        holds, self._wanted = self._neighbour.hold(self._wanted), 0
        if held:  # else the fraction is limit enough
            free, total = torch.cuda.mem_get_info(self.device)
            left = (total if self.capacity is None else self.capacity) - held
            self._wanted = (
                max(0, holds + free + torch.cuda.memory_reserved(self.device) - left)
                // GRAIN
                * GRAIN
            )
        self._neighbour.hold(self._wanted)

    def others(self) -> int:
        """Return the bytes that the co-tenant was made to hold.

        Where it is one of us, return the room that both have lost without our doing, see `share`.
        """
        if self._shared:
            return max(
                0,
                self._room
                - torch.cuda.mem_get_info(self.device)[0]
                - torch.cuda.memory_reserved(self.device),
            )
        return self._held

    def share(self, size: int) -> None:
        self._room = size

    def live(self) -> int:
        return torch.cuda.memory_allocated(self.device)

    def reserved(self) -> int:
        torch.cuda.empty_cache()
        return torch.cuda.memory_reserved(self.device)

    def peak(self) -> int:
        """Return the most bytes in live tensors since `reset_peak`.

        A runtime that has reset the allocator's own peak meanwhile makes it too low.
        """
        return torch.cuda.max_memory_allocated(self.device)

    def reset_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats(self.device)

    def failures(self) -> int:
        return refusals(self.device) - self._failed_before


def refusals(device: torch.device | None = None) -> int:
    """Return the requests that torch's allocator of a GPU has refused; 0 before CUDA is used."""
    return int(torch.cuda.memory_stats(device).get("num_ooms", 0))


class Checkerboard:
    """A long segment with a pin after each hole, so that memory is free, but in holes.

    The device does not get the segment back. With expandable segments the pages of the holes are
    given back, and mapped again in one piece: then nothing is fragmented.
    """

    def __init__(self, device: torch.device, size: int, largest: int) -> None:
        hole = max(LEAST, largest) // PIN * PIN
        block = partial(torch.empty, dtype=torch.uint8, device=device)
        torch.cuda.empty_cache()  # or the blocks would lie in cached memory
        segment = block(size // PIN * PIN)
        # its memory stays, and the allocator cuts the blocks from it one after the other
        del segment
        holes: list[torch.Tensor] = []
        self.pins: list[torch.Tensor] = []
        for _ in range(size // (hole + PIN)):
            holes.append(block(hole))
            # gaps between tensors that were there before fit a pin better, so they are filled
            # before the place behind the hole
            for _ in range(GAPS):
                self.pins.append(block(PIN))
                if self.pins[-1].data_ptr() == holes[-1].data_ptr() + hole:
                    break
        holes.clear()
        # gives back what the device can have: pages of the holes, where segments are expandable
        torch.cuda.empty_cache()


class Confined(Neighbour):
    """A GPU of which all others together can have a given number of bytes.

    The neighbour process holds the rest.
    """

    def __init__(self, device: torch.device | str = "cuda") -> None:
        super().__init__(_with_index(device))

    def leave(self, size: int | None, *, held: int = 0) -> None:
        """Leave so many bytes, with those that the others hold already; None leaves everything."""
        torch.cuda.empty_cache()  # our cache cannot be had by others
        self.hold(0)
        if size is not None:
            self.hold(
                max(0, torch.cuda.mem_get_info(self.device)[0] + held - size) // GRAIN * GRAIN
            )


def _with_index(device: torch.device | str) -> torch.device:
    device = torch.device(device)
    return device if device.index is not None else torch.device("cuda", torch.cuda.current_device())


def trouble() -> str | None:
    if simcuda.inside():
        return "this process sees simulated devices only: the limit 'simcuda' is theirs"
    return (
        None
        if torch.cuda.is_available()
        else "the limit 'cuda' needs a CUDA device, and torch sees none here"
    )
