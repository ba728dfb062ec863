"""Memory and time as functions of the micro-batch in elements, fitted while training runs.

PAPAYA (arXiv 2303.14633) fits both by straight lines. For memory that is not enough: the peak is a
maximum of affine functions, so it is convex, and a line through two small sizes is up to 48 % too
low at a larger one. Where attention keeps its weights, it depends on the length, too.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from itertools import pairwise
from operator import attrgetter
from typing import Any, NamedTuple

from elastic_mbs.controller.curve import FittedCurve
from elastic_mbs.controller.memory_model import UNCHECKED, Highest, MemoryModel, PeakCurve
from elastic_mbs.controller.saved import checked
from elastic_mbs.controller.work import LINEAR, QUADRATIC, Measured, Work, fitted

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


class _Place(NamedTuple):
    """The size of a piece, and the elements of one of its samples."""

    x: int
    elements: int

    @property
    def square(self) -> int:
        """The size, times the elements of a sample."""
        return self.x * self.elements

    def within(self, other: _Place) -> bool:
        """Return True where this piece needs no more than the other one, whatever α and β are."""
        return self.x <= other.x and self.square <= other.square

    def distance(self, other: _Place) -> float:
        """Return how far apart two places are: the larger of two ratios, in logarithms."""
        return max(abs(math.log(self.x / other.x)), abs(math.log(self.elements / other.elements)))


@dataclass
class _Knot:
    """The measurements at one place."""

    peaks: list[int]  # the latest ones, in bytes
    seen: int  # number of the last one among all measurements of the fit

    @property
    def peak(self) -> int:
        return max(self.peaks)


class MemoryFit(MemoryModel):
    """Peak bytes by size and length, fitted to measurements.

    All measurements count for every length: one with samples of another length stands for the size
    that takes as much (`Work`). While one length alone was seen, or sizes and lengths have not
    varied apart, memory can be linear in the length, quadratic, or between the two. The higher
    prediction counts then.
    """

    RECENT = 3  # measurements kept per size; the highest counts
    STRIDE = 2
    CHECKS = 8  # comparisons of a prediction with a measurement that are remembered

    def __init__(self) -> None:
        self._knots: dict[_Place, _Knot] = {}
        self._seen = 0  # measurements so far
        self._held: int | None = None  # bytes in use when the latest call began
        # how far peaks were above their predictions, as fractions
        self._errors: deque[float] = deque(maxlen=self.CHECKS)
        self._curves: dict[int, PeakCurve] = {}  # by length, since the last change

    def at(self, elements: int) -> PeakCurve:
        curve = self._curves.get(elements)
        if curve is None:
            if len(self._curves) >= KNOTS:
                self._curves.clear()
            curve = self._curves[elements] = self._curve(elements)
        return curve

    def _curve(self, elements: int) -> PeakCurve:
        if all(place.elements == elements for place in self._knots):
            return self._under(LINEAR, elements)
        points = (Measured(*place, knot.peak) for place, knot in self._knots.items())
        work = fitted(points)
        if work is None:
            return Highest([self._under(each, elements) for each in (LINEAR, QUADRATIC)])
        return self._under(work, elements)

    def _under(self, work: Work, elements: int) -> PeakCurve:
        """Return the curve of a length, where memory follows `work`."""
        points = (
            (work.equivalent(*place, elements), knot.peak) for place, knot in self._knots.items()
        )
        return FittedCurve(points, self._held, max(self._errors, default=UNCHECKED))

    def covers(self, x: int, elements: int) -> bool:
        piece = _Place(x, elements)
        return any(piece.within(place) for place in self._knots)

    def is_new(self, x: int, elements: int) -> bool:
        shorter = any(place.elements < elements for place in self._knots)
        return shorter and not self.covers(x, elements)

    def hold(self, held: int) -> None:
        """Take the bytes in use outside the call's own needs; all peaks move with them.

        A small size measured before the optimizer had its state, and a large one measured with it,
        would give a slope that is too steep by the whole state. Larger sizes would then never seem
        to fit, because the small size is not measured again.
        """
        before, self._held = self._held, held
        if before != held:
            self._curves.clear()
            if before is not None:
                self._shift(held - before, before=self._seen + 1)

    def add(self, x: int, peak: int, *, elements: int, first: bool = False) -> None:
        """Take one measurement; the fit does not distinguish a call that made the gradients."""
        self._seen += 1
        place = _Place(x, elements)
        older = self._knots.get(place)
        expected = self.at(elements).predict(x)
        if older is None and expected:
            self._errors.append(max(0.0, peak / expected - 1))
        peaks = [*(older.peaks if older else []), peak]
        knot = self._knots[place] = _Knot(peaks[-self.RECENT :], self._seen)
        if older and older.peak != knot.peak:
            # A second measurement at one place shows a change of what the process holds besides,
            # where `hold` was not told: all measurements made before the first one move with it.
            self._shift(knot.peak - older.peak, before=older.seen)
        self._drop_contradicted()
        self._thin_out(place)
        self._curves.clear()

    def _shift(self, by: int, *, before: int) -> None:
        """Move all peaks that were measured earlier than number `before`."""
        for knot in self._knots.values():
            if knot.seen < before:
                knot.peaks = [max(0, peak + by) for peak in knot.peaks]

    def _drop_contradicted(self) -> None:
        """Drop each measurement that a newer one contradicts: what needs more has no less."""
        kept: list[tuple[int, int, int]] = []  # size, square and peak
        places: list[_Place] = []
        for place, knot in sorted(self._knots.items(), key=lambda item: -item[1].seen):
            x, square, peak = place.x, place.square, knot.peak
            if not any(
                (x <= other and square <= larger and peak > most)
                or (other <= x and larger <= square and most > peak)
                for other, larger, most in kept
            ):
                kept.append((x, square, peak))
                places.append(place)
        self._knots = {place: self._knots[place] for place in sorted(places)}

    def _thin_out(self, keep: _Place) -> None:
        """Drop the measurement closest to the next one where there are too many.

        The smallest and the largest size stay, the smallest and the largest square, and `keep`.
        """
        if len(self._knots) <= KNOTS:
            return
        order = sorted(self._knots, key=attrgetter("square"))
        ends = {keep, order[0], order[-1], min(order), max(order)}
        gaps = [(here.distance(after), here) for here, after in pairwise(order)]
        del self._knots[min(gap for gap in gaps if gap[1] not in ends)[1]]

    def state(self) -> list[list[object]]:
        """Return everything that is known, as JSON: `[size, length, peaks, seen]` of each."""
        return [[*place, list(knot.peaks), knot.seen] for place, knot in self._knots.items()]

    @classmethod
    def restored(cls, state: Any) -> MemoryFit:
        """Make the fit that `state()` describes; TypeError or ValueError where it is malformed."""
        fit = cls()
        for x, elements, peaks, seen in state:
            if not peaks:
                raise ValueError(f"no peak at {x!r} elements")
            knot = _Knot([checked(peak, int) for peak in peaks], checked(seen, int, 0, 2**53))
            fit._knots[_Place(checked(x, int, 1), checked(elements, int, 1))] = knot
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
