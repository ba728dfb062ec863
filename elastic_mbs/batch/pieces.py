"""A range of samples and a size → balanced pieces: a small tail would be one more shape to compile, and would make the others larger than needed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache


def aligned(size: int, align: int) -> int:
    """`size` rounded down to a multiple of `align`, and at least `align` (in samples)."""
    return max(align, size // align * align)


@lru_cache(maxsize=256)  # the batches of a run have few lengths, and each call needs it three times
def piece_count(samples: int, size: int, *, minimum: int = 1, align: int = 1) -> int:
    """How many pieces `partition` cuts out of `samples` samples."""
    if samples == 0:
        return 0
    if samples <= size:
        return 1
    units = -(-samples // align)
    # missing in the last unit, which is in one of the shortest pieces where all are as long
    gap = units * align - samples
    count = min(-(-units // max(1, size // align)), max(1, samples // minimum))
    while count > 1 and units // count * align - (0 if units % count else gap) < minimum:
        count -= 1
    return count


@lru_cache(maxsize=256)
def longest(samples: int, size: int, *, minimum: int = 1, align: int = 1) -> int:
    """Length of the longest piece that `partition` cuts: the number of samples on the device at once."""
    pieces = partition(0, samples, size, minimum=minimum, align=align)
    return max(pieces[0][1], samples - pieces[-1][0]) if pieces else 0


def smallest_size(samples: int, count: int, *, align: int = 1) -> int:
    """The smallest aligned size that needs no more than `count` pieces: any larger one costs memory and saves no time."""
    return -(-samples // (align * count)) * align


@lru_cache(maxsize=8)  # few: of a long range in small pieces each takes megabytes
def partition(
    start: int, stop: int, size: int, *, minimum: int = 1, align: int = 1
) -> tuple[tuple[int, int], ...]:
    """Cuts `[start, stop)` into pieces of up to `size` samples; `align` and `minimum` win over it.

    Lengths differ by at most one `align`.
    """
    count = piece_count(stop - start, size, minimum=minimum, align=align)
    if count == 0:
        return ()
    short, extra = divmod(-((stop - start) // -align), count)
    # longer ones first: the allocator's blocks serve all that follow
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


@dataclass(frozen=True, eq=False)
class Costs:
    """The elements of each sample of a batch whose samples differ, in an order in which they fall: a piece costs its length times its first sample.

    A size m is to be read here as "what m samples of the longest take": a piece holds as many
    samples as cost no more, which are m of the longest and more of the shorter ones. So the first
    piece is the worst that a size means, m samples of as many elements as are modelled, and a
    failure is of as many as its piece was worth. The batch itself is worth `samples`: all its
    elements, without padding. A size of that many cuts a few pieces.
    """

    each: Sequence[int]

    @cached_property
    def samples(self) -> int:
        """How many of its longest sample the batch is worth, rounded up."""
        return -(-sum(self.each) // self.each[0])

    def worth(self, start: int, stop: int) -> int:
        """How many of the longest sample of the batch a piece is worth, rounded up."""
        return -(-(stop - start) * self.each[start] // self.each[0])

    def partition(
        self, start: int, stop: int, size: int, *, minimum: int = 1, align: int = 1, most: int
    ) -> tuple[tuple[int, int], ...]:
        """Cuts `[start, stop)` into pieces worth up to `size` and of up to `most` samples; `align` and `minimum`, in samples, win over both."""
        # Not more than the controller takes the longest piece to be, and exactly that where it is
        # the first: what is measured then belongs to it.
        limit = longest(self.samples, size, minimum=minimum, align=align) * self.each[0]
        least = -(-minimum // align) * align
        pieces = []
        while start < stop:
            length = max(least, aligned(min(limit // self.each[start], most), align))
            if stop - start < length + minimum:  # what is left would be too short for a piece
                longer = stop - start >= max(length + 1, least + minimum)
                length = aligned(stop - start - minimum, align) if longer else stop - start
            pieces.append((start, start + length))
            start += length
        return tuple(pieces)
