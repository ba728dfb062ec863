"""Axes: places of values, ticks, lines with few points, numbers as a person writes them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

from elastic_mbs.events import format_bytes

_TIMES = (
    0.001,
    0.002,
    0.005,
    0.01,
    0.02,
    0.05,
    0.1,
    0.2,
    0.5,
    1,
    2,
    5,
    10,
    15,
    30,
    60,
    120,
    300,
    600,
    900,
    1800,
    3600,
    7200,
    10800,
    21600,
    43200,
)
_DAY = 86400
LIMIT = 2000  # points per line: more than there are pixels for

Point = tuple[float, float | None]
"""Time in seconds, and a value or None where there is none: the line has a gap there."""


class Tick(NamedTuple):
    """A tick of an axis."""

    value: float
    label: str


@dataclass(frozen=True)
class Scale:
    """An axis from `low` to `high`, which is larger."""

    low: float
    high: float
    ticks: tuple[Tick, ...]
    log: bool = False  # equal ratios take equal lengths; both ends are positive then

    def place(self, value: float) -> float:
        """Return the place of a value as a fraction of the axis; 0 or 1 where it lies outside."""
        low, high = self.low, self.high
        if self.log:
            value, low, high = math.log(max(value, low)), math.log(low), math.log(high)
        return min(1.0, max(0.0, (value - low) / (high - low)))


def seconds(high: float) -> Scale:
    """Return an axis of the time since the run began, with about ten ticks."""
    high = high if high > 0 else 1.0
    step = next((step for step in _TIMES if high / step <= 10), 0.0) or _DAY * max(
        1.0, _nice(high / _DAY / 10)
    )
    return Scale(
        0.0,
        high,
        tuple(Tick(i * step, duration(i * step)) for i in range(int(high / step + 1e-9) + 1)),
    )


def linear(low: float, high: float, *, count: int = 5) -> Scale:
    """Return an axis from `low` to `high` or a little further, with about `count` ticks."""
    low, high = (min(1e300, max(-1e300, end)) for end in (min(low, high), max(low, high)))
    least = max(abs(low), abs(high), 1e-12) * 1e-6
    if high - low < least:
        room = max(abs(low) * 0.05, least, 1e-9)
        low, high = low - room, high + room
    step = _nice((high - low) / count)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return Scale(
        first * step,
        last * step,
        tuple(Tick(i * step, number(i * step)) for i in range(first, last + 1)),
    )


def bytes_from_zero(high: float) -> Scale:
    """Return an axis of bytes up to the device's size `high`, with a tick at each quarter."""
    high = max(high, 1024.0)
    ticks = [
        Tick(high * quarter / 4, format_bytes(high * quarter / 4).replace(".0 ", " "))
        for quarter in range(1, 5)
    ]
    return Scale(0.0, high, (Tick(0.0, "0"), *ticks))


def powers(base: float, low: float, high: float) -> Scale:
    """Return a logarithmic axis for positive values, with room around them.

    It has a tick at each power of `base`, or at each second, third, … one.
    """
    low, high = max(low, 1e-300), max(low, high, 1e-300)
    first, last = math.floor(math.log(low, base) + 1e-9), math.ceil(math.log(high, base) - 1e-9)
    every = max(1, -(-(last - first + 1) // 7))
    values = [base**power for power in range(first, last + 1, every)]
    return Scale(
        base ** (first - 0.35),
        base ** (last + 0.35),
        tuple(Tick(value, number(value)) for value in values),
        log=True,
    )


def number(value: float) -> str:
    """Return a number as a person writes it: `12,000`, `0.5`, `1.2e-07`."""
    if value and not 1e-4 <= abs(value) < 1e6:
        return f"{value:.3g}"
    return f"{value:,.6g}" if abs(value) < 1000 else f"{value:,.0f}"


def duration(value: float) -> str:
    """Return seconds as a person writes them: `250 ms`, `12 s`, `4:05`, `2:30:00`, `3 d 4:00`."""
    if not math.isfinite(value):
        return "unknown"
    if value < 60:
        return "0 s" if value == 0 else f"{value:.3g} s" if value >= 1 else f"{value * 1000:.3g} ms"
    days, rest = divmod(round(value), _DAY)
    hours, minutes, left = rest // 3600, rest // 60 % 60, rest % 60
    if days:
        return f"{days} d {hours}:{minutes:02}"
    return f"{hours}:{minutes:02}:{left:02}" if hours else f"{minutes}:{left:02}"


def _nice(step: float) -> float:
    """Return the next of 1, 2, 5 × 10ⁿ that is not below `step`."""
    power = 10.0 ** math.floor(math.log10(step))
    return next(nice * power for nice in (1.0, 2.0, 5.0, 10.0) if nice * power >= step * (1 - 1e-9))


def decimate(points: Sequence[Point], limit: int = LIMIT) -> list[Point]:
    """Return at most `limit` (at least 4) of the points, which are ordered by time.

    They are the first, the last, and the extremes of each bucket between them.
    """
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
    """Return the smallest and the largest point, in their order.

    A group without values keeps its gap.
    """
    valued = [(value, i) for i, (_, value) in enumerate(group) if value is not None]
    return (
        [group[i] for i in sorted({min(valued)[1], max(valued)[1]})] if valued else list(group[:1])
    )
