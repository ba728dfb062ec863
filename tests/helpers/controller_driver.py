"""Calls of a controller, made by hand."""

import random
from collections.abc import Callable
from typing import Any

from elastic_mbs.controller.controller import (
    CallOutcome,
    Capacity,
    Controller,
    Decision,
    Extent,
    Key,
    Move,
    Policy,
)

KEY = Key("loss", "train", 0)


class Driver:
    """A controller with capacity, need and seconds of calls set by the test.

    There is no jitter, unless the options of the policy have it.
    """

    def __init__(self, start: int | None = None, *, seed: int = 0, **options: Any) -> None:
        self.now = 0.0
        self.capacity: int | None = 10_000
        self.need: Callable[[int], int] | None = lambda x: 100 + 10 * x
        self.fragmentation = 1.0
        self.seconds: Callable[[int], float] | None = None
        self.lost = 0.0  # seconds that a call with failures loses
        self.start = start
        self.policy = Policy(**{"jitter": 0.0, **options})
        self.seed = seed
        self.controller = self.make()

    def make(self) -> Controller:
        return Controller(
            start=self.start,
            policy=self.policy,
            clock=lambda: self.now,
            random=random.Random(self.seed),
        )

    def reading(self) -> Capacity | None:
        return None if self.capacity is None else Capacity(self.capacity, self.now)

    def peak(self, x: int) -> int | None:
        return None if self.need is None else self.need(x)

    def finish(
        self,
        decision: Decision,
        samples: int,
        elements: int,
        key: Key,
        *,
        size: int,
        pieces: int = 1,
        retries: int = 0,
        ooms: int = 0,
    ) -> Move | None:
        self.now += 1
        longest = -(-samples // -(-samples // size))
        outcome = CallOutcome(
            samples=samples,
            elements=elements,
            pieces=pieces,
            peak=self.peak(longest * elements) if decision.learning and not ooms else None,
            fragmentation=self.fragmentation,
            seconds=None if self.seconds is None else pieces * self.seconds(longest),
            retries=retries,
            ooms=ooms,
            lost=self.lost if ooms else 0.0,
        )
        return self.controller.end(key, outcome, self.reading())

    def clean(
        self, samples: int = 64, elements: int = 1, *, retries: int = 0, key: Key = KEY
    ) -> Move | None:
        decision = self.controller.begin(key, Extent(samples, elements, samples))
        return self.finish(
            decision,
            samples,
            elements,
            key,
            size=decision.size,
            pieces=-(-samples // decision.size),
            retries=retries,
        )

    def failing(
        self, attempted: int, *more: int, samples: int = 64, elements: int = 1
    ) -> tuple[list[int | None], Move | None]:
        """Make a call in which pieces of these lengths fail, one after the other."""
        decision = self.controller.begin(KEY, Extent(samples, elements, samples))
        sizes = [self.controller.out_of_memory(KEY, n, self.reading()) for n in (attempted, *more)]
        last = sizes[-1]
        return sizes, self.finish(decision, samples, elements, KEY, size=last or 1, ooms=len(sizes))

    def until_move(
        self, calls: int = 40, samples: int = 64, elements: int = 1
    ) -> tuple[int, Move | None]:
        """Make clean calls until the size changes; return their number, and the change."""
        for n in range(1, calls + 1):
            if move := self.clean(samples, elements):
                return n, move
        return calls, None

    def size(self, key: Key = KEY) -> int:
        """Return the present size of a track."""
        return int(self.saved(key)["size"])

    def ceilings(self) -> list[Any]:
        return list(self.saved(KEY)["ceilings"])

    def saved(self, key: Key) -> dict[str, Any]:
        tracks: Any = self.controller.state_dict()["tracks"]
        (row,) = (row for row in tracks if (row["name"], row["mode"], row["shape"]) == key)
        return dict(row)
