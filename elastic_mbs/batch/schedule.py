"""The samples of a batch that still have to run: ranges, cut into pieces of the present size."""

from __future__ import annotations

from dataclasses import dataclass

from elastic_mbs.batch.counts import Counts
from elastic_mbs.batch.loss_terms import Weights
from elastic_mbs.batch.pieces import Costs, partition


@dataclass(slots=True)
class Range:
    """Samples start:stop of the batch that still have to run."""

    start: int
    stop: int
    weights: Weights | None = None  # of a piece; None of a rest that is not cut yet

    def __len__(self) -> int:
        return self.stop - self.start


class Schedule:
    """The samples of one batch, handed out in pieces."""

    def __init__(
        self,
        counts: Counts,
        *,
        reduction: str = "mean",
        minimum: int = 1,
        align: int = 1,
        costs: Costs | None = None,
    ) -> None:
        self._counts = counts
        self._reduction = reduction
        self._minimum, self._align = minimum, align  # of a piece's length, in samples
        self._costs = costs  # None where all samples cost the same
        self._most = counts.n  # samples of a piece
        self._size = 0
        self.restart()

    def restart(self) -> None:
        """Drop all progress: the batch runs from its start."""
        self._rests = [Range(0, self._counts.n)]
        self._pieces: list[Range] = []  # of the rest that was cut last, the next piece at the end

    def next(self, size: int) -> Range | None:
        """Return the next piece, of at most `size` samples; None at the end."""
        if size != self._size:
            self._join()
            self._size = size
        if not self._pieces:
            if not self._rests:
                return None
            rest = self._rests.pop()
            weights, reduction = self._counts.weights, self._reduction
            for start, stop in reversed(self._cut(rest, size)):
                self._pieces.append(Range(start, stop, weights(start, stop, reduction)))
        return self._pieces.pop()

    @property
    def upcoming(self) -> Range | None:
        """The piece that `next` gives if the size stays; None where it is not cut yet."""
        return self._pieces[-1] if self._pieces else None

    def _cut(self, rest: Range, size: int) -> tuple[tuple[int, int], ...]:
        if self._costs is None:
            return partition(rest.start, rest.stop, size, minimum=self._minimum, align=self._align)
        return self._costs.partition(
            rest.start, rest.stop, size, minimum=self._minimum, align=self._align, most=self._most
        )

    def worth(self, piece: Range) -> int:
        """Return the size at which a piece is cut, in samples."""
        return len(piece) if self._costs is None else self._costs.worth(piece.start, piece.stop)

    def can_split(self, piece: Range, size: int) -> bool:
        return len(self._cut(piece, size)) > 1

    def halve(self, failed: Range) -> bool:
        """Halve a piece of short samples that failed at the smallest size; False for others.

        Its elements did not predict its memory, so its samples are bounded too.
        """
        if self._costs is None:
            return False
        self._most = max(1, len(failed) // 2)
        return self.can_split(failed, self._size)

    def push(self, failed: Range) -> None:
        """Put a piece back that has to run again, before all others."""
        self._join()
        self._rests.append(failed)

    def missing(self) -> list[Range]:
        """Return the ranges not handed out yet, in no order."""
        self._join()
        return list(self._rests)

    def __bool__(self) -> bool:
        return bool(self._pieces or self._rests)

    def _join(self) -> None:
        """Undo the last cut."""
        if self._pieces:
            self._rests.append(Range(self._pieces[-1].start, self._pieces[0].stop))
            self._pieces.clear()
