"""Peak memory as planned: a maximum of affine functions of the size, of which the part that scales is corrected by what is measured.

The live bytes at each operation of a step are affine in the size, so their maximum is convex and
piecewise linear, and exact for any size. What an allocator adds (temporaries inside operations,
rounding) grows with the activations: one factor κ for them, from measured peaks, corrects it.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from elastic_mbs.controller.fit import UNCHECKED, checked

RECENT = 8  # sizes whose measurements count


class Line(NamedTuple):
    """Bytes at one operation beyond what is held when a call begins, for pieces of x elements: fixed + κ·(work + slope·x)."""

    fixed: float  # gradients, and copies of buffers
    work: float  # the part of activations and temporaries that does not depend on the size
    slope: float  # the part that does, per element

    def scaling(self, x: float) -> float:
        return self.work + self.slope * x

    def at(self, x: float, kappa: float = 1.0) -> float:
        return self.fixed + kappa * self.scaling(x)


def envelope(lines: Iterable[Line]) -> tuple[Line, ...]:
    """Those of the lines that are the highest at some x ≥ 1, the flattest first."""
    hull: list[tuple[float, Line]] = []  # each with the x from which on it is the highest
    for line in sorted(lines, key=lambda line: (line.slope, line.at(0))):
        while hull and line.at(hull[-1][0]) >= hull[-1][1].at(hull[-1][0]):
            hull.pop()
        last = hull[-1][1] if hull else None
        hull.append(
            (1.0 if last is None else (last.at(0) - line.at(0)) / (line.slope - last.slope), line)
        )
    return tuple(line for _, line in hull)


class PeakModel:
    """Peak bytes of a call in pieces of x elements, with what the process holds besides.

    Args:
        later: lines of a piece that finds gradients there, as all but the first of a call do.
        first: those of a call's only piece, where the gradients are made in it.
        held: bytes held when a call begins, without gradients, once there is an optimizer's state.
        step: peak bytes of the optimizer's step beyond `held`.
        reach: the largest x for which the lines are right; None where there is no limit.
    """

    STRIDE = 2**20  # times the present size that it may grow to at once: any

    def __init__(
        self,
        later: Iterable[Line],
        first: Iterable[Line],
        *,
        held: int,
        step: int = 0,
        reach: int | None = None,
    ) -> None:
        self._later, self._first = envelope(later), envelope(first)
        if not (self._later and self._first):
            raise ValueError("a peak without a line")
        self._planned, self._step, self._reach = held, step, reach
        self._held: int | None = None  # as reported
        # by size, the latest last: bytes that scale, as measured and as planned; and the rest
        self._seen: dict[int, tuple[float, float, float]] = {}
        self.kappa, self.spread = 1.0, 0.0  # a plan keeps the margin of the policy free instead

    @property
    def largest_observed(self) -> int:
        """The largest size measured, in elements; 0 while none is."""
        return max(self._seen, default=0)

    @property
    def slope(self) -> float:
        """Bytes per element beyond all sizes."""
        return self.kappa * self._later[-1].slope

    def hold(self, held: int) -> None:
        """Takes the bytes in use when a call begins, without gradients.

        Where they are less than planned, the optimizer's state is still to come.
        """
        self._held = held

    def line(self, x: int, *, first: bool = False) -> Line:
        """The highest line at pieces of x elements."""
        return max(self._first if first else self._later, key=lambda line: line.at(x, self.kappa))

    def add(self, x: int, peak: int, *, first: bool = False) -> None:
        """Takes one measurement of a call's forward and backward: κ is the ratio of what was measured to what was planned, over the latest sizes.

        A peak that the optimizer's step could have made says nothing of them, and one without
        activations in it is no such peak.
        """
        held = self._planned if self._held is None else self._held
        line = self.line(x, first=first)
        measured, planned = peak - held - line.fixed, line.scaling(x)
        if measured <= 0 or planned <= 0 or 0 < self._step >= peak - held:
            return
        self._seen.pop(x, None)
        self._seen[x] = measured, planned, held + line.fixed
        while len(self._seen) > RECENT:
            del self._seen[next(iter(self._seen))]
        self._fit()

    def _fit(self) -> None:
        """κ, and the largest relative residual of a peak: by as much a prediction may be wrong."""
        if self._seen:
            self.kappa = sum(measured for measured, _, _ in self._seen.values()) / sum(
                planned for _, planned, _ in self._seen.values()
            )
            off = [
                abs(self.kappa * planned - measured) / (rest + measured)
                for measured, planned, rest in self._seen.values()
            ]
            self.spread = max(off) if len(off) > 1 else UNCHECKED

    def predict(self, x: int, *, first: bool = False) -> float | None:
        """Predicted peak in bytes of forward, backward and the optimizer's step, or None beyond the reach."""
        if self._reach is not None and x > self._reach:
            return None
        held = max(self._planned, self._held or 0)
        return held + max(self._step, self.line(x, first=first).at(x, self.kappa))

    def largest(self, budget: float, limit: int) -> int:
        """The largest size up to `limit` whose predicted peak, with its uncertainty, is at most `budget` bytes; 0 if none is known to fit."""
        sizes = range(1, (limit if self._reach is None else min(limit, self._reach)) + 1)
        return bisect.bisect_left(sizes, True, key=lambda x: not self.fits(x, budget))

    def fits(self, x: int, budget: float, *, first: bool = False) -> bool:
        """Whether the predicted peak is at most `budget` bytes; beyond what was measured with its uncertainty."""
        predicted = self.predict(x, first=first)
        return (
            predicted is not None
            and predicted * (1 + (self.spread if x > self.largest_observed else 0.0)) <= budget
        )

    def state(self) -> dict[str, object]:
        """What is known, as JSON."""
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
        """The model that `state()` was taken from; KeyError, TypeError or ValueError if it is malformed."""
        reach = None if state["reach"] is None else checked(state["reach"], int, 1)
        held, step = checked(state["held"], int), checked(state["step"], int)
        model = cls(
            _lines(state["later"]), _lines(state["first"]), held=held, step=step, reach=reach
        )
        for x, measured, planned, rest in state["seen"]:
            model._seen[checked(x, int, 1)] = (
                checked(measured, float, 1e-9),
                checked(planned, float, 1e-9),
                checked(rest, float),
            )
        model._fit()
        return model


def _lines(rows: Sequence[Sequence[Any]]) -> list[Line]:
    return [
        Line(
            checked(fixed, float),
            checked(work, float, -(2.0**62)),
            checked(slope, float, -(2.0**62)),
        )
        for fixed, work, slope in rows
    ]
