"""Autotuning: calls take turns in the ways that fit, and the fastest way stays.

Each way makes the same gradients, so no call is wasted, and times are those of real training.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from elastic_mbs.controller.memory_model import MemoryModel
from elastic_mbs.controller.messages import Key
from elastic_mbs.escalation.ladder import Step

TURNS = 3  # calls in each way, of which the quickest counts
NEAR = 1.1  # times are noisy: another way has to be faster by this factor than none


class Candidate(NamedTuple):
    """A way in which the batch fits, of those that take turns.

    Attributes:
        step: the step that it takes; None for none.
        memory: the predicted peak by size.
        size: the largest size that fits, in samples.
        until: bytes with which the whole batch fits without the step; None where it does now.
    """

    step: Step | None
    memory: MemoryModel
    size: int
    until: int | None


class Autotune:
    """The turns of some ways, and their times.

    A way that has run out of memory is left out. Where the device tells no time, there are no more
    turns, and no way is the fastest.

    Attributes:
        key: the kind of the calls.
        samples: of the planned batch.
        elements: of each of its samples.
    """

    def __init__(
        self, key: Key, samples: int, elements: int, candidates: Sequence[Candidate]
    ) -> None:
        self.key = key
        self.samples, self.elements = samples, elements
        self._left = [each for _ in range(TURNS) for each in candidates]
        self._candidates = {each.step: each for each in candidates}
        self._seconds = dict.fromkeys(self._candidates, math.inf)  # of a planned batch

    @property
    def candidate(self) -> Candidate | None:
        """The way of the next call; None after the last turn."""
        return self._left[0] if self._left else None

    def note(self, seconds: float | None, elements: int) -> None:
        """Note the time of a call in the candidate's way.

        Args:
            seconds: the time; None where the device does not tell it.
            elements: of its whole batch.
        """
        step = self._left.pop(0).step
        if seconds is None:
            self._left.clear()
            self._seconds = dict.fromkeys(self._seconds, math.inf)
            return
        scaled = seconds * self.samples * self.elements / elements
        self._seconds[step] = min(scaled, self._seconds[step])

    def leave_out(self) -> None:
        """Leave the candidate's way out: it has run out of memory."""
        step = self._left[0].step
        self._left = [each for each in self._left if each.step != step]
        self._seconds[step] = math.inf

    @property
    def fastest(self) -> Candidate | None:
        """The way with the least time; None where none has one."""
        step = min(self._seconds, key=self._seconds.__getitem__)
        least = self._seconds[step]
        if least == math.inf:
            return None
        plain = self._seconds.get(None, math.inf) <= NEAR * least
        return self._candidates[None if plain else step]

    @property
    def why(self) -> str:
        """The reason why the fastest way is the fastest, in words."""
        plain = self._seconds.get(None, math.inf)
        others = "" if plain == math.inf else f", and as it is {plain:.4g} s"
        return f"tried in turns, a batch takes {min(self._seconds.values()):.4g} s{others}"
