"""What a world is: memory of a given size, and a co-tenant that takes part of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Protocol, Self

import torch

from elastic_mbs.memory import MemorySensor


class MemoryLimit(Protocol):
    """A device's memory during one run; a context manager that leaves nothing behind.

    ```
        capacity ─┬─ others    held by the co-tenant, now
                  └─ ours      what this process may hold: rest (model, gradients, optimizer) and what a step needs on top
    ```

    Attributes:
        kind: "budget" (counted tensors, exact), "shim" (the allocator itself fails), "rlimit" (the process limit), "cuda".
        device: where the model is trained.
        exact: whether `live`, `peak` and the moment of a failure are the same in every run.
    """

    kind: str
    device: torch.device
    exact: bool

    @property
    def sensor(self) -> MemorySensor | None:
        """What ElasticMBS is to read, as sensor and as meter; None where it finds both by itself."""

    def __enter__(self) -> Self:
        """Opens it, without a limit yet."""

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Lifts every limit and ends the co-tenant."""

    def warm(self, run: Callable[[int], object], sizes: Iterable[int]) -> None:
        """Runs a piece of each size once, in the worlds where a first time under pressure could end the process.

        Args:
            run: runs one piece of the given size, forward and backward.
            sizes: those that may be tried under the limit.
        """

    def resize(self, capacity: int | None) -> None:
        """Sets how many bytes there are for all; None lifts the limit."""

    def fragment(self, largest: int | None) -> None:
        """Lets single allocations above `largest` bytes fail, whatever is free; None ends that.

        Raises:
            UsageError: this world cannot.
        """

    def occupy(self, held: int) -> None:
        """Has the co-tenant hold so many bytes: at once what is free, the rest as soon as it is."""

    def others(self) -> int:
        """Bytes that are not ours to have: what the co-tenant holds now, or waits for where it cannot be told apart."""

    def live(self) -> int:
        """Bytes this process holds now, as this world counts them."""

    def peak(self) -> int:
        """Most bytes it held since `reset_peak`."""

    def reset_peak(self) -> None:
        """Starts a new interval."""

    def failures(self) -> int | None:
        """Allocations that have failed so far in this process; None where nobody counts them."""
