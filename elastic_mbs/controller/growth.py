"""When a size grows, and how far: a target is always the smallest size for its number of pieces, so that there are few distinct shapes."""

from __future__ import annotations

import math

from elastic_mbs.controller.partition import smallest_size
from elastic_mbs.controller.plan import Capacity
from elastic_mbs.controller.policy import Limits, Policy
from elastic_mbs.controller.track import Track

EXPLORE = 1.0625  # while one size only was measured, the next one must be this much larger, or noise would decide the slope between them


def budget(track: Track, policy: Policy, capacity: Capacity) -> float:
    """Bytes that the peak allocation can reach: the margin stays free, and the allocator reserves more than it hands out."""
    return capacity.bytes * (1 - policy.margin) / track.fragmentation


def is_due(track: Track, policy: Policy, capacity: Capacity, now: float) -> bool:
    """When: after `patience` clean calls at this size, with a reading newer than it and not decided on yet, and while no cooldown runs."""
    ready = policy.grow and not track.probing and track.clean >= track.patience
    return ready and now >= track.cooldown_until and capacity.at > track.decided_at


def double_fits(track: Track, policy: Policy, present: int, target: int, capacity: Capacity | None) -> bool:
    """Whether nothing speaks against going from `present` to `target` elements while probing."""
    predicted = track.memory.predict(target)
    if predicted is None:  # one measurement gives no slope yet: then only the measured peak itself must fit
        predicted = track.memory.predict(present)
    return capacity is None or predicted is None or predicted <= budget(track, policy, capacity)


def next_size(track: Track, limits: Limits, policy: Policy, capacity: Capacity) -> int | None:
    """How far: the size to grow to, in samples, or None when the present one is the best that is known to be possible.

    At most the double, below the ceilings, with a peak that is predicted to fit; fewer pieces than now, and a gain of time not known to be too small.
    """
    samples, elements = track.expected()  # a size must fit for all recent calls
    count = limits.pieces(samples, track.size)
    if count == 1:
        return None
    present = limits.longest(samples, track.size)
    room = limits.clamp(2 * present)
    ceiling = min(track.ceilings, key=lambda each: (each.limit, each.elements), default=None)  # the one that binds most
    if ceiling is not None:
        room = min(room, ceiling.limit // elements)
    room = _room_in_memory(track, limits, samples, elements, budget(track, policy, capacity), room)
    if room <= track.size or limits.pieces(samples, room) >= count:
        return None
    fewest = limits.pieces(samples, room)
    gain = track.time.gain(samples * elements / count, samples * elements / fewest)
    if gain is not None and gain < policy.min_gain:
        return None
    if ceiling is not None and ceiling.limit == ceiling.elements - 1:  # sizes between the last good one and this one are still open
        middle = (present * elements + ceiling.elements) // 2 // elements
        fewest = max(fewest, min(limits.pieces(samples, middle), count - 1))
    target = smallest_size(samples, fewest, align=limits.align)
    return target if track.size < target <= room else None


def _room_in_memory(track: Track, limits: Limits, samples: int, elements: int, available: float, room: int) -> int:
    """The largest size up to `room` whose peak is predicted to fit in `available` bytes; 0 if none."""
    memory, measured = track.memory, track.memory.largest_observed
    if not measured:
        return 0 if track.ceilings else room
    if memory.slope is not None or room * elements <= measured:
        return memory.largest(available, room * elements) // elements
    # One size measured: a peak proportional to the size is an upper bound while the curve is a line. Where that allows no growth, but the measured
    # peak fits, the smallest step that gives a slope is tried: at worst it costs one failure.
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
