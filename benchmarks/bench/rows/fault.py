"""An out-of-memory error in the middle of a step.

How much is lost by going on from there, and how much by making the step again? Starting the run
again, as accelerate's users do, loses the steps made so far: the whole run shows that.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import Tensor

from benchmarks.bench.compete import compete
from benchmarks.bench.contenders import Elastic, Fixed, Halving
from benchmarks.bench.job import Job, Task
from benchmarks.bench.models import MODELS
from benchmarks.bench.report import table
from benchmarks.bench.sweep import AMPLE
from elastic_mbs import Policy

PIECES, PIECE = 6, 4
"""Pieces of a step, and the one that fails."""
BEFORE, AFTER = 4, 12
"""Steps before the one with the failure, and from it on."""


@dataclass(frozen=True)
class Fault:
    """Cost of failures for one contender.

    Attributes:
        workload: its name.
        step: seconds of the loop by hand's step, median.
        contender: its name.
        lost: of each failure, in steps: how much longer than the loop by hand's the step was, with
        the
            eleven after it.
        at_once: of each failure, in steps: how much longer the step itself was.
    """

    workload: str
    step: float
    contender: str
    lost: list[float]
    at_once: list[float]


class Replaying(Halving):
    """Composer's rule, but the size is back at once.

    So the second making of the step is the whole cost.
    """

    name = "makes the step again"

    def train(self, job: Job) -> None:
        """Make all steps with pieces of the size that all contenders have."""
        for index in range(job.task.steps):
            with job.step(index) as batch:
                self.size = -(-job.samples // PIECES)
                self.step(job, batch)


def rows(quick: bool, rounds: int) -> list[Fault]:
    """Return the figures of all workloads."""
    return [row for name in MODELS for row in measure(name, 1 if quick else 3 * rounds)]


def measure(name: str, faults: int) -> list[Fault]:
    """Return the figures of one workload, in as many runs as there are failures."""
    make, samples = MODELS[name]
    size = -(-samples // PIECES)
    task = Task(partial(make, samples), [AMPLE] * (BEFORE + AFTER), turn=1)
    found: dict[str, Fault] = {}
    for _ in range(faults):
        jobs = dict(
            compete(
                task,
                [
                    partial(Fixed, size),
                    partial(Elastic, Policy(max_micro_batch_size=size)),
                    Replaying,
                ],
                fail,
            )
        )
        clean = jobs.pop(Fixed.name)
        step = statistics.median(each.seconds for each in clean.done)
        for who, job in jobs.items():
            longer = [
                (mine.seconds - other.seconds) / step
                for mine, other in zip(job.done, clean.done, strict=True)
            ][BEFORE:]
            row = found.setdefault(who, Fault(clean.workload.name, step, who, [], []))
            row.lost.append(sum(longer))
            row.at_once.append(longer[0])
    return list(found.values())


def fail(name: str, job: Job) -> None:
    """Make memory run out for the moment of one piece's forward.

    The loop that all are measured against is spared.
    """
    if name == Fixed.name:
        return
    inner = job.workload.loss_fn
    calls = itertools.count(1)

    def loss_fn(piece: Any) -> Tensor:
        if len(job.done) != BEFORE or next(calls) != PIECE:
            return inner(piece)
        limit = job.budget.limit
        job.budget.limit = job.budget.live
        try:
            return inner(piece)
        finally:
            job.budget.limit = limit

    job.workload = replace(job.workload, loss_fn=loss_fn)


def text(found: Sequence[Fault]) -> str:
    """Return the figures as a table."""
    return table(
        found,
        {
            "workload": lambda row: f"{row.workload}, {1e3 * row.step:.0f} ms",
            "": lambda row: row.contender,
            "the step itself, in steps more: median (least, most)": lambda row: middle(row.at_once),
            "with the eleven after it": lambda row: middle(row.lost),
        },
    )


def middle(values: Sequence[float]) -> str:
    """Return the median, and the outermost values."""
    return f"{statistics.median(values):.2f} ({min(values):.2f}, {max(values):.2f})"
