"""The steps by which a sample takes less and less memory, and when they are taken back.

"logits" ── "checkpoint" (2 of 8 blocks) ── "checkpoint" (4 of 8 blocks) ── … ── "offload" ── …
─────────────────────► each time a piece does not fit
◄───────────────────── each time there is more memory than with which the last step was needed
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

_QUARTERS = 4  # of the blocks that a step checkpoints


class Step(NamedTuple):
    """A rung of `RecoveryOptions.escalate`, or a part of one."""

    rung: str
    blocks: int = 0  # that it applies to, of a rung that is taken in parts
    of: int = 0  # blocks of the model
    ahead: bool = False  # tensors come back one ahead of backward, which takes more memory

    @property
    def part(self) -> str:
        """The part of the rung that it is, in words; empty where it is not divided."""
        if self.ahead:
            return "one tensor ahead"
        return f"{self.blocks} of {self.of} blocks" if self.of else ""

    def __str__(self) -> str:
        return f"{self.rung} ({self.part})" if self.part else self.rung


def steps_of(rung: str, blocks: Callable[[], int], *, copies_ahead: bool = False) -> Iterator[Step]:
    """Yield the steps of a rung.

    Args:
        rung: its name.
        blocks: returns how many blocks of the model can be checkpointed.
        copies_ahead: the device copies from the host while it computes.
    """
    if rung == "checkpoint":
        every = blocks()
        counts = {-(-every * part // _QUARTERS) for part in range(1, _QUARTERS + 1)}
        for count in sorted(counts - {0}):
            yield Step(rung, count, every)
        return
    if rung == "offload" and copies_ahead:
        yield Step(rung, ahead=True)
    yield Step(rung)


class Memory(NamedTuple):
    """The memory for a piece that does not fit.

    Attributes:
        capacity: bytes that this process can hold; None where that is not known.
        elements: of each sample of the piece.
    """

    capacity: int | None
    elements: int


class Ladder:
    """The steps that are in use for one loss function.

    Attributes:
        steps: from the first one taken to the last.
    """

    def __init__(self) -> None:
        self.steps: tuple[Step, ...] = ()
        self._needs: list[int | None] = []  # bytes that were too few without each step
        self._calls = 0  # that have ended since the last change
        self._planned: Mapping[Step, int] = {}  # bytes that a piece needs with each step alone
        self._elements = 0  # of each sample that was planned for

    def plan(self, needs: Mapping[Step, int], elements: int) -> None:
        """Take over the figures of a plan.

        Args:
            needs: bytes that the smallest piece needs with each step alone, the cheapest first.
            elements: of each sample.
        """
        self._planned, self._elements = needs, elements

    def next(
        self,
        rungs: Sequence[str],
        blocks: Callable[[], int],
        *,
        copies_ahead: bool = False,
        memory: Memory | None = None,
    ) -> Step | None:
        """Return the step that is taken next; None where none is left.

        The first one is the cheapest with which the smallest piece fits, by a plan.

        Args:
            rungs: the rungs, in order.
            blocks: returns how many blocks of the model can be checkpointed.
            copies_ahead: the device copies from the host while it computes.
            memory: the memory that there is; None where the order of the rungs counts alone.
        """
        left = list[Step]()
        for rung in rungs:
            every = list(steps_of(rung, blocks, copies_ahead=copies_ahead))
            taken = max((every.index(step) + 1 for step in self.steps if step in every), default=0)
            left += every[taken:]
        if not self.steps and memory is not None and memory.elements <= self._elements:
            capacity = memory.capacity or 0
            fitting = (each for each, needs in self._planned.items() if needs <= capacity)
            left = [*filter(left.__contains__, fitting), *left]
        return next(iter(left), None)

    def climb(self, step: Step, too_few: int | None) -> None:
        """Put a step in use.

        Args:
            step: the step.
            too_few: bytes with which a piece did not fit without it; None where that is not known.
        """
        self.steps = (*self.steps, step)
        self._needs.append(too_few)
        self._calls = 0

    def use(self, step: Step, too_few: int | None) -> None:
        """Put a step in the place of those in use; see `climb`."""
        self.steps, self._needs = (), []
        self.climb(step, too_few)

    def count_call(self) -> None:
        """Count a call that has ended well."""
        self._calls += 1

    def may_climb_down(self, capacity: int | None, *, patience: int, changed: float) -> bool:
        """Return whether the last step may be left.

        Args:
            capacity: bytes that this process can hold now; None where that is in doubt.
            patience: calls that have to end before.
            changed: fraction by which there has to be more memory.
        """
        if not self.steps or capacity is None or self._calls < patience:
            return False
        too_few = self._needs[-1]
        return too_few is not None and capacity > too_few * (1 + changed)

    def climb_down(self) -> Step:
        """Leave the last step, and return it."""
        *steps, last = self.steps
        self.steps = tuple(steps)
        self._needs.pop()
        self._calls = 0
        return last
