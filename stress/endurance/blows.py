"""Where memory moves in a step, and to what: drawn from a seed, and carried out between two operations."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from ..limits import MemoryLimit

NOTHING_MORE = "nothing more"  # what is held at that moment is all there is
BLOCKS = "blocks"  # all there is, but in small blocks only

Room = float | str | None
"""Memory there is: this share of what the whole batch needs beyond the smallest piece; one of the two above; None for as much as is wanted."""


@dataclass(frozen=True)
class Blow:
    """One move of memory."""

    at: int  # before which operation of the step, from 1; 0 is before the step
    room: Room  # what is left


@dataclass(frozen=True)
class Range:
    """What rooms are in bytes."""

    least: int  # what the smallest piece takes beyond what is held between two steps
    whole: int  # what the whole batch takes likewise
    slack: int = 0  # what stays beside `NOTHING_MORE`, where the interpreter's own memory counts, too
    blocks: bool = False  # whether the memory limit knows `BLOCKS`

    def of(self, share: float) -> int:
        """Bytes beyond what is held."""
        return max(0, self.least + int((self.whole - self.least) * share))


def draw(rng: random.Random, operations: int, range_: Range) -> list[Blow]:
    """The moves of one step, in their order, where the whole batch in one piece takes so many operations, about; more pieces take more."""
    before: Room = None if rng.random() < 0.3 else rng.uniform(0.05, 1.1) if rng.random() < 0.95 else -0.5
    found = [Blow(0, before)]
    for _ in range(rng.choice((0, 1, 1, 1, 2, 3))):
        early = rng.random() < 0.4  # as often among the first few as among the many that follow
        at = 1 + (int(math.exp(rng.random() * math.log(4 * operations))) if early else rng.randrange(2 * operations))
        kind = rng.random()
        found.append(Blow(at, NOTHING_MORE if kind < 0.6 else BLOCKS if range_.blocks and kind < 0.7 else rng.uniform(0.0, 0.8)))
        if rng.random() < 0.8:
            found.append(Blow(at + rng.randint(1, operations), None if rng.random() < 0.5 else rng.uniform(0.3, 1.2)))
    return sorted(found, key=lambda blow: blow.at)


class Blows(TorchDispatchMode):
    """A block in which memory moves as drawn, and after which there is as much as is wanted."""

    def __init__(self, limit: MemoryLimit, range_: Range, blows: Sequence[Blow]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        self._limit, self._range = limit, range_
        self._blows = list(reversed(blows))
        self._held = limit.live()
        self._count = 0

    def __enter__(self) -> Any:
        entered = super().__enter__()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        self._move()
        return entered

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]  # torch leaves it untyped
        self._make(None)

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        self._count += 1
        self._move()
        return func(*args, **(kwargs or {}))

    def _move(self) -> None:
        while self._blows and self._blows[-1].at <= self._count:
            self._make(self._blows.pop().room)

    def _make(self, room: Room) -> None:
        """Makes so much room."""
        if self._range.blocks:
            self._limit.fragment(max(1, self._range.whole // 16) if room == BLOCKS else None)
        if room is None or room == BLOCKS:
            self._limit.resize(None)
        elif isinstance(room, str):
            self._limit.resize(self._limit.live() + self._range.slack)
        else:
            self._limit.resize(self._held + self._range.of(room))
