"""The samples of a batch that still have to run: ranges, cut into pieces of the present size."""

from __future__ import annotations

from dataclasses import dataclass

from elastic_mbs.batch.counts import Counts
from elastic_mbs.batch.loss_terms import Weights
from elastic_mbs.batch.pieces import Costs, Partition, TokenBudget, partition

NO_LIMIT = 2**62  # a size above any batch


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
        budget: TokenBudget | None = None,
    ) -> None:
        """Begin with the whole batch.

        Args:
            counts: the loss terms of each sample.
            reduction: whether losses are means or sums.
            minimum: the smallest piece, in samples; 1 with a `budget`.
            align: pieces are multiples of it, in samples; 1 with a `budget`.
            costs: the elements of each sample; None where all are the same.
            budget: the most tokens of a piece; None where there is no limit. Needs `costs`.
        """
        self._counts = counts
        self._reduction = reduction
        self._minimum, self._align = minimum, align  # of a piece's length, in samples
        self._costs = costs
        self.budget = budget
        self._most = counts.n  # samples of a piece
        # The size at which the budget is the only limit, in samples.
        self.largest = counts.n if costs is None else costs.samples
        self._size = 0
        self._by_tokens: Partition = ()  # the batch, where the budget is the only limit
        self.restart()
        if costs is not None and budget is not None:
            self._by_tokens = self._cut(self._rests[0], NO_LIMIT)
            self.largest = max(costs.worth(start, stop) for start, stop in self._by_tokens)

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

    def _cut(self, rest: Range, size: int) -> Partition:
        start, stop, minimum, align = rest.start, rest.stop, self._minimum, self._align
        costs = self._costs
        if costs is None:
            return partition(start, stop, size, minimum=minimum, align=align)
        if self.budget is None:
            return costs.partition(
                start, stop, size, lambda at: self._most, minimum=minimum, align=align
            )
        if size >= self.largest:
            if len(rest) == self._most == self._counts.n and self._by_tokens:
                return self._by_tokens
            size = NO_LIMIT
        return self.budget.balanced(
            start,
            stop,
            lambda most: costs.partition(start, stop, size, lambda at: min(most(at), self._most)),
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
