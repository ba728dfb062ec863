"""How much memory there is from step to step: scripts, pure functions of the step, in shares of the batch for which there is room."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from ..limits import ON_GPU
from ..record import Needs

# What stays free of the room for a share, which the controller would not use: 5 % that it keeps
# free, and the error of its fits. On a GPU the allocator reserves more than it hands out: blocks of
# other sizes in its cache, and segments of 20 MiB.
MARGIN, ROOMY = 0.08, 0.25
# steps from one return of memory to the next in `flapping`, and for how many of them it stays
FLAP, STAY = 6, 2

When = Literal["before", "forward", "backward"]


@dataclass(frozen=True)
class Supply:
    """Memory in one step."""

    left: float = 1.0  # share of the batch for which there is room next to the co-tenant
    capacity: float = 1.0  # share for which there would be room without the co-tenant
    # where in the step it becomes so: before it, or in the first forward or backward
    when: When = "before"
    # there is not even room for the smallest micro-batch, only for half of what it takes
    starved: bool = False
    # room for model, gradients, optimizer state, and half of what the optimizer's step takes on top
    optimizer: bool = False


def margin_of(kind: str) -> float:
    """What stays free under a kind of limit."""
    return ROOMY if kind in ON_GPU else MARGIN


@dataclass(frozen=True)
class Room:
    """What a share is in bytes, for one model under one limit."""

    needs: Needs
    # samples that a share of 1 stands for: the batch, or what fits into the budget that the user
    # gave
    unit: float
    copies: int = 1  # how many processes share it
    margin: float = MARGIN  # what stays free of it

    def of(self, share: float) -> int:
        """Bytes that a share takes, with the controller's margin; one below the smallest micro-batch counts as that."""
        return self.copies * round(
            self.needs.at(max(self.needs.sizes[0], share * self.unit)) / (1 - self.margin)
        )

    def capacity(self, supply: Supply) -> int:
        """Bytes for all."""
        if supply.starved:
            return round(self.needs.at(self.needs.sizes[0] / 2))
        if supply.optimizer:
            return (self.needs.held + max(self.needs.held, self.needs.optimizer)) // 2
        return self.of(supply.capacity)

    def others(self, supply: Supply) -> int:
        """Bytes that the co-tenant holds."""
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
    """A co-tenant takes half in the middle of a backward, and leaves after a third of the steps."""
    arrival, departure = steps // 4, steps * 7 // 12
    if not arrival <= step < departure:
        return Supply()
    return Supply(0.5, when="backward" if step == arrival else "before")


def sawtooth(step: int, steps: int, seed: int) -> Supply:
    """Fills up slowly and is let go of at once, three times: a neighbour that leaks and is restarted."""
    period = max(6, steps // 3)
    return Supply(1.0 - 0.7 * (step % period) / (period - 1))


def random_walk(step: int, steps: int, seed: int) -> Supply:
    """Up and down at random between a sixth and all, moving at a random place of each step."""
    stream, left = random.Random(seed), 1.0
    when: When = "before"
    for _ in range(step + 1):
        left = min(1.0, max(1 / 6, left + stream.uniform(-0.3, 0.3)))
        when = stream.choice(("before", "forward", "backward"))
    return Supply(left, when=when)


def leak(step: int, steps: int, seed: int) -> Supply:
    """Headroom shrinks from all to an eighth, a little with each step, and never comes back."""
    return Supply(1.0 - 0.875 * step / max(1, steps - 1))


def comes_and_goes(step: int, steps: int, seed: int) -> Supply:
    """A co-tenant takes two thirds for the second and the last but one quarter of the steps, from the middle of a forward on."""
    quarter = max(1, steps // 4)
    if step // quarter not in {1, 2} or (step // quarter == 2 and step % quarter >= quarter // 2):
        return Supply()
    return Supply(1 / 3, when="forward" if step == quarter else "before")


def blind_spot(step: int, steps: int, seed: int) -> Supply:
    """A co-tenant takes half in the first quarter, and leaves while the sensor is dead; see `dead`."""
    return Supply(0.5) if steps // 8 <= step < steps * 3 // 8 else Supply()


def dead(step: int, steps: int) -> bool:
    """Whether the memory sensor is dead in this step of `blind_spot`: from the first quarter to past the middle."""
    return steps // 4 <= step < steps * 5 // 8


def flapping(step: int, steps: int, seed: int) -> Supply:
    """Memory for two fifths, and for all in two steps of every six: less than the patience."""
    return Supply(1.0 if step % FLAP < STAY else 0.4)


def starving(step: int, steps: int, seed: int) -> Supply:
    """Room for all at first, and then not even for one sample."""
    return Supply() if step < max(1, steps // 2) else Supply(starved=True)
