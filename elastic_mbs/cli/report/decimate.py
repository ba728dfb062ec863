"""Fewer points for a line that looks the same: the smallest and the largest of each bucket of time."""

from __future__ import annotations

from collections.abc import Sequence

Point = tuple[float, float | None]
"""Time in seconds, and a value or None where there is none: the line has a gap there."""

LIMIT = 2000
"""Points per line: more than there are pixels for."""


def decimate(points: Sequence[Point], limit: int = LIMIT) -> list[Point]:
    """At most `limit` of the points, in their order: the first and the last one, and the extremes of each bucket of time between them.

    Args:
        points: ordered by time.
        limit: at least 4.
    """
    if len(points) <= limit:
        return list(points)
    first, last = points[0], points[-1]
    buckets = (limit - 2) // 2
    width = (last[0] - first[0]) / buckets
    kept = [first]
    bucket: list[Point] = []
    current = 0
    for point in points[1:-1]:
        number = min(buckets - 1, int((point[0] - first[0]) / width)) if width > 0 else 0
        if number != current:
            kept += _extremes(bucket)
            bucket, current = [], number
        bucket.append(point)
    return [*kept, *_extremes(bucket), last]


def _extremes(bucket: Sequence[Point]) -> list[Point]:
    """The smallest and the largest, in their order; a bucket without values keeps its gap."""
    valued = [(value, i) for i, (_, value) in enumerate(bucket) if value is not None]
    if not valued:
        return list(bucket[:1])
    return [bucket[i] for i in sorted({min(valued)[1], max(valued)[1]})]
