"""What the controller is told about a call, and what it answers: plain values, nothing else.

Tuples and not frozen dataclasses: several are made and hashed in every call.
"""

from __future__ import annotations

from typing import NamedTuple

from elastic_mbs.errors import UsageError


def shape_class(elements: int) -> int:
    """The class of a sample with that many elements: floor(log2(elements)).

    Raises:
        UsageError: `elements` below 1.
    """
    if elements < 1:
        raise UsageError(f"elements={elements} per sample must be at least 1")
    return elements.bit_length() - 1


class Key(NamedTuple):
    """Which track a call belongs to.

    Attributes:
        name: of the loss function.
        mode: "train" or "eval".
        shape: shape class of the samples, see `shape_class`.
    """

    name: str
    mode: str
    shape: int

    def __str__(self) -> str:
        return f"{self.name} ({self.mode}, 2^{self.shape} elements per sample)"


class Capacity(NamedTuple):
    """Bytes that this process could hold in all (what is free plus what it has reserved), and when that was read, by the controller's clock."""

    bytes: int
    at: float


class Plan(NamedTuple):
    """How to run a call.

    Attributes:
        size: micro-batch in samples; never above the batch, a multiple of the unit unless it is the whole batch.
        epoch: of the size; the call's observation carries it.
        probing: `piece_done` may raise the size after each piece.
        learning: peaks are wanted in this call.
    """

    size: int
    epoch: int
    probing: bool
    learning: bool


class Observation(NamedTuple):
    """What a finished call saw.

    Attributes:
        size: micro-batch in samples that its pieces were cut with (the last one, if it changed).
        epoch: from its plan.
        samples: length of the batch.
        elements: elements per sample.
        pieces: pieces that committed.
        peak: highest allocation during the call in bytes, or None if it was not measured or is not to be trusted.
        fragmentation: peak reserved / peak allocated; at least 1. An upper bound, where something was cached before.
        seconds: time of the whole call, or None.
        retries: allocator retries during the call.
        ooms: failures during the call.
        least_fragmentation: a lower bound of `fragmentation`, or None where that is exact.
    """

    size: int
    epoch: int
    samples: int
    elements: int
    pieces: int
    peak: int | None
    fragmentation: float
    seconds: float | None
    retries: int
    ooms: int
    least_fragmentation: float | None = None


class Move(NamedTuple):
    """A change of size at a boundary: "grow", "thrash", or "limit" (back to the size before a growth that failed in this call)."""

    before: int
    after: int
    reason: str
