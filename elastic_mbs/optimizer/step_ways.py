"""Which way of making an optimizer's step has worked, so that the next one like it need not fail first.

A step that fits one parameter at a time only would otherwise run out of memory, collect garbage and be put back twice, every time: seconds for what
takes milliseconds. The better ways are tried again after a while, at longer and longer intervals, because memory may have come back.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

Ways = tuple[int, int]
"""Of taking the copies, and of stepping; each numbered from the best, 0."""

BEST: Ways = (0, 0)
LONGEST = 64
"""Steps between two tries of the best ways, at most."""


@dataclass
class _Known:
    ways: Ways
    left: int
    pause: int


class StepWays:
    """What has worked, by what a step's need is kept by."""

    def __init__(self) -> None:
        self._known: dict[Hashable, _Known] = {}

    def first(self, key: Hashable) -> Ways:
        """The ways to begin with."""
        known = self._known.get(key)
        if known is None or known.left <= 0:
            return BEST
        known.left -= 1
        return known.ways

    def worked(self, key: Hashable, began: Ways, ways: Ways) -> None:
        """A step that began with `began` was made in these ways."""
        known = self._known.get(key)
        if ways == BEST:
            self._known.pop(key, None)
        elif known is not None and began != BEST:
            known.ways = ways
        else:  # the best have been tried in vain
            pause = 1 if known is None else min(2 * known.pause, LONGEST)
            self._known[key] = _Known(ways, pause, pause)
