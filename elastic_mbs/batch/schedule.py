"""What of a batch still has to run: ranges of samples, cut into pieces in one go, each with its weight.

The cut follows the size of the moment: where that has changed, what is left is put together again and cut anew. A whole range is cut at once and not
piece by piece between two backwards: next to real work every line of Python comes from memory, not from a cache, and costs three times as much.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from elastic_mbs.batch.counts import Counts
from elastic_mbs.controller.partition import partition

Weights = Mapping[str | None, float]
"""Weight of each loss of a piece, by the name of its count; a single loss goes by None."""


@dataclass(slots=True)
class Range:
    """Samples start:stop of the batch that still have to be run.

    Attributes:
        committed: ids of the leaves that they have contributed to already, in an attempt that failed half-way.
        weights: of a piece; None for a range that is not cut yet, and for a piece in which nothing counts.
        data: the samples, where they were cut with the range.
    """

    start: int
    stop: int
    committed: frozenset[int] = frozenset()
    weights: Weights | None = None
    data: Any = None

    def __len__(self) -> int:
        return self.stop - self.start


class Schedule:
    """The samples of one batch, handed out in pieces.

    Args:
        counts: of the batch.
        reduction: "mean" or "sum", see `Counts.weights`.
        minimum: smallest piece, in samples.
        align: unit of their lengths, in samples.
        pieces: cuts the batch itself at several (start, stop), or gives nothing where each piece is better cut when its turn comes.

    Attributes:
        skipped: ranges that were not handed out, because nothing in them counts.
    """

    def __init__(
        self,
        counts: Counts,
        *,
        reduction: str = "mean",
        minimum: int = 1,
        align: int = 1,
        pieces: Callable[[Sequence[tuple[int, int]]], Sequence[Any]] = lambda bounds: (),
    ) -> None:
        self._counts = counts
        self._reduction = reduction
        self._minimum, self._align = minimum, align
        self._data = pieces
        self._size = 0
        self._rests: list[Range] = []
        self._pieces: list[Range] = []  # of the range that was cut last; the next one stands last
        self.skipped: list[tuple[int, int]] = []
        self.restart()

    def restart(self) -> None:
        """Forgets what was handed out: the batch runs from its start."""
        self._rests = [Range(0, self._counts.n)]
        self._pieces.clear()
        self.skipped.clear()

    def next(self, size: int) -> Range | None:
        """The next piece, of at most `size` samples; None at the end."""
        while True:
            if size != self._size:
                self._join()
                self._size = size
            if not self._pieces:
                if not self._rests:
                    return None
                self._cut(self._rests.pop())
            piece = self._pieces.pop()
            if piece.weights is not None:
                return piece
            self.skipped.append((piece.start, piece.stop))  # its loss would be 0/0, and NaN × 0 is NaN

    def push(self, failed: Range) -> None:
        """Puts a piece back that has to run again, before all others."""
        self._join()
        self._rests.append(failed)

    def missing(self) -> list[Range]:
        """What was not handed out yet, in no order."""
        self._join()
        return list(self._rests)

    def __bool__(self) -> bool:
        return bool(self._pieces or self._rests)

    def _cut(self, rest: Range) -> None:
        bounds = partition(rest.start, rest.stop, self._size, minimum=self._minimum, align=self._align)
        weights = self._counts.weights_of(bounds, reduction=self._reduction)
        data = self._data(bounds) or (None,) * len(bounds)
        self._pieces = [Range(*bound, rest.committed, *both) for bound, *both in zip(bounds, weights, data, strict=True)]
        self._pieces.reverse()

    def _join(self) -> None:
        """Undoes the last cut."""
        if self._pieces:
            self._rests.append(Range(self._pieces[-1].start, self._pieces[0].stop, self._pieces[0].committed))
            self._pieces.clear()
