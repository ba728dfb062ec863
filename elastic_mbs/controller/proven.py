"""The sizes that have run clean, each with the memory that it did so with."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from elastic_mbs.controller.saved import checked


class Proven:
    """Pairs of elements and capacity in bytes: pieces of so many elements ran clean with so much.

    A pair that another one says more than is dropped, so both rise together. One pair would not
    do: where memory has fallen, the size that fits into less of it is known to work, too.
    """

    MOST = 8  # the pairs with the most elements are kept

    def __init__(self) -> None:
        self._pairs: list[tuple[int, int]] = []

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return iter(self._pairs)

    def add(self, elements: int, capacity: int) -> None:
        """Take a clean run; of one size the latest counts."""
        if any(e > elements and c <= capacity for e, c in self._pairs):
            return
        others = [(e, c) for e, c in self._pairs if e > elements or (e < elements and c < capacity)]
        self._pairs = sorted([*others, (elements, capacity)])[-self.MOST :]

    def needed(self, elements: int) -> int | None:
        """Return the least capacity with which this many elements ran clean; None if never."""
        return min((c for e, c in self._pairs if e >= elements), default=None)

    def largest(self, capacity: float) -> int:
        """Return the most elements that ran clean with this capacity or less; 0 if none."""
        return max((e for e, c in self._pairs if c <= capacity), default=0)

    def disprove(self, beyond: int, capacity: float) -> None:
        """Drop what more than `beyond` elements have shown with this capacity or less."""
        self._pairs = [(e, c) for e, c in self._pairs if e <= beyond or c > capacity]

    def state(self) -> list[list[int]]:
        """Return everything that is known, as JSON."""
        return [list(pair) for pair in self._pairs]

    @classmethod
    def restored(cls, state: Any) -> Proven:
        """Make what `state()` describes; TypeError or ValueError where it is malformed."""
        proven = cls()
        for elements, capacity in state:
            proven.add(checked(elements, int, 1), checked(capacity, int))
        return proven
