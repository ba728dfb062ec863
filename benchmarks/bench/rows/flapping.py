"""A co-tenant that comes and goes at random, against the size that fits at all times."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from benchmarks.bench.compete import compete
from benchmarks.bench.contenders import Elastic, Fixed, Halving, Oracle
from benchmarks.bench.job import Task
from benchmarks.bench.models import conv
from benchmarks.bench.report import table
from benchmarks.bench.rows.whole_run import ALONE, VISITED
from benchmarks.bench.sweep import Sweep


@dataclass(frozen=True)
class Flapping:
    """A contender's run.

    Attributes:
        phases: how short and how long the co-tenant stays, or stays away, in steps.
        contender: its name.
        seconds: duration of all steps.
        fixed: these seconds against the best fixed size's.
        ooms: out-of-memory errors.
    """

    phases: tuple[int, int]
    contender: str
    seconds: float
    fixed: float
    ooms: int


def rows(quick: bool, rounds: int) -> list[Flapping]:
    """Return the figures of short and long phases."""
    make = partial(conv, 16 if quick else 48)
    sweep = Sweep(make, 1 if quick else 3, most=8)
    limits = sweep.limit_for(ALONE), sweep.limit_for(VISITED)
    found = []
    for phases in [(2, 8)] if quick else [(2, 8), (10, 40)]:
        for seed in range(rounds):
            task = Task(make, script(phases, limits, 12 if quick else 100, seed))
            jobs = compete(
                task,
                [
                    partial(Oracle, sweep),
                    partial(Fixed, sweep.best(limits[1]).size),
                    Elastic,
                    Halving,
                ],
            )
            found += [
                Flapping(
                    phases,
                    name,
                    job.seconds,
                    job.seconds / jobs[Fixed.name].seconds,
                    job.budget.ooms,
                )
                for name, job in jobs.items()
            ]
    return found


def script(phases: tuple[int, int], limits: tuple[int, int], steps: int, seed: int) -> list[int]:
    """Return the bytes at each step.

    One limit and the other take turns, for a random number of steps each.
    """
    rng = random.Random(seed)
    found = list[int]()
    for at in range(steps):
        found += [limits[at % 2]] * rng.randint(*phases)
    return found[:steps]


def text(found: Sequence[Flapping]) -> str:
    """Return the figures as a table."""
    return table(
        found,
        {
            "phases": lambda row: f"{row.phases[0]} to {row.phases[1]} steps",
            "": lambda row: row.contender,
            "seconds": lambda row: f"{row.seconds:.1f}",
            "against the best fixed size": lambda row: f"{row.fixed:.3f} ×",
            "OOMs": lambda row: row.ooms,
        },
    )
