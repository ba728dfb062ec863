"""Fewer points for a line that looks the same: the smallest and the largest of each bucket of time."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

Point = tuple[float, float | None]
"""Time in seconds, and a value or None where there is none: the line has a gap there."""

LIMIT = 2000  # points per line: more than there are pixels for


def decimate(points: Sequence[Point], limit: int = LIMIT) -> list[Point]:
    """At most `limit` (at least 4) of the points, which are ordered by time: the first, the last, and the extremes of each bucket between them."""
    if len(points) <= limit:
        return list(points)
    first, last = points[0], points[-1]
    buckets = (limit - 2) // 2
    width = (last[0] - first[0]) / buckets

    def bucket(point: Point) -> int:
        return min(buckets - 1, int((point[0] - first[0]) / width)) if width > 0 else 0

    between = [_extremes(list(group)) for _, group in groupby(points[1:-1], bucket)]
    return [first, *(point for group in between for point in group), last]


def _extremes(group: Sequence[Point]) -> list[Point]:
    """The smallest and the largest, in their order; a group without values keeps its gap."""
    valued = [(value, i) for i, (_, value) in enumerate(group) if value is not None]
    return [group[i] for i in sorted({min(valued)[1], max(valued)[1]})] if valued else list(group[:1])
