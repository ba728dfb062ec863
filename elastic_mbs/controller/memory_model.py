"""The peak memory of a call as a function of the size and the length of its pieces' samples."""

from __future__ import annotations

import bisect
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, Self

UNCHECKED = 0.05  # the assumed prediction error, as a fraction, until a prediction was compared


class PeakCurve(ABC):
    """Peak bytes by size in elements, for pieces whose samples have one length."""

    @property
    @abstractmethod
    def largest_observed(self) -> int:
        """The largest size measured; 0 before the first measurement.

        Of a piece with other samples it is the size that needs as much, or less.
        """

    @property
    @abstractmethod
    def slope(self) -> float | None:
        """Bytes per element beyond the largest size measured; None where it is not known."""

    @property
    @abstractmethod
    def spread(self) -> float:
        """The fraction by which a peak may be above its prediction."""

    @property
    @abstractmethod
    def reach(self) -> int | None:
        """The largest size that has a prediction; None where there is no limit."""

    @abstractmethod
    def predict(self, x: int, *, first: bool = False) -> float | None:
        """Return the predicted peak in bytes; None where it is not known."""

    def fits(self, x: int, budget: float, *, first: bool = False) -> bool:
        """Return True where the peak of size `x` is predicted to be at most `budget` bytes.

        Beyond the largest size measured, the prediction may be wrong by the spread.
        """
        predicted = self.predict(x, first=first)
        if predicted is None:
            return False
        spread = self.spread if x > self.largest_observed else 0.0
        return predicted * (1 + spread) <= budget

    def largest(self, budget: float, limit: int) -> int:
        """Return the largest size up to `limit` that fits in `budget` bytes; 0 where none does."""
        last = limit if self.reach is None else min(limit, self.reach)
        sizes = range(1, last + 1)
        return bisect.bisect_left(sizes, True, key=lambda x: not self.fits(x, budget))


class Highest(PeakCurve):
    """The highest of several curves: the peak where it is not known which of them is right."""

    def __init__(self, curves: Sequence[PeakCurve]) -> None:
        self._curves = curves

    @property
    def largest_observed(self) -> int:
        return min(curve.largest_observed for curve in self._curves)

    @property
    def slope(self) -> float | None:
        slopes = [curve.slope for curve in self._curves]
        known = [slope for slope in slopes if slope is not None]
        return max(known) if len(known) == len(slopes) else None

    @property
    def spread(self) -> float:
        return max(curve.spread for curve in self._curves)

    @property
    def reach(self) -> int | None:
        return min((r for curve in self._curves if (r := curve.reach) is not None), default=None)

    def predict(self, x: int, *, first: bool = False) -> float | None:
        peaks = [curve.predict(x, first=first) for curve in self._curves]
        known = [peak for peak in peaks if peak is not None]
        return max(known) if len(known) == len(peaks) else None


class MemoryModel(ABC):
    """Peak bytes by size and length: fitted to measurements (`MemoryFit`) or planned (`PeakModel`).

    A size is that of a piece in elements; a length is the elements of one of its samples.
    """

    STRIDE: ClassVar[int]  # a size may grow at once to this many times the present one

    @abstractmethod
    def at(self, elements: int) -> PeakCurve:
        """Return the peak by size for samples of `elements` elements, as it is known now."""

    @abstractmethod
    def covers(self, x: int, elements: int) -> bool:
        """Return whether a piece was measured that needs as much, whatever α and β are."""

    @abstractmethod
    def is_new(self, x: int, elements: int) -> bool:
        """Return whether shorter samples were measured, and no piece that needs as much."""

    @abstractmethod
    def hold(self, held: int) -> None:
        """Take the bytes in use when a call begins, outside the call's own needs."""

    @abstractmethod
    def add(self, x: int, peak: int, *, elements: int, first: bool = False) -> None:
        """Take one measurement: at most `peak` bytes were in use while pieces of size `x` ran.

        `elements`: of one of their samples. `first`: the call had one piece, which made the
        gradients.
        """

    @abstractmethod
    def state(self) -> object:
        """Return everything that is known, as JSON."""

    @classmethod
    @abstractmethod
    def restored(cls, state: Any) -> Self:
        """Make a model from what `state()` returned.

        Raises:
            KeyError, TypeError, ValueError: the state is malformed.
        """
