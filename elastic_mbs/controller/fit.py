"""Memory and time as functions of the micro-batch in elements, fitted while it runs.

PAPAYA (arXiv 2303.14633) fits both by straight lines.

A line through two small sizes is up to 48 % too low for memory at a larger one: the peak is a
maximum of affine functions, so it is convex.
"""

from __future__ import annotations

import bisect
import math
from collections import deque
from dataclasses import dataclass
from typing import Any, TypeVar

UNCHECKED = 0.05  # by so much a peak may be above a prediction, as long as none was compared
KNOTS = 32  # sizes remembered per fit: sequence lengths vary without end, memory of them must not

Value = TypeVar("Value", int, float, bool, str)


def checked(value: Any, kind: type[Value], least: float = 0) -> Value:
    """`value`; a ValueError unless it is of that type and, if it is a number, finite and not below `least`. An int serves as a float."""
    fits = type(value) is kind or (kind is float and type(value) is int)
    if not fits or (kind is not str and not least <= value < 2**63):
        raise ValueError(f"{value!r} is not of type {kind.__name__}, or out of range")
    return kind(value)


def _thin_out(knots: dict[int, Any], keep: int) -> None:
    """Where there are too many, drops the size that adds least: the one between the closest neighbours, never an end, never `keep`."""
    if len(knots) > KNOTS:
        sizes = sorted(knots)
        inner = [i for i in range(1, len(sizes) - 1) if sizes[i] != keep]
        del knots[sizes[min(inner, key=lambda i: sizes[i + 1] / sizes[i - 1])]]


@dataclass
class _Knot:
    """What was measured at one size."""

    peaks: list[int]  # the latest ones, in bytes
    seen: int  # when the last of them came, in measurements of the fit

    @property
    def peak(self) -> int:
        return max(self.peaks)


class MemoryFit:
    """Peak bytes as a convex, piecewise linear function of the micro-batch: chords between measurements, which lie above any convex function."""

    RECENT = 3  # measurements kept per size; the highest counts
    STRIDE = 2  # times the present size that it may grow to at once
    # times the largest size measured: as far as a peak is predicted, by the steepest chord that
    # ends there
    REACH = 2
    SPREAD = 0.95  # of a larger size: noise would decide the slope of a chord that begins above it
    CHECKS = 8  # predictions that are remembered as right or wrong

    def __init__(self) -> None:
        self._knots: dict[int, _Knot] = {}
        self._seen = 0
        self._held: int | None = None
        # by how much a peak was above its prediction, as a fraction
        self._errors: deque[float] = deque(maxlen=self.CHECKS)

    def hold(self, held: int) -> None:
        """Moves all peaks by as much as the process now holds more or less than when they were measured, in bytes outside the call's own needs."""
        # Else a size measured before there was an optimizer's state and one measured with it make a
        # slope that is too steep by the whole state: all larger sizes then seem not to fit, for
        # good, because the smaller one is not measured again.
        before, self._held = self._held, held
        if before is not None and before != held:
            self._shift(held - before, before=self._seen + 1)

    @property
    def largest_observed(self) -> int:
        return max(self._knots, default=0)

    @property
    def slope(self) -> float | None:
        """Bytes per unit of size beyond the largest one measured, or None while no two sizes far enough apart are known."""
        last = self.largest_observed
        slopes = [
            (self._knots[last].peak - knot.peak) / (last - x)
            for x, knot in self._knots.items()
            if x <= self.SPREAD * last
        ]
        return max(slopes, default=None)

    def add(self, x: int, peak: int, *, first: bool = False) -> None:
        """Takes one measurement: at most `peak` bytes were allocated while pieces of `x` elements ran. Who made the gradients is one to this fit."""
        self._seen += 1
        older, expected = self._knots.get(x), self.predict(x)
        if older is None and expected:
            self._errors.append(max(0.0, peak / expected - 1))
        knot = self._knots[x] = _Knot(
            [*(older.peaks if older else []), peak][-self.RECENT :], self._seen
        )
        if older and older.peak != knot.peak:
            # Where what the process holds besides is not known, a second measurement at one size
            # shows it: those made before the first move with it.
            self._shift(knot.peak - older.peak, before=older.seen)
        self._drop_contradicted()
        _thin_out(self._knots, x)

    def _shift(self, by: int, *, before: int) -> None:
        """Moves the peaks that were measured earlier than `before`."""
        for knot in self._knots.values():
            if knot.seen < before:
                knot.peaks = [max(0, peak + by) for peak in knot.peaks]

    def _drop_contradicted(self) -> None:
        """Newest first: a knot that needs more memory for less, or less for more, than a newer one is dropped."""
        kept: list[tuple[int, int]] = []
        for x, knot in sorted(self._knots.items(), key=lambda item: -item[1].seen):
            # What is kept rises in both, so the neighbours speak for all.
            here = bisect.bisect(kept, (x, 0))
            if (here == 0 or kept[here - 1][1] <= knot.peak) and (
                here == len(kept) or knot.peak <= kept[here][1]
            ):
                kept.insert(here, (x, knot.peak))
        self._knots = {x: self._knots[x] for x, _ in kept}

    def predict(self, x: int) -> float | None:
        """Predicted peak in bytes, or None where nothing is known: no measurement, no slope yet, or more than `REACH` times the largest."""
        last = self.largest_observed
        if not last or x > self.REACH * last:
            return None
        if x > last:
            slope = self.slope
            return None if slope is None else self._knots[last].peak + slope * (x - last)
        if x < min(self._knots):
            return self._below(x)
        right = min(y for y in self._knots if y >= x)
        left = max((y for y in self._knots if y <= x), default=right)
        low, high = self._knots[left].peak, self._knots[right].peak
        return float(high) if left == right else low + (high - low) * (x - left) / (right - left)

    def _below(self, x: int) -> float:
        """Below the smallest size measured: along the chord that begins there, or the one that ends there from what the process holds."""
        first = min(self._knots)
        peak = self._knots[first].peak
        slopes = [
            (knot.peak - peak) / (y - first)
            for y, knot in self._knots.items()
            if first <= self.SPREAD * y
        ]
        if not slopes:
            slopes = [0.0 if self._held is None else max(0, peak - self._held) / first]
        return max(min(self._held or 0, peak), peak - min(slopes) * (first - x))

    def largest(self, budget: float, limit: int) -> int:
        """The largest size up to `limit` whose predicted peak is at most `budget` bytes; 0 if none is known to fit."""
        sizes = range(1, min(limit, self.REACH * self.largest_observed) + 1)
        return bisect.bisect_left(sizes, True, key=lambda x: not self.fits(x, budget))

    def fits(self, x: int, budget: float) -> bool:
        """Whether the predicted peak is at most `budget` bytes; beyond what was measured with as much above it as earlier ones were wrong."""
        predicted = self.predict(x)
        spread = max(self._errors, default=UNCHECKED) if x > self.largest_observed else 0.0
        return predicted is not None and predicted * (1 + spread) <= budget

    def state(self) -> list[list[object]]:
        """What is known, as JSON: `[size, peaks, seen]` per size."""
        return [[x, list(knot.peaks), knot.seen] for x, knot in sorted(self._knots.items())]

    @classmethod
    def restored(cls, state: Any) -> MemoryFit:
        """The fit that `state()` was taken from; TypeError or ValueError if it is malformed."""
        fit = cls()
        for x, peaks, seen in state:
            if not peaks:
                raise ValueError(f"no peak at {x!r} elements")
            fit._knots[checked(x, int, 1)] = _Knot(
                [checked(peak, int) for peak in peaks], checked(seen, int)
            )
            fit._seen = max(fit._seen, seen)
        return fit


class TimeFit:
    """Seconds per piece as γ·m + δ (PAPAYA), for pieces of m; γ and δ are never negative.

    From the latest measurements alone: on a device that others use the time of a size changes, and
    a size that seemed slow must not stay so for good.
    """

    SPREAD = 0.8
    RECENT = 64  # measurements, at least; at most twice as many

    def __init__(self) -> None:
        # Least seconds by size: a shared machine has outliers of seconds in one direction only.
        self._before: dict[int, float] = {}
        self._latest: dict[int, float] = {}
        self._count = 0  # measurements in the latest ones

    @property
    def _best(self) -> dict[int, float]:
        return {
            x: min(self._before.get(x, math.inf), self._latest.get(x, math.inf))
            for x in self._before | self._latest
        }

    def add(self, x: int, seconds: float) -> None:
        """Takes one measurement: a positive, finite time for a piece of size `x`."""
        if self._count == self.RECENT:
            self._before, self._latest, self._count = self._latest, {}, 0
        self._count += 1
        least = self._latest.get(x)
        if least is None or seconds < least:
            self._latest[x] = seconds
            _thin_out(self._latest, x)

    def coefficients(self) -> tuple[float, float] | None:
        """γ (seconds per unit) and δ (seconds per piece), or None while no two sizes far enough apart are known."""
        best = self._best
        if not best or min(best) > self.SPREAD * max(best):
            return None
        # Weighted least squares of γ·x + δ = t. 1/t² makes errors relative. Below the knee a piece
        # takes a constant time, and beyond the caches a sample takes more of it, so the larger a
        # size, the more it says of what lies above: x³.
        points = [(x, t, x**3 / t**2) for x, t in best.items()]
        xx, xc, cc = (
            sum(w * x * x for x, _, w in points),
            sum(w * x for x, _, w in points),
            sum(w for _, _, w in points),
        )
        x1, c1 = sum(w * x * t for x, t, w in points), sum(w * t for _, t, w in points)
        determinant = xx * cc - xc * xc
        gamma = (x1 * cc - c1 * xc) / determinant
        delta = (c1 * xx - x1 * xc) / determinant
        if gamma < 0:
            return 0.0, c1 / cc
        return (x1 / xx, 0.0) if delta < 0 else (gamma, delta)

    def gain(self, before: float, after: float) -> float | None:
        """The fraction of a step's time that pieces of `after` instead of `before` save (negative: they cost), or None while it is not known."""
        fitted = self.coefficients()
        if fitted is None:
            return None
        # a step takes γ·B + δ·B/m, so the saving does not depend on the batch B
        gamma, delta = fitted
        return 1 - (gamma + delta / after) / (gamma + delta / before)

    def saved(self, run: int, before: int, after: int) -> float:
        """The seconds that pieces of `after` instead of `before` have saved in so many elements; 0 while it is not known."""
        fitted = self.coefficients()
        return 0.0 if fitted is None else run * fitted[1] * (1 / before - 1 / after)

    def state(self) -> list[list[float]]:
        """What is known, as JSON: `[size, seconds]` per size."""
        return [[x, seconds] for x, seconds in sorted(self._best.items())]

    @classmethod
    def restored(cls, state: Any) -> TimeFit:
        """The fit that `state()` was taken from; TypeError or ValueError if it is malformed."""
        fit = cls()
        for x, seconds in state:
            fit.add(checked(x, int, 1), checked(seconds, float, 1e-300))
        return fit
