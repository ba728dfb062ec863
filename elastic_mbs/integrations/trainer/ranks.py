"""A trainer's piece on one of several ranks: its weight, and no exchange with the others."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def counting_alone(args: Any) -> Iterator[None]:
    """Keep the trainer from counting the items of all ranks in a block: it would gather.

    Args:
        args: the trainer's arguments.
    """
    flags, name = vars(args), "average_tokens_across_devices"
    before = flags[name]
    flags[name] = False
    try:
        yield
    finally:
        flags[name] = before


def share_of_items(items: Any, num_items: Any, ranks: int, *, everywhere: bool) -> float:
    """Return the weight of a piece's loss in the sum over the ranks, where items are counted.

    DDP takes the mean over the ranks. Where the items of all ranks were counted, the trainer
    multiplies the loss by their number.

    Args:
        items: of the piece.
        num_items: of the step's batches.
        ranks: how many there are.
        everywhere: they are the items of all ranks.
    """
    if not items:
        return 0.0
    return float(items) / float(num_items) / (1 if everywhere else ranks)


def share_of_counts(count: Any, own: Any, steps: int, ranks: int) -> float:
    """Return the weight of a piece's loss in the sum over the ranks, where no items are counted.

    Args:
        count: of the piece.
        own: of this rank's batch.
        steps: batches that make a step.
        ranks: how many there are.
    """
    return float(count) / float(own) / steps / ranks if own else 0.0
