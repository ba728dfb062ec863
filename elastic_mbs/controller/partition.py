"""A range of samples and a size → balanced pieces.

Pieces differ by at most one `align` unit instead of leaving a small tail: a tail would be one more shape to compile, would sit on the flat floor of
the device's speed, and would make the pieces before it larger than they need to be.
"""

from __future__ import annotations

from functools import lru_cache

from elastic_mbs.errors import UsageError


def aligned(size: int, align: int) -> int:
    """`size` rounded down to a multiple of `align`, and at least `align` (in samples)."""
    return max(align, size // align * align)


@lru_cache(maxsize=256)  # the batches of a run have few lengths, and a call asks three times
def piece_count(samples: int, size: int, *, minimum: int = 1, align: int = 1) -> int:
    """How many pieces `partition` cuts out of `samples` samples.

    Args:
        samples: length of the range.
        size: largest piece wanted; rounded down to a multiple of `align`.
        minimum: no piece is smaller, unless the range itself is; it wins over `size`.
        align: every piece but the last is a multiple of it.

    Raises:
        UsageError: a negative length, or a size, minimum or unit below 1.
    """
    if samples < 0:
        raise UsageError(f"a range of {samples} samples cannot be cut: stop must not be below start")
    for name, value in (("size", size), ("minimum", minimum), ("align", align)):
        if value < 1:
            raise UsageError(f"{name}={value} must be at least 1")
    if samples == 0:
        return 0
    if samples <= size:
        return 1
    units = _ceiling_division(samples, align)
    count = min(_ceiling_division(units, max(1, size // align)), max(1, samples // minimum))
    while count > 1 and _shortest(samples, units, count, align) < minimum:
        count -= 1
    return count


def longest(samples: int, size: int, *, minimum: int = 1, align: int = 1) -> int:
    """Length of the longest piece that `partition` cuts: what one call really has on the device at once."""
    count = piece_count(samples, size, minimum=minimum, align=align)
    if count <= 1:
        return samples
    short, extra = divmod(_ceiling_division(samples, align), count)
    if extra == 1:
        return samples - (count - 1) * short * align
    return (short + 1 if extra else short) * align


def first_length(samples: int, size: int, *, minimum: int = 1, align: int = 1) -> int:
    """Length of the first piece that `partition` cuts, without cutting the others."""
    count = piece_count(samples, size, minimum=minimum, align=align)
    if count <= 1:
        return samples
    short, extra = divmod(_ceiling_division(samples, align), count)
    longer = extra - 1 if samples % align else extra  # one of the longer pieces stands last then, see `partition`
    return min(samples, (short + 1 if longer > 0 else short) * align)


def smallest_size(samples: int, count: int, *, align: int = 1) -> int:
    """The smallest aligned size that needs no more than `count` pieces: any larger one costs memory and saves no time."""
    return _ceiling_division(_ceiling_division(samples, align), count) * align


@lru_cache(maxsize=8)  # few: of a long range in small pieces each takes megabytes
def partition(start: int, stop: int, size: int, *, minimum: int = 1, align: int = 1) -> tuple[tuple[int, int], ...]:
    """Cuts `[start, stop)` into balanced pieces that cover it once, in order.

    Lengths differ by at most `align`; all are multiples of it except the last, which takes the rest. Longer pieces come first where that is
    possible, so that an allocator's blocks serve all the following ones. No piece is longer than `size`, unless `align` or `minimum` asks for it.

    Args:
        start: first sample.
        stop: one past the last sample.
        size: largest piece wanted, in samples.
        minimum: no piece is smaller, unless the range itself is (then it is one piece). Where it conflicts with `size`, it wins.
        align: unit of the lengths, in samples.

    Returns:
        `(start, stop)` of every piece; empty for an empty range.

    Raises:
        UsageError: `stop` below `start`, or a size, minimum or unit below 1.
    """
    count = piece_count(stop - start, size, minimum=minimum, align=align)
    if count == 0:
        return ()
    units = _ceiling_division(stop - start, align)
    short, extra = divmod(units, count)
    lengths = [short + 1] * extra + [short] * (count - extra)
    if extra and (stop - start) % align:
        # The last unit is not full: the last piece must be one of the longer ones, or it would differ by more than one unit.
        lengths.append(lengths.pop(0))
    pieces = []
    for length in lengths:
        pieces.append((start, min(stop, start + length * align)))
        start = pieces[-1][1]
    return tuple(pieces)


def _ceiling_division(a: int, b: int) -> int:
    return -(-a // b)


def _shortest(samples: int, units: int, count: int, align: int) -> int:
    """Length of the shortest of `count` balanced pieces."""
    short, extra = divmod(units, count)
    missing = units * align - samples
    return short * align - (0 if extra else missing)
