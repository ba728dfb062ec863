"""When a size grows, and how far, and what a failure leaves: always the smallest size for its number of pieces, so that there are few shapes."""

from __future__ import annotations

import math
from collections import deque

from elastic_mbs.batch.pieces import smallest_size
from elastic_mbs.controller.messages import Capacity
from elastic_mbs.controller.policy import Limits, Policy
from elastic_mbs.controller.track import RunningCall, Track

# while one size only was measured, the next one must be this much larger, or noise would decide the
# slope between them
EXPLORE = 1.0625


class Margin:
    """The fraction of the capacity that stays free: where bytes are counted, as much as readings have fallen lately from one to the next.

    Args:
        most: of it. A larger fall is a co-tenant's visit, which no margin covers.
    """

    LEAST = 0.01
    RECENT = 16  # readings

    def __init__(self, most: float) -> None:
        self._most = most
        self._falls: deque[float] = deque(maxlen=self.RECENT)
        self._last: Capacity | None = None

    def follow(self, capacity: Capacity | None) -> None:
        """Takes a reading; one that was taken before says nothing new."""
        last = self._last
        if capacity is None or (last is not None and capacity.at <= last.at):
            return
        if last is not None and last.bytes:
            fall = 1 - capacity.bytes / last.bytes
            self._falls.append(fall if fall <= self._most else 0.0)
        self._last = capacity

    def budget(self, track: Track, capacity: Capacity) -> float:
        """Bytes that the peak allocation can reach: the margin stays free, and the allocator reserves more than it hands out."""
        margin = min(self._most, max(self.LEAST, *self._falls, 0.0))
        if track.fragmentation > 1:  # it reserves in blocks, and the next piece can need one more
            margin = self._most
        return capacity.bytes * (1 - margin) / track.fragmentation


def is_due(track: Track, limits: Limits, policy: Policy, capacity: Capacity) -> bool:
    """When: after `patience` clean calls at this size.

    One call and the jitter are enough where a larger size is proven, or was measured.
    """
    if not policy.grow:
        return False
    if track.clean >= track.patience:
        return True
    samples, elements = track.expected()
    known = max(track.proven_with(capacity, policy.changed), track.memory.largest_observed)
    return (
        known > limits.longest(samples, track.size) * elements
        and track.clean >= track.patience - policy.patience + 1
    )


def next_size(
    track: Track, limits: Limits, policy: Policy, capacity: Capacity, available: float
) -> int | None:
    """How far: the size to grow to, in samples, or None when the present one is the best that is known to be possible.

    At most the double (any, where the peak is planned), below the ceilings, with a peak that is
    predicted to fit; or at once to what has run clean with as much memory. Fewer pieces than now,
    and a gain of time not known to be too small. `available` bytes are what the peak can reach.
    """
    samples, elements = track.expected()  # a size must fit for all recent calls
    count = limits.pieces(samples, track.size)
    if count == 1:
        return None
    present = limits.longest(samples, track.size)
    far = (
        track.memory.STRIDE * present
        if track.clean >= track.patience
        else track.memory.largest_observed // elements
    )
    room, proven = (
        limits.clamp(far),
        limits.clamp(track.proven_with(capacity, policy.changed) // elements),
    )
    # the one that binds most
    ceiling = min(track.ceilings, key=lambda each: (each.limit, each.elements), default=None)
    if ceiling is not None:
        room, proven = (min(size, ceiling.limit // elements) for size in (room, proven))
    least = smallest_size(samples, count - 1, align=limits.align)
    room = max(proven, _room_in_memory(track, limits, samples, elements, available, least, room))
    if room <= track.size or limits.pieces(samples, room) >= count:
        return None
    fewest = limits.pieces(samples, room)
    gain = track.time.gain(samples * elements / count, samples * elements / fewest)
    if gain is not None and gain < policy.min_gain:
        return None
    # sizes between the last good one and this one are still open
    if ceiling is not None and ceiling.limit == ceiling.elements - 1:
        middle = max(proven, (present * elements + ceiling.elements) // 2 // elements)
        fewest = max(fewest, min(limits.pieces(samples, middle), count - 1))
    target = smallest_size(samples, fewest, align=limits.align)
    return target if track.size < target <= room else None


def size_after_failure(
    track: Track, call: RunningCall, attempted: int, limits: Limits, available: float
) -> int | None:
    """The largest size that is predicted to fit in `available` bytes, where so few explain the failure of `attempted` samples; else None."""
    most = attempted * call.elements
    if track.memory.predict(most) is None or track.memory.fits(most, available):
        return None
    room = track.memory.largest(available, most - 1) // call.elements
    return (
        smallest_size(call.samples, limits.pieces(call.samples, room), align=limits.align)
        if room >= limits.floor
        else None
    )


def _room_in_memory(
    track: Track,
    limits: Limits,
    samples: int,
    elements: int,
    available: float,
    least: int,
    room: int,
) -> int:
    """The largest size from `least` up to `room` whose peak is predicted to fit in `available` bytes; 0 if none."""
    memory, measured = track.memory, track.memory.largest_observed
    if memory.slope is not None or 0 < room * elements <= measured:
        # Asked first, because where memory is what limits the size the answer is no in every call.
        return (
            memory.largest(available, room * elements) // elements
            if memory.fits(least * elements, available)
            else 0
        )
    if not measured:
        return 0 if track.ceilings else room
    # One size measured: a peak proportional to the size is an upper bound while the curve is a
    # line. Where that allows no growth, but the measured peak fits, the smallest step that gives a
    # slope is tried: at worst it costs one failure.
    peak = memory.predict(measured) or 0.0
    if peak > available:
        return 0
    present = limits.longest(samples, track.size)
    count = limits.pieces(samples, present)
    by_proportion = int(measured * available / peak) // elements if peak else room
    if by_proportion > present and limits.pieces(samples, by_proportion) < count:
        return min(room, by_proportion)
    fewer = limits.pieces(samples, math.ceil(EXPLORE * present))
    return min(room, smallest_size(samples, min(count - 1, fewer), align=limits.align))
