"""Memory and time as functions of the micro-batch in elements, fitted while training runs.

PAPAYA (arXiv 2303.14633) fits both by straight lines. For memory that is not enough: the peak is a
maximum of affine functions, so it is convex, and a line through two small sizes is up to 48 % too
low at a larger one.
"""

from __future__ import annotations

import bisect
import math
from collections import deque
from dataclasses import dataclass
from typing import Any

from elastic_mbs.controller.memory_model import UNCHECKED, MemoryModel
from elastic_mbs.controller.saved import checked

# Sizes remembered per fit: there is no end of different sequence lengths, and memory is bounded.
KNOTS = 32


def _thin_out(knots: dict[int, Any], keep: int) -> None:
    """Drop the size between the closest neighbours where there are too many.

    Both ends and the size `keep` stay.
    """
    if len(knots) <= KNOTS:
        return
    sizes = sorted(knots)
    inner = [i for i in range(1, len(sizes) - 1) if sizes[i] != keep]
    del knots[sizes[min(inner, key=lambda i: sizes[i + 1] / sizes[i - 1])]]


@dataclass
class _Knot:
    """The measurements at one size."""

    peaks: list[int]  # the latest ones, in bytes
    seen: int  # number of the last one among all measurements of the fit

    @property
    def peak(self) -> int:
        return max(self.peaks)


class MemoryFit(MemoryModel):
    """Peak bytes as a convex, piecewise linear function of the size.

    Between two sizes measured it is the chord, which lies above any convex function. Beyond the
    largest one it goes on along the steepest chord that ends there.
    """

    RECENT = 3  # measurements kept per size; the highest counts
    STRIDE = 2
    REACH = 2  # times the largest size measured: no peak is predicted beyond
    # A chord that begins above this fraction of the larger size is too short: noise would decide
    # its slope.
    SPREAD = 0.95
    CHECKS = 8  # comparisons of a prediction with a measurement that are remembered

    def __init__(self) -> None:
        self._knots: dict[int, _Knot] = {}
        self._seen = 0  # measurements so far
        self._held: int | None = None  # bytes in use when the latest call began
        # how far peaks were above their predictions, as fractions
        self._errors: deque[float] = deque(maxlen=self.CHECKS)

    @property
    def largest_observed(self) -> int:
        return max(self._knots, default=0)

    @property
    def reach(self) -> int:
        return self.REACH * self.largest_observed

    @property
    def spread(self) -> float:
        return max(self._errors, default=UNCHECKED)

    @property
    def slope(self) -> float | None:
        """Bytes per element beyond the largest size measured.

        None while no two sizes far enough apart are known.
        """
        last = self.largest_observed
        slopes = [
            (self._knots[last].peak - knot.peak) / (last - x)
            for x, knot in self._knots.items()
            if x <= self.SPREAD * last
        ]
        return max(slopes, default=None)

    def hold(self, held: int) -> None:
        """Take the bytes in use outside the call's own needs; all peaks move with them.

        A small size measured before the optimizer had its state, and a large one measured with it,
        would give a slope that is too steep by the whole state. Larger sizes would then never seem
        to fit, because the small size is not measured again.
        """
        before, self._held = self._held, held
        if before is not None and before != held:
            self._shift(held - before, before=self._seen + 1)

    def add(self, x: int, peak: int, *, first: bool = False) -> None:
        """Take one measurement; the fit does not distinguish a call that made the gradients."""
        self._seen += 1
        older = self._knots.get(x)
        expected = self.predict(x)
        if older is None and expected:
            self._errors.append(max(0.0, peak / expected - 1))
        peaks = [*(older.peaks if older else []), peak]
        knot = self._knots[x] = _Knot(peaks[-self.RECENT :], self._seen)
        if older and older.peak != knot.peak:
            # A second measurement at one size shows a change of what the process holds besides,
            # where `hold` was not told: all measurements made before the first one move with it.
            self._shift(knot.peak - older.peak, before=older.seen)
        self._drop_contradicted()
        _thin_out(self._knots, x)

    def _shift(self, by: int, *, before: int) -> None:
        """Move all peaks that were measured earlier than number `before`."""
        for knot in self._knots.values():
            if knot.seen < before:
                knot.peaks = [max(0, peak + by) for peak in knot.peaks]

    def _drop_contradicted(self) -> None:
        """Drop each size that a newer one contradicts: a larger size has no smaller peak."""
        kept: list[tuple[int, int]] = []
        for x, knot in sorted(self._knots.items(), key=lambda item: -item[1].seen):
            # Sizes and peaks of the newer ones rise together, so comparing with the two neighbours
            # is enough.
            here = bisect.bisect(kept, (x, 0))
            above_smaller = here == 0 or kept[here - 1][1] <= knot.peak
            below_larger = here == len(kept) or knot.peak <= kept[here][1]
            if above_smaller and below_larger:
                kept.insert(here, (x, knot.peak))
        self._knots = {x: self._knots[x] for x, _ in kept}

    def predict(self, x: int, *, first: bool = False) -> float | None:
        """Return the predicted peak in bytes.

        None where nothing is known: no measurement, no slope yet, or beyond the reach.
        """
        last = self.largest_observed
        if not last or x > self.reach:
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
        """Return the peak of a size below the smallest one measured.

        It lies on the flattest chord from the smallest size to a larger one, continued. With one
        size measured it lies on the chord to that size from the bytes that the process holds.
        """
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

    def state(self) -> list[list[object]]:
        """Return everything that is known, as JSON: `[size, peaks, seen]` per size."""
        return [[x, list(knot.peaks), knot.seen] for x, knot in sorted(self._knots.items())]

    @classmethod
    def restored(cls, state: Any) -> MemoryFit:
        """Make the fit that `state()` describes; TypeError or ValueError where it is malformed."""
        fit = cls()
        for x, peaks, seen in state:
            if not peaks:
                raise ValueError(f"no peak at {x!r} elements")
            knot = _Knot([checked(peak, int) for peak in peaks], checked(seen, int, 0, 2**53))
            fit._knots[checked(x, int, 1)] = knot
            fit._seen = max(fit._seen, seen)
        return fit


class TimeFit:
    """Seconds of a piece of m elements as γ·m + δ (PAPAYA); γ and δ are never negative.

    Only the latest measurements count: on a device that others use, the time of a size changes, and
    a size that seemed slow once must not stay so for good.
    """

    SPREAD = 0.8  # a line needs a size below this fraction of the largest
    RECENT = 64  # measurements that count, at least; at most twice as many

    def __init__(self) -> None:
        # The least seconds per size, because outliers of a shared machine go in one direction.
        self._before: dict[int, float] = {}
        self._latest: dict[int, float] = {}
        self._count = 0  # measurements in `_latest`

    @property
    def _best(self) -> dict[int, float]:
        return {
            x: min(self._before.get(x, math.inf), self._latest.get(x, math.inf))
            for x in self._before | self._latest
        }

    def add(self, x: int, seconds: float) -> None:
        """Take one measurement: a positive, finite time of a piece of size `x`."""
        if self._count == self.RECENT:
            self._before, self._latest = self._latest, {}
            self._count = 0
        self._count += 1
        least = self._latest.get(x)
        if least is None or seconds < least:
            self._latest[x] = seconds
            _thin_out(self._latest, x)

    def coefficients(self) -> tuple[float, float] | None:
        """Return γ in seconds per element and δ in seconds per piece.

        None while no two sizes far enough apart are known.
        """
        best = self._best
        if not best or min(best) > self.SPREAD * max(best):
            return None
        # Weighted least squares of γ·x + δ = t. The weight 1/t² makes errors relative. Its factor
        # x³ favours large sizes: below the knee a piece takes a constant time, and beyond the
        # caches a sample takes longer, so a large size says more about still larger ones.
        points = [(x, t, x**3 / t**2) for x, t in best.items()]
        xx = sum(w * x * x for x, _, w in points)
        xc = sum(w * x for x, _, w in points)
        cc = sum(w for _, _, w in points)
        x1 = sum(w * x * t for x, t, w in points)
        c1 = sum(w * t for _, t, w in points)
        determinant = xx * cc - xc * xc
        if not 0 < determinant < math.inf:  # sizes beyond what numbers can tell apart
            return None
        gamma = (x1 * cc - c1 * xc) / determinant
        delta = (c1 * xx - x1 * xc) / determinant
        if gamma < 0:
            return 0.0, c1 / cc
        if delta < 0:
            return x1 / xx, 0.0
        return gamma, delta

    def gain(self, before: float, after: float) -> float | None:
        """Return the fraction of a step's time that pieces of `after` save against `before`.

        Negative where they cost more; None while the coefficients are not known.
        """
        fitted = self.coefficients()
        if fitted is None:
            return None
        # A step on a batch of B takes γ·B + δ·B/m, so the fraction does not depend on B.
        gamma, delta = fitted
        return 1 - (gamma + delta / after) / (gamma + delta / before)

    def saved(self, run: int, before: int, after: int) -> float:
        """Return the seconds that pieces of `after` have saved against `before` in `run` elements.

        0 while the coefficients are not known.
        """
        fitted = self.coefficients()
        return 0.0 if fitted is None else run * fitted[1] * (1 / before - 1 / after)

    def state(self) -> list[list[float]]:
        """Return everything that is known, as JSON: `[size, seconds]` per size."""
        return [[x, seconds] for x, seconds in sorted(self._best.items())]

    @classmethod
    def restored(cls, state: Any) -> TimeFit:
        """Make the fit that `state()` describes; TypeError or ValueError where it is malformed."""
        fit = cls()
        for x, seconds in state:
            fit.add(checked(x, int, 1), checked(seconds, float, 1e-12))
        return fit
