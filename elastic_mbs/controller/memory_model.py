"""The peak memory of a call as a function of the size of its pieces, in elements."""

from __future__ import annotations

import bisect
from abc import ABC, abstractmethod
from typing import Any, ClassVar, Self

UNCHECKED = 0.05  # the assumed prediction error, as a fraction, until a prediction was compared


class MemoryModel(ABC):
    """Peak bytes by size: fitted to measurements (`MemoryFit`) or planned (`PeakModel`)."""

    STRIDE: ClassVar[int]  # a size may grow at once to this many times the present one

    @property
    @abstractmethod
    def largest_observed(self) -> int:
        """The largest size measured; 0 before the first measurement."""

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
    def hold(self, held: int) -> None:
        """Take the bytes in use when a call begins, outside the call's own needs."""

    @abstractmethod
    def add(self, x: int, peak: int, *, first: bool = False) -> None:
        """Take one measurement: at most `peak` bytes were in use while pieces of size `x` ran.

        `first`: the call had one piece, which made the gradients.
        """

    @abstractmethod
    def predict(self, x: int, *, first: bool = False) -> float | None:
        """Return the predicted peak in bytes; None where it is not known."""

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
