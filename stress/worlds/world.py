"""What a world is: memory of a given size, and a co-tenant that takes part of it."""

from __future__ import annotations

from typing import Protocol, Self

import torch

from elastic_mbs.memory import MemorySensor


class World(Protocol):
    """A device's memory during one run; a context manager that leaves nothing behind.

    ```
        capacity ─┬─ others    held by the co-tenant, now
                  └─ ours      what this process may hold: rest (model, gradients, optimizer) and what a step needs on top
    ```

    Attributes:
        kind: "budget" (counted tensors, exact), "shim" (the allocator itself fails), "rlimit" (the process limit), "cuda".
        device: where the model is trained.
        sensor: what ElasticMBS is to read; None where it finds its sensor by itself.
    """

    kind: str
    device: torch.device
    sensor: MemorySensor | None

    def __enter__(self) -> Self:
        """Opens it, without a limit yet."""

    def __exit__(self, *error: object) -> None:
        """Lifts every limit and ends the co-tenant."""

    def resize(self, capacity: int | None) -> None:
        """Sets how many bytes there are for all; None lifts the limit."""

    def occupy(self, held: int) -> None:
        """Has the co-tenant hold so many bytes: at once what is free, the rest as soon as it is."""

    def live(self) -> int:
        """Bytes this process holds now, as this world counts them."""

    def peak(self) -> int:
        """Most bytes it held since `reset_peak`."""

    def reset_peak(self) -> None:
        """Starts a new interval."""

    def failures(self) -> int:
        """Allocations that have failed so far."""
