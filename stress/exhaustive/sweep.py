"""Places to strike: every operation of every call in every pattern, and every line of recovery.

A sample of them where the number of points is bounded.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import TypeVar

from elastic_mbs import ElasticMBSError

from ..models.subject import Subject
from ..reference.state import State
from .calls import CALLS
from .run import Outcome, run
from .strike import EXCEPTIONS, PAIR, PATTERNS, Line, Lines, Operations
from .target import Target, whole_batch

T = TypeVar("T")

Way = tuple[str, bool]  # a call, and whether the runtime has made a clean one before
# Fraction of a call's operations after which memory runs out, and the distances of other faults.
Fault = tuple[float, tuple[int, ...] | None]
FAULTS: tuple[Fault, ...] = (
    (0.1, ()),
    (0.4, ()),
    (0.6, ()),
    (0.8, ()),
    (1.0, ()),
    (0.7, (1, 2, 3)),
    (0.7, None),
)


@dataclass(frozen=True)
class Sweep:
    """Points of one case."""

    target: Target
    stride: int = 1  # step from one point to the next
    first: int = 1  # number of the first point
    # Largest number of points in a dimension, about, drawn by the case's name; None for all.
    most: int | None = None
    calls: Sequence[str] = tuple(CALLS)

    def ways(self) -> dict[Way, Outcome]:
        """Return the calls that this case can make, each made once without a failure."""
        found = {}
        case = self.target.build()
        compiled = case.backend is not None
        compares = case.over is not None
        for name, warm in product(self.calls, (False, True)):
            if compiled and (name in ("verify", "eval") or (self.most is not None and warm)):
                continue  # compiling costs more than the case would show
            if compares and name in ("loop", "eval", "verify"):
                continue  # a loss over embeddings is for `backward`
            if name == "verify" and whole_batch(self.target)[-1][1] < 2:
                continue  # a single sample has no parts to compare
            try:
                found[name, warm] = run(self.target, Operations(), call=name, warm=warm)
            except ElasticMBSError:  # some calls refuse a case, as verify does
                continue
        return found

    def expected(self, ways: dict[Way, Outcome]) -> int:
        """Return the approximate number of points to come in both dimensions."""
        if self.most is not None:
            return 2 * self.most
        operations = sum(clean.operations for clean in ways.values())
        return (
            operations * (len(PATTERNS) + 4) // self.stride
            + 100 * len(FAULTS) * len(EXCEPTIONS) * len(ways) // self.stride
        )

    def operations(
        self, ways: dict[Way, Outcome], patterns: Sequence[str] = (*PATTERNS, PAIR)
    ) -> Iterator[Outcome]:
        points = [
            (way, pattern, n)
            for way, clean in ways.items()
            for pattern in patterns
            for n in range(1, clean.operations + 1)
        ][self.first - 1 :: self.stride]
        if self.most is not None and self.most < len(points):
            drawn = random.Random(self.target.name).sample(range(len(points)), self.most)
            points = [points[i] for i in sorted(drawn)]
        case = self.target.build()
        # Compiling for every point would take hours.
        kept = (case, State.of(case.leaves(), case.model)) if case.backend is not None else None
        for way, pattern, n in points:
            if pattern != PAIR:
                yield self._run(Operations(n, PATTERNS[pattern]), way, kept)
                continue
            first = Operations(n)
            yield self._run(first, way, kept)
            for after in self._some(range(1, first.recovery + 1)):
                yield self._run(Operations(n, after=after), way, kept)

    def lines(self, ways: dict[Way, Outcome]) -> Iterator[Outcome]:
        """Raise exceptions in front of lines of recovery, after memory has run out.

        Each line is struck the first and the last time that it is run.
        """
        if self.target.build().backend is not None:
            return  # the lines are the same, and compiling is slow
        draw = random.Random(self.target.name)
        faults = [
            (way, fault, exception) for way in ways for fault in FAULTS for exception in EXCEPTIONS
        ]
        known: dict[tuple[Way, Fault], list[Line]] = {}
        for way, fault, exception in (
            faults if self.most is None else (draw.choice(faults) for _ in range(self.most))
        ):
            part, distances = fault
            first = max(1, round(ways[way].operations * part))
            if (way, fault) not in known:
                strikes = Lines(Operations(first, distances))
                self._run(strikes, way)
                known[way, fault] = [
                    (*at, n) for at, seen in strikes.seen.items() for n in sorted({1, seen})
                ]
            for line in self._some(known[way, fault][self.first - 1 :: self.stride]):
                yield self._run(Lines(Operations(first, distances), line, exception), way)

    def _run(
        self, strikes: Operations | Lines, way: Way, kept: tuple[Subject, State] | None = None
    ) -> Outcome:
        case = None
        if kept is not None:
            case, start = kept
            for leaf in case.leaves():
                leaf.grad = None
            start.streams.restore()
        return run(self.target, strikes, call=way[0], warm=way[1], case=case)

    def _some(self, points: Sequence[T]) -> Sequence[T]:
        """Return all points, or a sample where their number is bounded."""
        return (
            points
            if self.most is None
            else random.Random(f"{self.target.name} {len(points)}").sample(
                points, min(1, len(points))
            )
        )
