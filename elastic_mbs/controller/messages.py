"""What a call and the controller exchange: its key, its plan, what came of it, and the move that follows. Tuples, because each call makes several."""

from __future__ import annotations

from typing import NamedTuple


def shape_class(elements: int) -> int:
    """The class of a sample with that many elements: floor(log2(elements))."""
    return elements.bit_length() - 1


class Key(NamedTuple):
    """Names the track that a call belongs to."""

    name: str  # of the loss function
    mode: str  # "train" or "eval"
    shape: int  # shape class of the samples

    def __str__(self) -> str:
        return f"{self.name} ({self.mode}, 2^{self.shape} elements per sample)"


class Capacity(NamedTuple):
    """Bytes that this process could hold in all (what is free plus what it has reserved), and when that was read, by the controller's clock."""

    bytes: int
    at: float


class Decision(NamedTuple):
    """How to run a call."""

    # micro-batch in samples; never above the batch, and aligned unless it is the whole batch
    size: int
    learning: bool  # peaks are wanted in this call
    # with a newer reading of the memory its end could be followed by a growth
    wants_reading: bool = False


class CallOutcome(NamedTuple):
    """What a finished call has measured."""

    samples: int  # length of the batch
    elements: int  # per sample
    pieces: int  # pieces that committed
    # highest allocation during the call in bytes; None if it was not measured or is not reliable
    peak: int | None
    # peak reserved / peak allocated; at least 1. An upper bound, where something was cached before
    fragmentation: float
    seconds: float | None  # time of the whole call, where it is known
    retries: int  # allocator retries during the call
    ooms: int = 0  # failures during the call
    # a lower bound of `fragmentation`; None where that is exact
    least_fragmentation: float | None = None
    lost: float = 0.0  # seconds that the failures have cost
    fresh: bool = False  # its only piece has made the gradients


class Move(NamedTuple):
    """A change of size at a boundary: "grow", "thrash", or "limit" (back to the size before a growth that failed in this call)."""

    before: int
    after: int
    reason: str
