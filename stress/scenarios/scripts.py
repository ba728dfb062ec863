"""Memory from step to step: scripts, pure functions of the step.

Memory is in shares of the batch for which there is room.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from ..limits import ON_GPU
from ..record import Needs

# Part of a share's room that stays free, because the controller would not use it: it keeps 5 %
# free, and its fits have an error. On a GPU the allocator reserves more than it hands out: blocks
# of other sizes in its cache, and segments of 20 MiB.
MARGIN, ROOMY = 0.08, 0.25
# Steps from one return of memory to the next in `flapping`, and how many of them it stays.
FLAP, STAY = 6, 2

When = Literal["before", "forward", "backward"]


@dataclass(frozen=True)
class Supply:
    """Memory in one step."""

    left: float = 1.0  # share of the batch for which there is room next to the co-tenant
    capacity: float = 1.0  # share for which there would be room without the co-tenant
    # Place in the step from which it holds: before it, or the first forward or backward.
    when: When = "before"
    # Room for half of the smallest micro-batch's need only.
    starved: bool = False
    # Room for the optimizer's first step one parameter at a time, and not for all at once beside
    # copies of what it changes.
    optimizer: bool = False


def margin_of(kind: str) -> float:
    """Return the part that stays free under a kind of limit."""
    return ROOMY if kind in ON_GPU else MARGIN


@dataclass(frozen=True)
class Room:
    """Bytes of a share, for one model under one limit."""

    needs: Needs
    # Samples in a share of 1: the batch, or as many as fit into the user's budget.
    unit: float
    copies: int = 1  # processes that share it
    margin: float = MARGIN  # part of it that stays free

    def of(self, share: float) -> int:
        """Return the bytes that a share takes, with the controller's margin.

        A share below the smallest micro-batch counts as that.
        """
        return self.copies * round(
            self.needs.at(max(self.needs.sizes[0], share * self.unit)) / (1 - self.margin)
        )

    def capacity(self, supply: Supply) -> int:
        """Return the bytes for all processes."""
        if supply.starved:
            return round(self.needs.at(self.needs.sizes[0] / 2))
        if supply.optimizer:
            least = max(self.needs.held, self.needs.singly)
            return (least + max(least, self.needs.optimizer)) // 2
        return self.of(supply.capacity)

    def others(self, supply: Supply) -> int:
        """Return the bytes that the co-tenant holds."""
        return (
            0
            if supply.starved or supply.optimizer
            else max(0, self.of(supply.capacity) - self.of(supply.left))
        )


Script = Callable[[int, int, int], Supply]
"""(step, steps in all, seed) → supply."""


def always(supply: Supply) -> Script:
    return lambda step, steps, seed: supply


def cliff(step: int, steps: int, seed: int) -> Supply:
    """Take half in the middle of a backward, and leave after a third of the steps."""
    arrival, departure = steps // 4, steps * 7 // 12
    if not arrival <= step < departure:
        return Supply()
    return Supply(0.5, when="backward" if step == arrival else "before")


def sawtooth(step: int, steps: int, seed: int) -> Supply:
    """Fill memory up slowly and let it go at once, three times.

    A neighbour that leaks and is restarted does so.
    """
    period = max(6, steps // 3)
    return Supply(1.0 - 0.7 * (step % period) / (period - 1))


def random_walk(step: int, steps: int, seed: int) -> Supply:
    """Move memory up and down at random between a sixth and all.

    It moves at a random place of each step.
    """
    stream = random.Random(seed)
    left = 1.0
    when: When = "before"
    for _ in range(step + 1):
        left = min(1.0, max(1 / 6, left + stream.uniform(-0.3, 0.3)))
        when = stream.choice(("before", "forward", "backward"))
    return Supply(left, when=when)


def leak(step: int, steps: int, seed: int) -> Supply:
    """Shrink the room from all to an eighth, a little with each step, and never return it."""
    return Supply(1.0 - 0.875 * step / max(1, steps - 1))


def comes_and_goes(step: int, steps: int, seed: int) -> Supply:
    """Take two thirds for the second and the last but one quarter of the steps.

    The co-tenant comes in the middle of a forward.
    """
    quarter = max(1, steps // 4)
    if step // quarter not in {1, 2} or (step // quarter == 2 and step % quarter >= quarter // 2):
        return Supply()
    return Supply(1 / 3, when="forward" if step == quarter else "before")


def blind_spot(step: int, steps: int, seed: int) -> Supply:
    """Take half in the first quarter, and leave while the sensor is dead; see `dead`."""
    return Supply(0.5) if steps // 8 <= step < steps * 3 // 8 else Supply()


def dead(step: int, steps: int) -> bool:
    """Return whether the memory sensor is dead in this step of `blind_spot`.

    It is, from the first quarter to past the middle.
    """
    return steps // 4 <= step < steps * 5 // 8


def flapping(step: int, steps: int, seed: int) -> Supply:
    """Give memory for two fifths, and for all in two steps of six: fewer than the patience."""
    return Supply(1.0 if step % FLAP < STAY else 0.4)


def starving(step: int, steps: int, seed: int) -> Supply:
    """Give room for all at first, and then not even for one sample."""
    return Supply() if step < max(1, steps // 2) else Supply(starved=True)
