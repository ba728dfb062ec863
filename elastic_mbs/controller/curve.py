"""The peak by size for samples of one length, through points that were measured."""

from __future__ import annotations

import bisect
from collections.abc import Iterable

from elastic_mbs.controller.memory_model import PeakCurve


class FittedCurve(PeakCurve):
    """Peak bytes as a convex, piecewise linear function of the size.

    Between two sizes measured it is the chord, which lies above any convex function. Beyond the
    largest one it goes on along the steepest chord that ends there.

    Args:
        points: sizes and their peaks. A size between two measured lengths is a fraction.
        held: bytes in use when the latest call began; None where it is not known.
        spread: the fraction by which a peak may be above its prediction.
    """

    REACH = 2  # times the largest size measured: no peak is predicted beyond
    # A chord that begins above this fraction of the larger size is too short: noise would decide
    # its slope.
    SPREAD = 0.95

    def __init__(
        self, points: Iterable[tuple[float, int]], held: int | None, spread: float
    ) -> None:
        self._sizes: list[float] = []
        self._peaks: list[int] = []
        highest = 0  # a larger size has no smaller peak
        for x, peak in sorted(points):
            highest = max(highest, peak)
            if self._sizes and x == self._sizes[-1]:
                self._peaks[-1] = highest
            else:
                self._sizes.append(x)
                self._peaks.append(highest)
        self._held, self._spread = held, spread

    @property
    def largest_observed(self) -> int:
        return max(1, int(self._sizes[-1])) if self._sizes else 0

    @property
    def reach(self) -> int:
        return self.REACH * self.largest_observed

    @property
    def spread(self) -> float:
        return self._spread

    @property
    def slope(self) -> float | None:
        """Bytes per element beyond the largest size measured.

        None while no two sizes far enough apart are known.
        """
        if not self._sizes:
            return None
        last, peak = self._sizes[-1], self._peaks[-1]
        slopes = [
            (peak - other) / (last - x)
            for x, other in zip(self._sizes, self._peaks, strict=True)
            if x <= self.SPREAD * last
        ]
        return max(slopes, default=None)

    def predict(self, x: int, *, first: bool = False) -> float | None:
        """Return the predicted peak in bytes.

        None where nothing is known: no measurement, no slope yet, or beyond the reach.
        """
        if not self._sizes or x > self.reach:
            return None
        right = bisect.bisect_left(self._sizes, x)
        if right == len(self._sizes):
            slope = self.slope
            return None if slope is None else self._peaks[-1] + slope * (x - self._sizes[-1])
        if self._sizes[right] == x:
            return float(self._peaks[right])
        if not right:
            return self._below(x)
        left, high = self._sizes[right - 1], self._peaks[right]
        low = self._peaks[right - 1]
        return low + (high - low) * (x - left) / (self._sizes[right] - left)

    def _below(self, x: int) -> float:
        """Return the peak of a size below the smallest one measured.

        It lies on the flattest chord from the smallest size to a larger one, continued. With one
        size measured it lies on the chord to that size from the bytes that the process holds.
        """
        first, peak = self._sizes[0], self._peaks[0]
        slopes = [
            (other - peak) / (y - first)
            for y, other in zip(self._sizes, self._peaks, strict=True)
            if first <= self.SPREAD * y
        ]
        if not slopes:
            slopes = [0.0 if self._held is None else max(0, peak - self._held) / first]
        return max(min(self._held or 0, peak), peak - min(slopes) * (first - x))
