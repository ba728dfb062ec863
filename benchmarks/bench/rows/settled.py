"""Speed at the settled size under a limit that stays.

It is compared with the loop by hand with the best size of an exhaustive sweep.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from benchmarks.bench.compete import compete
from benchmarks.bench.contenders import Elastic, Fixed
from benchmarks.bench.job import Task
from benchmarks.bench.models import MODELS
from benchmarks.bench.report import table
from benchmarks.bench.rows.whole_run import ALONE
from benchmarks.bench.sweep import Sweep
from benchmarks.bench_overhead import Estimate, median_of

SETTLING, STEPS = 20, 80
"""Steps that do not count, and steps that do."""


@dataclass(frozen=True)
class Settled:
    """A workload.

    Attributes:
        workload: its name.
        step: seconds of the loop by hand's step, median.
        size: samples of its longest piece, the best of all sizes.
        sizes: of elastic_mbs in the steps that count.
        slower: its time against the loop's, -1, of step and step.
        control: the same of a second loop by hand: the reading where nothing differs.
    """

    workload: str
    step: float
    size: int
    sizes: list[int]
    slower: Estimate
    control: Estimate


class Again(Fixed):
    """A second loop by hand with a model of its own."""

    name = "best fixed size, again"


def rows(quick: bool, rounds: int) -> list[Settled]:
    """Return the figures of all workloads."""
    return [
        measure(name, 1 if quick else rounds, *((8, 4) if quick else (SETTLING, STEPS)))
        for name in MODELS
    ]


def measure(name: str, rounds: int, settling: int, steps: int) -> Settled:
    """Return the figures of one workload.

    Each round has models of its own: the place of a model in memory makes a difference.
    """
    make = partial(MODELS[name][0], MODELS[name][1])
    sweep = Sweep(make, 1 if steps < STEPS else 3, most=ALONE + 3)
    limit = sweep.limit_for(ALONE)
    size = sweep.best(limit).size
    seconds = list[float]()
    sizes = set[int]()
    ratios: dict[str, list[float]] = {Elastic.name: [], Again.name: []}
    for _ in range(rounds):
        jobs = compete(
            Task(make, [limit] * (settling + steps)),
            [partial(Fixed, size), Elastic, partial(Again, size)],
        )
        done = {who: job.done[settling:] for who, job in jobs.items()}
        seconds += [step.seconds for step in done[Fixed.name]]
        sizes |= {step.size for step in done[Elastic.name]}
        for who, found in ratios.items():
            found += [
                mine.seconds / other.seconds - 1
                for mine, other in zip(done[who], done[Fixed.name], strict=True)
            ]
    return Settled(
        name,
        statistics.median(seconds),
        size,
        sorted(sizes),
        median_of(ratios[Elastic.name]),
        median_of(ratios[Again.name]),
    )


def text(found: Sequence[Settled]) -> str:
    """Return the figures as a table."""
    return table(
        found,
        {
            "workload": lambda row: f"{row.workload}, {1e3 * row.step:.0f} ms",
            "best size": lambda row: row.size,
            "elastic_mbs's": lambda row: ", ".join(map(str, row.sizes)),
            "slower, median [95 %]": lambda row: row.slower,
            "a second loop by hand": lambda row: row.control,
        },
    )
