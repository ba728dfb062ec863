"""Made-up records of the stress tool."""

from dataclasses import replace
from typing import Any

from stress.record import Differences, End, Mark, Needs, Run, Step

NEEDS = Needs(
    samples=32,
    rest=1000,
    sizes=[1, 8, 16, 32],
    peaks=[1100, 1800, 2600, 4200],
    optimizer=3000,
    held=2000,
)
SAME = Differences(
    loss=1e-15,
    norm=1e-15,
    weight=1e-14,
    tolerance_loss=1e-12,
    tolerance_weight=1e-9,
    whole_loss=1e-15,
    whole_weight=1e-14,
)
_RAN: dict[str, Any] = {
    "samples": 32,
    "elements": 9,
    "size": 32,
    "partition": [[0, 32]],
    "replayed": 0,
    "loss": 1.0,
    "norm": 1.0,
}
_USUAL = Step(0, at=0.0, seconds=0.1, capacity=5000, others=0, live=1000, peak=4200, **_RAN)


def halves(size: int, samples: int = 32) -> list[list[int]]:
    return [[start, min(samples, start + size)] for start in range(0, samples, size)]


def step(number: int, **changes: Any) -> Step:
    return replace(_USUAL, step=number, **({"at": 0.1 * number} | changes))


def small(number: int, size: int = 16, **changes: Any) -> Step:
    """Return a step whose batch ran in smaller pieces."""
    return step(
        number, **({"size": size, "partition": halves(size), "peak": NEEDS.at(size)} | changes)
    )


def record(steps: list[Step] | None = None, **changes: Any) -> Run:
    steps = [step(i) for i in range(8)] if steps is None else steps
    run = Run("made_up", "budget", "wide", "float64", 0, NEEDS, steps, [], End(1000, 1000, 0), SAME)
    return replace(run, **changes)


def mark(what: str, at: int, before: int | None = None, after: int | None = None) -> Mark:
    return Mark(0.1 * at, at, what, f"{what} in words", before, after)


def oom(at: int) -> Mark:
    return mark("oom", at, 32, 16)


def grow(at: int) -> Mark:
    return mark("grow", at, 16, 32)
