"""Cutting of a range of samples into pieces.

Pieces are balanced: a small tail would be one more shape to compile, and would make all other
pieces larger than needed.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate
from typing import Protocol

Partition = tuple[tuple[int, int], ...]
Most = Callable[[int], int]  # the most samples of a piece that begins at a sample


def aligned(size: int, align: int) -> int:
    """Return `size` rounded down to a multiple of `align`, and at least `align`."""
    return max(align, size // align * align)


@lru_cache(maxsize=256)  # the batches of a run have few lengths, and each call needs it three times
def piece_count(samples: int, size: int, *, minimum: int = 1, align: int = 1) -> int:
    """Return the number of pieces that `partition` cuts out of `samples` samples."""
    if samples == 0:
        return 0
    if samples <= size:
        return 1
    units = -(-samples // align)
    missing = units * align - samples  # in the last unit
    count = min(-(-units // max(1, size // align)), max(1, samples // minimum))

    def shortest(count: int) -> int:
        # Where all pieces have the same number of units, the last one is the shortest.
        return units // count * align - (0 if units % count else missing)

    while count > 1 and shortest(count) < minimum:
        count -= 1
    return count


@lru_cache(maxsize=256)
def longest(samples: int, size: int, *, minimum: int = 1, align: int = 1) -> int:
    """Return the length of the longest piece that `partition` cuts out of `samples` samples."""
    pieces = partition(0, samples, size, minimum=minimum, align=align)
    return max(pieces[0][1], samples - pieces[-1][0]) if pieces else 0


def smallest_size(samples: int, count: int, *, align: int = 1) -> int:
    """Return the smallest aligned size that cuts `samples` samples into at most `count` pieces.

    A larger size with the same count costs memory and saves no time.
    """
    return -(-samples // (align * count)) * align


@lru_cache(maxsize=8)  # few, because each takes megabytes for a long range in small pieces
def partition(start: int, stop: int, size: int, *, minimum: int = 1, align: int = 1) -> Partition:
    """Cut `[start, stop)` into pieces of up to `size` samples.

    Lengths differ by at most one `align`. Where they cannot all be kept, `align` and `minimum` win
    over `size`.
    """
    count = piece_count(stop - start, size, minimum=minimum, align=align)
    if count == 0:
        return ()
    short, extra = divmod(-((stop - start) // -align), count)
    # The longer ones come first: the blocks that the allocator gets for them serve all others.
    lengths = [short + 1] * extra + [short] * (count - extra)
    if extra and (stop - start) % align:
        # The last unit is not full: the last piece must be one of the longer ones, or it would
        # differ by more than one unit.
        lengths.append(lengths.pop(0))
    pieces = []
    for length in lengths:
        pieces.append((start, min(stop, start + length * align)))
        start = pieces[-1][1]
    return tuple(pieces)


class Costs(Protocol):
    """The elements of a batch whose samples differ in size.

    A size of m samples means the cost of m of the largest samples: a piece of smaller ones holds
    more for the same cost.
    """

    @property
    def each(self) -> Sequence[int]:
        """The elements of each sample."""

    @property
    def unit(self) -> int:
        """The elements of the largest sample."""

    @property
    def samples(self) -> int:
        """The cost of the batch, in units of its largest sample, rounded up."""

    def worth(self, start: int, stop: int) -> int:
        """Return the cost of a piece, in units of the largest sample, rounded up."""

    def example(self, size: int) -> tuple[int, int, float]:
        """Return the start and stop of a piece that costs about `size`, and what it costs."""

    def partition(
        self, start: int, stop: int, size: int, most: Most, *, minimum: int = 1, align: int = 1
    ) -> Partition:
        """Cut `[start, stop)` into pieces that cost up to `size`, with up to `most` samples each.

        `align` and `minimum`, in samples, win over both.
        """


@dataclass(frozen=True, eq=False)
class PaddedCosts:
    """The elements of each sample of a batch whose samples differ in length, the longest first.

    A piece costs its number of samples times the elements of its first sample, because its samples
    are padded to that one. The first piece is the most expensive; failures are recorded in units
    of the longest sample.
    """

    each: Sequence[int]

    @property
    def unit(self) -> int:
        return self.each[0]

    @cached_property
    def samples(self) -> int:
        """The cost of the batch without padding, in units of its longest sample, rounded up."""
        return -(-sum(self.each) // self.unit)

    def worth(self, start: int, stop: int) -> int:
        return -(-(stop - start) * self.each[start] // self.unit)

    def example(self, size: int) -> tuple[int, int, float]:
        return 0, size, size

    def partition(
        self, start: int, stop: int, size: int, most: Most, *, minimum: int = 1, align: int = 1
    ) -> Partition:
        # The controller takes the longest piece to have this cost. No piece costs more, and the
        # first one costs exactly this, so that its peak is recorded for the right size.
        limit = longest(self.samples, size, minimum=minimum, align=align) * self.unit
        return _pieces(
            start,
            stop,
            lambda at: min(limit // self.each[at], most(at)),
            minimum=minimum,
            align=align,
        )


@dataclass(frozen=True, eq=False)
class RowCosts:
    """The elements of each sample of a batch whose samples bring rows in unequal numbers.

    Nothing is padded: a piece costs the sum of its samples.
    """

    each: Sequence[int]

    @cached_property
    def unit(self) -> int:
        return max(self.each)

    @cached_property
    def _before(self) -> Sequence[int]:
        return [0, *accumulate(self.each)]

    @property
    def samples(self) -> int:
        return self.worth(0, len(self.each))

    def worth(self, start: int, stop: int) -> int:
        return -(-(self._before[stop] - self._before[start]) // self.unit)

    def example(self, size: int) -> tuple[int, int, float]:
        """Return the largest sample, with as many as fit after it, and then before it."""
        before, limit = self._before, size * self.unit
        start = self.each.index(self.unit)
        stop = bisect_right(before, before[start] + limit) - 1
        start = bisect_left(before, before[stop] - limit)
        return start, stop, (before[stop] - before[start]) / self.unit

    def partition(
        self, start: int, stop: int, size: int, most: Most, *, minimum: int = 1, align: int = 1
    ) -> Partition:
        limit = longest(self.samples, size, minimum=minimum, align=align) * self.unit
        before = self._before

        def fitting(at: int) -> int:
            return min(bisect_right(before, before[at] + limit) - 1 - at, most(at))

        return _pieces(start, stop, fitting, minimum=minimum, align=align)


def _pieces(start: int, stop: int, fitting: Most, *, minimum: int, align: int) -> Partition:
    """Cut `[start, stop)` into pieces of `fitting(start of the piece)` samples.

    `align` and `minimum` win.
    """
    least = -(-minimum // align) * align
    pieces = []
    while start < stop:
        length = max(least, aligned(fitting(start), align))
        if stop - start < length + minimum:  # the rest would be too short for a piece
            longer = stop - start >= max(length + 1, least + minimum)
            length = aligned(stop - start - minimum, align) if longer else stop - start
        pieces.append((start, start + length))
        start += length
    return tuple(pieces)


class Tokens(Protocol):
    """The tokens of a batch, by its samples in the order in which they are cut."""

    @property
    def lengths(self) -> Sequence[int]:
        """The tokens of each sample, without padding."""

    @property
    def longest(self) -> int:
        """The tokens of the longest sample."""

    def most(self, at: int, budget: int) -> int:
        """Return how many samples from `at` on have up to `budget` tokens as a piece.

        At least 1: a sample cannot be cut.
        """

    def best(self, start: int, stop: int, budget: int, overhead: float) -> Most:
        """Return how many samples to take from each on, so that pieces of a range cost least.

        A piece costs its tokens, and an overhead in tokens.
        """


@dataclass(frozen=True, eq=False)
class PaddedTokens:
    """Samples that are padded to the first one of their piece, which is the longest."""

    TRIED = 32  # ends of a piece that are compared, at most

    lengths: Sequence[int]  # never rising

    @property
    def longest(self) -> int:
        return self.lengths[0]

    def most(self, at: int, budget: int) -> int:
        return max(1, budget // self.lengths[at])

    def best(self, start: int, stop: int, budget: int, overhead: float) -> Most:
        """Return how many samples to take, by the best ends for all samples from the last on.

        The longer the first sample, the earlier is the best end, so the search is short.
        """
        samples = stop - start
        cost, ends = [0.0] * (samples + 1), [stop] * (samples + 1)
        for at in reversed(range(start, stop)):
            own = at - start
            length, last = self.lengths[at], min(ends[own + 1], at + self.most(at, budget))
            tried = range(last, at, -1 - (last - at) // self.TRIED)
            costs = [(end - at) * length + cost[end - start] for end in tried]
            least = min(costs)
            ends[own] = tried[costs.index(least)]
            cost[own] = least + overhead
        return lambda at: ends[at - start] - at


@dataclass(frozen=True, eq=False)
class RowTokens:
    """Samples that lie one after the other, without padding."""

    lengths: Sequence[int]

    @cached_property
    def longest(self) -> int:
        return max(self.lengths)

    @cached_property
    def _before(self) -> Sequence[int]:
        return [0, *accumulate(self.lengths)]

    def most(self, at: int, budget: int) -> int:
        return max(1, bisect_right(self._before, self._before[at] + budget) - 1 - at)

    def best(self, start: int, stop: int, budget: int, overhead: float) -> Most:
        """Return as many samples as fit: there is no padding, so the fewest pieces cost least."""
        return lambda at: self.most(at, budget)


@dataclass(frozen=True, eq=False)
class TokenBudget:
    """The most tokens of a piece, for one batch.

    A sample that is longer than the budget is a piece by itself.
    """

    FINE = 8  # pieces are balanced to this fraction of the budget
    # One piece more has to save this fraction of the budget in padding. It stands for a piece's
    # overhead, which is not measured: pieces under one budget are of nearly one size, so their
    # times do not tell it from the rest, and a cut by times would differ from run to run. Where the
    # true one is a quarter or four times as large, text takes 2 to 5 % longer than it could.
    OVERHEAD = 16

    tokens: Tokens
    budget: int

    @property
    def too_long(self) -> bool:
        """True if a sample is longer than the budget."""
        return self.tokens.longest > self.budget

    def holds(self, at: int, samples: int) -> bool:
        """Return whether so many samples from `at` on may be a piece."""
        return self.tokens.most(at, self.budget) >= samples

    def balanced(self, start: int, stop: int, cut: Callable[[Most], Partition]) -> Partition:
        """Return the pieces of a range under the smallest budget that makes no more of them.

        Args:
            start: the first sample of the range.
            stop: the sample after its last one.
            cut: cuts it by the most samples that a piece may have, and perhaps by other limits.
        """
        overhead = self.budget / self.OVERHEAD
        found = cut(self.tokens.best(start, stop, self.budget, overhead))
        low, high = self._too_small(start, stop, len(found)), self.budget  # `found` is under `high`
        step = max(1, self.budget // self.FINE)
        while high - low > step:
            middle = (low + high) // 2
            pieces = cut(self.tokens.best(start, stop, middle, overhead))
            if len(pieces) > len(found):
                low = middle
            else:
                high, found = middle, pieces
        return found

    def _too_small(self, start: int, stop: int, pieces: int) -> int:
        """Return a budget under which a range does not fit in so many pieces; 0 for none known."""
        lengths = self.tokens.lengths[start:stop]
        each = (sum(lengths) - 1) // pieces
        # A longer sample is a piece by itself under any budget, and takes more than its share.
        return each if max(lengths) <= each else 0
