"""Where to strike: every operation of every call in every pattern, every line of recovery with every exception, or a sample of them."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
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

Way = tuple[str, bool]
"""A call, and whether the runtime has seen a clean one before."""

FAULTS: tuple[tuple[float, tuple[int, ...] | None], ...] = ((0.1, ()), (0.4, ()), (0.6, ()), (0.8, ()), (1.0, ()), (0.7, (1, 2, 3)), (0.7, None))
"""After what part of a call's operations memory runs out, and the distances of other faults, where the lines of recovery are struck."""


@dataclass(frozen=True)
class Sweep:
    """The points of one case.

    Attributes:
        target: the case.
        stride: every so many points only.
        most: at most about so many points, drawn by the case's name; None for all.
        calls: keys of `CALLS`.
    """

    target: Target
    stride: int = 1
    most: int | None = None
    calls: Sequence[str] = tuple(CALLS)

    def ways(self) -> dict[Way, Outcome]:
        """The calls that this case can make, and each without a failure."""
        found = {}
        compiled = self.target.build().backend is not None
        for name, warm in product(self.calls, (False, True)):
            if compiled and (name in ("verify", "eval") or (self.most is not None and warm)):
                continue  # compiling costs more than what is looked for
            if name == "verify" and whole_batch(self.target)[-1][1] < 2:
                continue  # a single sample has no parts to compare
            try:
                found[name, warm] = run(self.target, Operations(), call=name, warm=warm)
            except ElasticMBSError:  # a call that this case does not go with: verify refuses some
                continue
        return found

    def expected(self, ways: dict[Way, Outcome]) -> int:
        """Points to come in both dimensions, about."""
        if self.most is not None:
            return 2 * self.most
        operations = sum(clean.operations for clean in ways.values())
        return operations * (len(PATTERNS) + 4) // self.stride + 100 * len(FAULTS) * len(EXCEPTIONS) * len(ways) // self.stride

    def operations(self, ways: dict[Way, Outcome], patterns: Sequence[str] = (*PATTERNS, PAIR)) -> Iterator[Outcome]:
        """Fails operations."""
        points = [(way, pattern, n) for way, clean in ways.items() for pattern in patterns for n in range(1, clean.operations + 1)]
        case = self._case_to_keep()
        for (name, warm), pattern, n in self._chosen(points):
            if pattern != PAIR:
                yield self._run(Operations(n, PATTERNS[pattern]), name, warm, case)
                continue
            first = Operations(n)
            yield self._run(first, name, warm, case)
            for after in self._some(range(1, first.recovery + 1)):
                yield self._run(Operations(n, after=after), name, warm, case)

    def lines(self, ways: dict[Way, Outcome]) -> Iterator[Outcome]:
        """Raises exceptions in front of the lines of recovery that are run after memory has run out: the first and the last time each is run."""
        if self.target.build().backend is not None:
            return  # the lines are the same, and compiling is slow
        faults = [(way, fault, exception) for way in ways for fault in FAULTS for exception in EXCEPTIONS]
        known: dict[tuple[Way, float, bool], list[Line]] = {}
        for way, (part, distances), exception in faults if self.most is None else self._drawn(faults):
            (name, warm), first = way, max(1, round(ways[way].operations * part))
            if (way, part, distances is None) not in known:
                strikes = Lines(Operations(first, distances))
                run(self.target, strikes, call=name, warm=warm)
                known[way, part, distances is None] = [(*at, n) for at, seen in strikes.seen.items() for n in sorted({1, seen})]
            for line in self._some(known[way, part, distances is None][:: self.stride]):
                yield run(self.target, Lines(Operations(first, distances), line, exception), call=name, warm=warm)

    def _run(self, strikes: Operations, name: str, warm: bool, case: tuple[Subject, State] | None) -> Outcome:
        if case is not None:
            for leaf in case[0].leaves():
                leaf.grad = None
            case[1].streams.restore()
        return run(self.target, strikes, call=name, warm=warm, case=None if case is None else case[0])

    def _case_to_keep(self) -> tuple[Subject, State] | None:
        """A compiled case is not built for every point."""
        case = self.target.build()
        return None if case.backend is None else (case, State.of(case.leaves(), case.model))

    def _chosen(self, points: Sequence[T]) -> Sequence[T]:
        points = points[:: self.stride]
        return points if self.most is None or self.most >= len(points) else sorted_sample(points, self.most, self.target.name)

    def _drawn(self, points: Sequence[T]) -> Iterable[T]:
        """As many as there are to be, each again where there are fewer."""
        assert self.most is not None
        draw = random.Random(self.target.name)
        return (draw.choice(points) for _ in range(self.most))

    def _some(self, points: Sequence[T]) -> Sequence[T]:
        """All, or one of them where the number of points is bounded."""
        return points if self.most is None else random.Random(f"{self.target.name} {len(points)}").sample(points, min(1, len(points)))


def sorted_sample(points: Sequence[T], most: int, seed: str) -> list[T]:
    return [points[i] for i in sorted(random.Random(seed).sample(range(len(points)), most))]
