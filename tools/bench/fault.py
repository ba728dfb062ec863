"""One out-of-memory error in the middle of a step: what is lost by going on from there, and by making the step again.

Starting the run again, as accelerate's users do, loses the steps made so far: that is in the whole run.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import Tensor

from elastic_mbs import Policy
from tools.bench.compete import compete
from tools.bench.contenders import Elastic, Fixed, Halving
from tools.bench.job import Job, Task
from tools.bench.models import MODELS
from tools.bench.report import table
from tools.bench.sweep import AMPLE

PIECES, PIECE, EVERY = 6, 4, 8
"""Pieces of a step, the one that fails, and the steps from failure to failure."""


@dataclass(frozen=True)
class Fault:
    """What failures cost one contender.

    Attributes:
        workload: what was trained.
        step: seconds of the hand-written loop's step, median.
        contender: who trained.
        faults: how many there were.
        lost: of each, in steps: how much longer than the hand-written loop's these steps were, until the next failure.
    """

    workload: str
    step: float
    contender: str
    faults: int
    lost: list[float]


class Replaying(Halving):
    """Composer's rule, but the size is back at once, so that the second making of the step is all that counts."""

    name = "makes the step again"

    def train(self, job: Job) -> None:
        """With pieces of the size that all have."""
        for index in range(job.task.steps):
            with job.step(index) as batch:
                self.size = -(-job.samples // PIECES)
                self.step(job, batch)


def rows(quick: bool, rounds: int) -> list[Fault]:
    """All workloads."""
    return [row for name in MODELS for row in measure(name, 1 if quick else 5 * rounds)]


def measure(name: str, faults: int) -> list[Fault]:
    """One workload."""
    make, samples = MODELS[name]
    size = -(-samples // PIECES)
    task = Task(partial(make, samples), [AMPLE] * (EVERY * (faults + 1)), turn=EVERY)
    jobs = dict(compete(task, [partial(Fixed, size), partial(Elastic, Policy(max_micro_batch_size=size)), Replaying], fail))
    clean = jobs.pop(Fixed.name)
    step = statistics.median(each.seconds for each in clean.done)
    found = []
    for who, job in jobs.items():
        longer = [mine.seconds - other.seconds for mine, other in zip(job.done, clean.done, strict=True)]
        found.append(Fault(clean.workload.name, step, who, faults, [sum(longer[at : at + EVERY]) / step for at in range(EVERY, len(longer), EVERY)]))
    return found


def fail(name: str, job: Job) -> None:
    """Memory is gone for the moment of one piece's forward, in every `EVERY`th step; not for the loop that all are measured against."""
    if name == Fixed.name:
        return
    inner, calls = job.workload.loss_fn, {0: 0}

    def loss_fn(piece: Any) -> Tensor:
        made = len(job.done)
        calls[made] = calls.get(made, 0) + 1
        if not (made and made % EVERY == 0 and calls[made] == PIECE):
            return inner(piece)
        limit, job.budget.limit = job.budget.limit, job.budget.live
        try:
            return inner(piece)
        finally:
            job.budget.limit = limit

    job.workload = replace(job.workload, loss_fn=loss_fn)


def text(found: Sequence[Fault]) -> str:
    """As a table."""
    return table(
        found,
        {
            "workload": lambda row: f"{row.workload}, {1e3 * row.step:.0f} ms",
            "": lambda row: row.contender,
            "failures": lambda row: row.faults,
            "each lost, in steps: median (least, most)": lambda row: f"{statistics.median(row.lost):.2f} ({min(row.lost):.2f}, {max(row.lost):.2f})",
        },
    )
