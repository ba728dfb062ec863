"""The peak as planned: a maximum of affine functions of the size, corrected by measurements.

The live bytes at each operation of a step are affine in the size, so their maximum is convex and
piecewise linear, and exact for any size. An allocator adds temporaries inside operations and
rounding, which grow with the activations. One factor κ, fitted to measured peaks, corrects for
them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from elastic_mbs.controller.memory_model import UNCHECKED, MemoryModel, PeakCurve
from elastic_mbs.controller.saved import checked

RECENT = 8  # sizes whose measurements count


class Line(NamedTuple):
    """Bytes at one operation, in pieces of x elements: fixed + κ·(work + slope·x).

    They come on top of the bytes that are held when a call begins.
    """

    fixed: float  # gradients, and copies of buffers
    work: float  # the part of activations and temporaries that does not depend on the size
    slope: float  # the part that does, per element

    def scaling(self, x: float) -> float:
        return self.work + self.slope * x

    def at(self, x: float, kappa: float = 1.0) -> float:
        return self.fixed + kappa * self.scaling(x)


def envelope(lines: Iterable[Line]) -> tuple[Line, ...]:
    """Return the lines that are the highest at some x ≥ 1, the flattest first."""
    hull: list[tuple[float, Line]] = []  # each with the x from which on it is the highest
    for line in sorted(lines, key=lambda line: (line.slope, line.at(0))):
        while hull and _is_above(line, *hull[-1]):
            hull.pop()
        begins = 1.0
        if hull:
            last = hull[-1][1]
            begins = (last.at(0) - line.at(0)) / (line.slope - last.slope)
        hull.append((begins, line))
    return tuple(line for _, line in hull)


def _is_above(line: Line, begins: float, last: Line) -> bool:
    """Return whether a line is above the last one from where that is the highest.

    Of two with one slope the later one is, by their order; rounding can tell otherwise.
    """
    return line.slope == last.slope or line.at(begins) >= last.at(begins)


class _Seen(NamedTuple):
    """A measurement at one size, in bytes."""

    measured: float  # of the part that scales with κ
    planned: float  # the same part for κ = 1
    rest: float  # everything else


class PeakModel(MemoryModel, PeakCurve):
    """Peak bytes of a call in pieces of x elements, and of the optimizer's step after it.

    Args:
        later: lines of a piece that adds to gradients, as all but the first piece of a call do.
        first: lines of a piece that makes the gradients.
        held: bytes held when a call begins, without gradients, once the optimizer has its state.
        step: peak bytes of the optimizer's step beyond `held`.
        reach: the largest x for which the lines are right; None where there is no limit.
    """

    STRIDE = 2**20  # any size: a plan reaches as far as its lines

    def __init__(
        self,
        later: Iterable[Line],
        first: Iterable[Line],
        *,
        held: int,
        step: int = 0,
        reach: int | None = None,
    ) -> None:
        self._later = envelope(later)
        self._first = envelope(first)
        if not (self._later and self._first):
            raise ValueError("a peak without a line")
        self._planned = held
        self._step = step
        self._reach = reach
        self._held: int | None = None  # as measured; None before the first call
        self._seen: dict[int, _Seen] = {}  # by size, the latest last
        self.kappa = 1.0
        self._spread = 0.0  # without a measurement, the margin of the policy has to do

    def at(self, elements: int) -> PeakCurve:
        return self

    def covers(self, x: int, elements: int) -> bool:
        return x <= self.largest_observed

    def is_new(self, x: int, elements: int) -> bool:
        return False

    @property
    def largest_observed(self) -> int:
        return max(self._seen, default=0)

    @property
    def reach(self) -> int | None:
        return self._reach

    @property
    def spread(self) -> float:
        return self._spread

    @property
    def slope(self) -> float:
        """Bytes per element of the steepest line."""
        return self.kappa * self._later[-1].slope

    def hold(self, held: int) -> None:
        """Take the bytes in use when a call begins, without gradients.

        Where they are less than planned, the optimizer's state is still to come.
        """
        self._held = held

    def line(self, x: int, *, first: bool = False) -> Line:
        """Return the highest line at pieces of x elements."""
        return max(self._first if first else self._later, key=lambda line: line.at(x, self.kappa))

    def add(self, x: int, peak: int, *, elements: int, first: bool = False) -> None:
        """Take the measured peak of a call's forward and backward, and fit κ to it.

        A peak that the optimizer's step could have made says nothing about κ, nor does one without
        activations in it.
        """
        held = self._planned if self._held is None else self._held
        line = self.line(x, first=first)
        measured = peak - held - line.fixed
        planned = line.scaling(x)
        if measured <= 0 or planned <= 0 or 0 < self._step >= peak - held:
            return
        self._seen.pop(x, None)  # so that the latest is last
        self._seen[x] = _Seen(measured, planned, held + line.fixed)
        while len(self._seen) > RECENT:
            del self._seen[next(iter(self._seen))]
        self._fit()

    def _fit(self) -> None:
        """Fit κ, and the spread: the largest relative residual of a peak."""
        seen = self._seen.values()
        if not seen:
            return
        self.kappa = sum(each.measured for each in seen) / sum(each.planned for each in seen)
        if len(seen) == 1:
            self._spread = UNCHECKED
            return
        self._spread = max(
            abs(self.kappa * each.planned - each.measured) / (each.rest + each.measured)
            for each in seen
        )

    def predict(self, x: int, *, first: bool = False) -> float | None:
        """Return the predicted peak in bytes of forward, backward and the optimizer's step.

        None beyond the reach.
        """
        if self._reach is not None and x > self._reach:
            return None
        held = max(self._planned, self._held or 0)
        return held + max(self._step, self.line(x, first=first).at(x, self.kappa))

    def state(self) -> dict[str, object]:
        return {
            "later": [list(line) for line in self._later],
            "first": [list(line) for line in self._first],
            "held": self._planned,
            "step": self._step,
            "reach": self._reach,
            "seen": [[x, *row] for x, row in self._seen.items()],
        }

    @classmethod
    def restored(cls, state: Any) -> PeakModel:
        """Make the model that `state()` describes.

        Raises:
            KeyError, TypeError, ValueError: the state is malformed.
        """
        model = cls(
            _lines(state["later"]),
            _lines(state["first"]),
            held=checked(state["held"], int),
            step=checked(state["step"], int),
            reach=None if state["reach"] is None else checked(state["reach"], int, 1),
        )
        for x, measured, planned, rest in state["seen"]:
            model._seen[checked(x, int, 1)] = _Seen(
                checked(measured, float, 1e-9), checked(planned, float, 1e-9), checked(rest, float)
            )
        model._fit()
        return model


def _lines(rows: Sequence[Sequence[Any]]) -> list[Line]:
    least = -(2.0**62)
    return [
        Line(checked(fixed, float), checked(work, float, least), checked(slope, float, least))
        for fixed, work, slope in rows
    ]
