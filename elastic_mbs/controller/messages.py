"""The messages between a call and the controller.

They are named tuples, because each call makes several of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple


def shape_class(elements: int) -> int:
    """Return the shape class of a sample with this many elements: floor(log2(elements))."""
    return elements.bit_length() - 1


class Key(NamedTuple):
    """The name of a track: one kind of call."""

    name: str  # of the loss function
    mode: str  # "train" or "eval"
    shape: int  # shape class of the samples

    def __str__(self) -> str:
        return f"{self.name} ({self.mode}, 2^{self.shape} elements per sample)"

    def nearest(self, others: Iterable[Key]) -> Key | None:
        """Return the kind of call of this name and mode with the nearest shape class, if any."""
        known = [other for other in others if other[:2] == self[:2]]
        # Of two classes as near, the one of the longer samples: memory can grow faster than their
        # length, never slower.
        return min(
            known, key=lambda other: (abs(other.shape - self.shape), -other.shape), default=None
        )


class Extent(NamedTuple):
    """The extent of a call's batch."""

    samples: int
    elements: int  # per sample
    largest: int  # the size at which memory is no limit, in samples


class Capacity(NamedTuple):
    """A memory reading: the bytes that this process could hold in all, free and reserved."""

    bytes: int
    at: float  # when it was taken, by the controller's clock


Reading = Callable[[], Capacity | None]
"""Returns the latest reading of the memory; None where there is none."""


def no_reading() -> None:
    """Return that there is no reading."""


class Decision(NamedTuple):
    """The controller's answer at the start of a call."""

    size: int  # micro-batch in samples: at most the batch, and aligned unless it is the whole batch
    learning: bool  # the call is to measure its peak
    wants_reading: bool = False  # with a newer memory reading the size could grow after this call


class CallOutcome(NamedTuple):
    """The measurements of a finished call."""

    samples: int  # length of the batch
    elements: int  # per sample
    pieces: int  # that committed
    peak: int | None  # most bytes allocated during the call; None where it was not measured
    # Peak reserved / peak allocated, at least 1. An upper bound where the allocator's cache held
    # something before the call.
    fragmentation: float
    seconds: float | None  # time of the whole call, where it is known
    retries: int  # of the allocator during the call
    ooms: int = 0  # failures during the call
    least_fragmentation: float | None = None  # a lower bound; None where `fragmentation` is exact
    lost: float = 0.0  # seconds that the failures cost
    fresh: bool = False  # the call had one piece, which made the gradients


class Move(NamedTuple):
    """A change of size between two calls."""

    before: int
    after: int
    reason: str  # "grow", "thrash", or "limit": back to the size before a failed growth
