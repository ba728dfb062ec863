"""How much memory there is from step to step: scripts, pure functions of the step, in units of what the model needs.

A share of 1 is room for the whole batch at once, 0.5 for half of it; a share below the smallest micro-batch counts as that.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from ..record import Needs

MARGIN = 0.08
"""What stays free of the room for a share, so that it is room which the controller uses: 5 % that it keeps free, and what its lines through measured
peaks are off."""
ROOMY = 0.25
"""The same on a GPU, whose allocator reserves more than it hands out: blocks of other sizes in its cache, and segments of 20 MiB. The controller
leaves room for as much as it has seen."""

When = Literal["before", "forward", "backward"]


@dataclass(frozen=True)
class Weather:
    """Memory in one step.

    Attributes:
        left: share of the batch for which there is room beside the co-tenant.
        capacity: share for which there would be room without the co-tenant.
        when: where in the step it becomes so: before it, or in the first forward or backward.
        starved: there is not even room for the smallest micro-batch; only for half of what it takes beside the model.
        optimizer: there is room for model, gradients, optimizer's state, and half of what the optimizer's step takes beside them.
    """

    left: float = 1.0
    capacity: float = 1.0
    when: When = "before"
    starved: bool = False
    optimizer: bool = False


def margin_of(kind: str) -> float:
    """What stays free under a kind of limit."""
    return ROOMY if kind == "cuda" else MARGIN


@dataclass(frozen=True)
class Room:
    """What a share is in bytes, for one model in one world.

    Attributes:
        needs: as measured.
        unit: samples that a share of 1 stands for: the batch, or what fits into the budget that the user gave.
        copies: how many processes share it.
        margin: what stays free of it.
    """

    needs: Needs
    unit: float
    copies: int = 1
    margin: float = MARGIN

    def of(self, share: float) -> int:
        """Bytes that a share takes, with the controller's margin."""
        return self.copies * round(self.needs.at(max(self.needs.sizes[0], share * self.unit)) / (1 - self.margin))

    def capacity(self, weather: Weather) -> int:
        """Bytes for all."""
        if weather.starved:
            return round(self.needs.at(self.needs.sizes[0] / 2))
        if weather.optimizer:
            return (self.needs.held + max(self.needs.held, self.needs.optimizer)) // 2
        return self.of(weather.capacity)

    def others(self, weather: Weather) -> int:
        """Bytes that the co-tenant holds."""
        return 0 if weather.starved or weather.optimizer else max(0, self.of(weather.capacity) - self.of(weather.left))


Script = Callable[[int, int, int], Weather]
"""(step, steps in all, seed) → weather."""


def steady(step: int, steps: int, seed: int) -> Weather:
    """Room for all."""
    return Weather()


def too_big(step: int, steps: int, seed: int) -> Weather:
    """Room for three tenths, always."""
    return Weather(0.3, 0.3)


def cliff(step: int, steps: int, seed: int) -> Weather:
    """A co-tenant takes half in the middle of a backward, and leaves after a third of the steps."""
    arrival, departure = steps // 4, steps * 7 // 12
    if not arrival <= step < departure:
        return Weather()
    return Weather(0.5, when="backward" if step == arrival else "before")


def sawtooth(step: int, steps: int, seed: int) -> Weather:
    """Fills up slowly and is let go of at once, three times: a neighbour that leaks and is restarted."""
    period = max(6, steps // 3)
    return Weather(1.0 - 0.7 * (step % period) / (period - 1))


def random_walk(step: int, steps: int, seed: int) -> Weather:
    """Up and down at random between a sixth and all, moving at a random place of each step."""
    stream, left = random.Random(seed), 1.0
    when: When = "before"
    for _ in range(step + 1):
        left = min(1.0, max(1 / 6, left + stream.uniform(-0.3, 0.3)))
        when = stream.choice(("before", "forward", "backward"))
    return Weather(left, when=when)


def leak(step: int, steps: int, seed: int) -> Weather:
    """Headroom shrinks from all to an eighth, a little with each step, and never comes back."""
    return Weather(1.0 - 0.875 * step / max(1, steps - 1))


def long_sequences(step: int, steps: int, seed: int) -> Weather:
    """Room for a third of the longest batch; what is long is a matter of the batches."""
    return Weather(1 / 3, 1 / 3)


def whole_but_broken(step: int, steps: int, seed: int) -> Weather:
    """Room for all, of which no large block can be had; see `Scenario.largest`."""
    return Weather(1.2, 1.2)


def narrow(step: int, steps: int, seed: int) -> Weather:
    """Room for all that is held between two steps, but not for all that the optimizer's step takes beside it."""
    return Weather(optimizer=True)


def comes_and_goes(step: int, steps: int, seed: int) -> Weather:
    """A co-tenant takes two thirds for the second and the last but one quarter of the steps, from the middle of a forward on."""
    quarter = max(1, steps // 4)
    if step // quarter not in {1, 2} or (step // quarter == 2 and step % quarter >= quarter // 2):
        return Weather()
    return Weather(1 / 3, when="forward" if step == quarter else "before")


def blind_spot(step: int, steps: int, seed: int) -> Weather:
    """A co-tenant takes half in the first quarter, and leaves while the sensor is dead; see `dead`."""
    return Weather(0.5) if steps // 8 <= step < steps * 3 // 8 else Weather()


def dead(step: int, steps: int) -> bool:
    """Whether the memory sensor is dead in this step of `blind_spot`: from the first quarter to past the middle."""
    return steps // 4 <= step < steps * 5 // 8


FLAP = 6
"""Steps from one return of memory to the next in `flapping`, and for how many of them it stays."""
STAY = 2


def flapping(step: int, steps: int, seed: int) -> Weather:
    """Memory for two fifths, and for all in two steps of every six: less than the patience."""
    return Weather(1.0 if step % FLAP < STAY else 0.4)


def starving(step: int, steps: int, seed: int) -> Weather:
    """Room for all at first, and then not even for one sample."""
    return Weather() if step < max(1, steps // 2) else Weather(starved=True)


def shared(step: int, steps: int, seed: int) -> Weather:
    """Room for six tenths of each of two batches at once."""
    return Weather(0.6, 0.6)
