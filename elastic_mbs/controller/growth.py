"""The rules of growth: when a size grows, how far, and what is left of it after a failure.

A size is always the smallest for its number of pieces, so that a run has few shapes.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable

from elastic_mbs.batch.pieces import smallest_size
from elastic_mbs.controller.messages import Capacity, Extent
from elastic_mbs.controller.policy import Limits, Policy
from elastic_mbs.controller.track import WHOLE, Ceiling, Track, Trial

# With one size measured, the next one is larger by at least this factor: else noise would decide
# the slope between them.
EXPLORE = 1.0625


class Margin:
    """The fraction of the capacity that stays free.

    Where the allocator reserves no more than it hands out, it is the largest recent fall from one
    reading to the next, and at least `LEAST`.

    Args:
        most: the largest margin. A larger fall is a co-tenant's visit, which no margin covers.
    """

    LEAST = 0.01
    RECENT = 16  # readings

    def __init__(self, most: float) -> None:
        self._most = most
        self._falls: deque[float] = deque(maxlen=self.RECENT)
        self._last: Capacity | None = None

    def follow(self, capacity: Capacity | None) -> None:
        """Take a reading; one that is not newer than the last changes nothing."""
        last = self._last
        if capacity is None or (last is not None and capacity.at <= last.at):
            return
        if last is not None and last.bytes:
            fall = 1 - capacity.bytes / last.bytes
            self._falls.append(fall if fall <= self._most else 0.0)
        self._last = capacity

    def budget(self, track: Track, capacity: Capacity) -> float:
        """Return the bytes that the peak allocation may reach."""
        margin = min(self._most, max(self.LEAST, *self._falls, 0.0))
        if track.fragmentation > 1:  # blocks are reserved, and the next piece can need one more
            margin = self._most
        return capacity.bytes * (1 - margin) / track.fragmentation


def is_due(track: Track, limits: Limits, policy: Policy, capacity: Capacity) -> bool:
    """Return True after enough clean calls at this size.

    `patience` calls are enough. If a larger size is already proven or measured, one call plus the
    jitter is.
    """
    if not policy.grow:
        return False
    if track.clean >= track.patience:
        return True
    samples, elements = track.expected()
    known = max(
        track.proven.largest(capacity.bytes * (1 + policy.changed)),
        track.memory.at(elements).largest_observed,
    )
    jitter = track.patience - policy.patience
    return known > limits.longest(samples, track.size) * elements and track.clean > jitter


def next_size(
    track: Track, limits: Limits, policy: Policy, capacity: Capacity, available: float
) -> int | None:
    """Return the size to grow to, in samples; None where no larger size is known to be better.

    The new size is below the ceilings. It is one whose peak is predicted to fit in `available`
    bytes, at most `STRIDE` times the present size; or one that has run clean with this capacity.
    It needs fewer pieces than the present one, and saves at least `min_gain` of the time, where
    the time is known. The whole batch needs to save none: a batch that fits is not split.
    """
    samples, elements = track.expected()  # the size must fit for all recent calls
    count = limits.pieces(samples, track.size)
    if count == 1:
        return None
    ceiling = min(track.ceilings, key=lambda each: (each.limit, each.elements), default=None)
    below = limits.clamp(_furthest(track, limits) // elements)
    proven = limits.clamp(track.proven.largest(capacity.bytes * (1 + policy.changed)) // elements)
    if ceiling is not None:  # the one that binds most
        below = min(below, ceiling.limit // elements)
        proven = min(proven, ceiling.limit // elements)
    room = max(proven, _room_in_memory(track, limits, available, below))
    if room <= track.size or limits.pieces(samples, room) >= count:
        return None
    fewest = limits.pieces(samples, room)
    gain = track.time.gain(samples * elements / count, samples * elements / fewest)
    whole_again = limits.pieces(samples, proven) == 1
    if gain is not None and gain < policy.min_gain and not whole_again:
        return None
    if ceiling is not None:
        fewest = max(fewest, _pieces_halfway(track, limits, ceiling, proven))
    target = smallest_size(samples, fewest, align=limits.align)
    return target if track.size < target <= room else None


def _furthest(track: Track, limits: Limits) -> int:
    """Return the most elements that a growth may reach at once, by the patience so far."""
    samples, elements = track.expected()
    if track.clean < track.patience:  # only back to a size that is known
        return track.memory.at(elements).largest_observed
    return track.memory.STRIDE * limits.longest(samples, track.size) * elements


def _pieces_halfway(track: Track, limits: Limits, ceiling: Ceiling, proven: int) -> int:
    """Return the fewest pieces that bisection allows: half-way from this size to the ceiling.

    After a failed growth nothing is left to bisect: the ceiling's limit is the size before it.
    """
    if ceiling.limit != ceiling.elements - 1:
        return 1
    samples, elements = track.expected()
    present = limits.longest(samples, track.size) * elements
    middle = max(proven, (present + ceiling.elements) // 2 // elements)
    return min(limits.pieces(samples, middle), limits.pieces(samples, track.size) - 1)


def smaller_size(
    track: Track, batch: Extent, longest: int, limits: Limits, available: float
) -> int | None:
    """Return the largest size predicted to fit in `available` bytes, where `longest` does not.

    Args:
        track: the measurements.
        batch: the batch to cut.
        longest: samples of a piece that has failed, or would be run.
        limits: the sizes that are allowed.
        available: bytes that the peak may reach.

    Returns:
        The size in samples. None where a piece of `longest` samples is predicted to fit, nothing is
        predicted, or no size fits.
    """
    samples, elements, _ = batch
    most, curve = longest * elements, track.memory.at(elements)
    if curve.predict(most) is None or curve.fits(most, available):
        return None
    room = curve.largest(available, most - 1) // elements
    if room < limits.floor:
        return None
    return smallest_size(samples, limits.pieces(samples, room), align=limits.align)


def is_squeezed(track: Track, trial: Trial, elements: int, available: float) -> bool:
    """Return True where not even the size before a growth is predicted to fit.

    From one size measured nothing is known about smaller ones.
    """
    curve = track.memory.at(elements)
    return curve.slope is not None and not curve.fits(trial.elements, available)


def size_of_call(
    track: Track, batch: Extent, limits: Limits, budget: Callable[[], float | None]
) -> tuple[int, int]:
    """Return the size for a call, and the length of its longest piece.

    Samples longer than others before them get the largest size that they are predicted to fit in
    with. The size of the track stays as it is.

    Args:
        track: the measurements, and the size.
        batch: the batch of the call.
        limits: the sizes that are allowed.
        budget: returns the bytes that the peak may reach; None where they do not count.
    """
    samples, elements, largest = batch
    size, length = track.size_below_ceilings(limits, samples, elements, largest)
    if not track.memory.is_new(length * elements, elements):
        return size, length
    available = budget()
    fitting = None if available is None else smaller_size(track, batch, length, limits, available)
    if fitting is None:
        return size, length
    size = min(size, limits.clamp(fitting))
    return size, limits.longest(samples, size)


def first_size(
    near: Track, batch: Extent, limits: Limits, budget: Callable[[], float | None]
) -> int:
    """Return the first size of a track: as many elements as the track of another length has.

    It is smaller where the measurements of that track say that they do not fit. The arguments are
    those of `size_of_call`.
    """
    size = min(WHOLE, near.size * near.expected()[1] // batch.elements)
    available = budget()
    if available is None:
        return size
    longest = limits.longest(batch.samples, min(batch.largest, limits.clamp(size)))
    fitting = smaller_size(near, batch, longest, limits, available)
    return size if fitting is None else min(size, fitting)


def _room_in_memory(track: Track, limits: Limits, available: float, below: int) -> int:
    """Return the largest size up to `below` that is expected to fit; 0 if none is.

    Sizes with as many pieces as the present one do not count.
    """
    samples, elements = track.expected()
    curve = track.memory.at(elements)
    measured = curve.largest_observed
    if curve.slope is not None or 0 < below * elements <= measured:
        fewer = limits.pieces(samples, track.size) - 1
        least = smallest_size(samples, fewer, align=limits.align)
        # Asked first, because where memory limits the size the answer is no in every call.
        if not curve.fits(least * elements, available):
            return 0
        return curve.largest(available, below * elements) // elements
    if not measured:
        return 0 if track.ceilings else below
    return _first_step(track, limits, available, below)


def _first_step(track: Track, limits: Limits, available: float, below: int) -> int:
    """Return the size to grow to where only one size was measured; 0 for none.

    While the curve is a line, a peak proportional to the size is an upper bound. Where that allows
    no growth, but the measured peak fits, the smallest step that gives a slope is tried: at worst
    it costs one failure.
    """
    samples, elements = track.expected()
    curve = track.memory.at(elements)
    measured = curve.largest_observed
    peak = curve.predict(measured) or 0.0
    if peak > available:
        return 0
    present = limits.longest(samples, track.size)
    count = limits.pieces(samples, present)
    proportional = int(measured * available / peak) // elements if peak else below
    if proportional > present and limits.pieces(samples, proportional) < count:
        return min(below, proportional)
    fewer = limits.pieces(samples, math.ceil(EXPLORE * present))
    return min(below, smallest_size(samples, min(count - 1, fewer), align=limits.align))
