"""The failures of one call so far, and what is remembered about them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch.utils.weak import TensorWeakRef

from elastic_mbs.errors import ReplayUnsafeError


class History:
    """The failures of one call so far, and the caps on them."""

    def __init__(self, wait_for_memory: float) -> None:
        self.failures = 0
        self.since_progress = 0
        self.at_floor = 0
        self.stuck: int | None = None  # first sample of the piece that failed at the floor and has not committed yet
        self.restarts = 0
        self.replayed_samples = 0
        self.masked = False
        self.touched = False  # something of this call may be in a gradient that was there before it
        self.edited = False  # an earlier piece of this call edited its samples in place
        self.wait_left = wait_for_memory
        self._marked: dict[int, TensorWeakRef] = {}

    def progress(self, start: int, stop: int) -> None:
        """The samples from `start` to `stop` committed."""
        self.since_progress = 0
        if self.stuck is not None and start <= self.stuck < stop:
            self.stuck, self.at_floor = None, 0

    def stuck_at(self, start: int) -> int:
        """The piece that begins at `start` failed and cannot be cut; returns how often it has.

        Others that commit in between, because the batch is replayed from its start, do not count as progress.
        """
        self.at_floor = self.at_floor + 1 if self.stuck == start else 1
        self.stuck = start
        return self.at_floor

    def mark(self, leaves: Iterable[torch.Tensor]) -> frozenset[int]:
        """The ids of leaves that a failed attempt committed to. Weak: a step may make leaves of its own, which end with it."""
        found = {id(leaf): TensorWeakRef(leaf) for leaf in leaves}
        self._marked.update(found)
        return frozenset(found)

    def is_marked(self, leaf: torch.Tensor, ids: frozenset[int]) -> bool:
        """Whether `leaf` is among them, and not another tensor that got the id of one that is gone."""
        return id(leaf) in ids and self._marked[id(leaf)]() is leaf

    def check_guests(self, guests: Sequence[torch.Tensor]) -> None:
        """Looks at leaves that the census met for the first time in this call.

        Raises:
            ReplayUnsafeError: one of them holds a gradient, and the batch is being replayed from its start: what it holds may be from the dropped
                attempts.
        """
        full = [tuple(leaf.shape) for leaf in guests if leaf.grad is not None]
        if self.restarts and full:
            raise ReplayUnsafeError(
                f"a leaf of shape {full[0]} outside the model appeared in the middle of the batch, so its gradient may hold samples that are now "
                "being replayed: call zero_grad() on it and run the batch again, or give its module in model=[...]"
            )
