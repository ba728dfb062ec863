"""A whole run: start-up, one visit of a co-tenant, and its end.

It also shows the cost of a start, and the speed at the settled size. On a simulated CUDA device no
time means anything: there it is counts alone.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from benchmarks.bench.compete import compete
from benchmarks.bench.contenders import Contender, Elastic, Halving, Oracle, Planned, restarting
from benchmarks.bench.device import DEVICE_MODELS, settle
from benchmarks.bench.job import Done, Job, Task
from benchmarks.bench.models import CPU, MODELS
from benchmarks.bench.report import table
from benchmarks.bench.sweep import Sweep
from benchmarks.workloads import Workload
from stress.limits import simcuda

ALONE, VISITED = 3, 7
"""Pieces of the best size without the co-tenant and with it."""


@dataclass(frozen=True)
class Course:
    """Number of steps of a run, and the time of the co-tenant's visit."""

    steps: int = 200
    comes: int = 80
    visit: int = 20

    def limits(self, alone: int, visited: int) -> list[int]:
        """Return the bytes at each step."""
        return [
            visited if self.comes <= step < self.comes + self.visit else alone
            for step in range(self.steps)
        ]


QUICK = Course(steps=24, comes=12, visit=4)


@dataclass(frozen=True)
class Counts:
    """Figures of one contender's run without a clock.

    Attributes:
        workload: its name.
        visit: steps that the co-tenant stayed.
        contender: its name.
        ooms: out-of-memory errors, those of a search among them.
        made: steps made, also in vain.
        start_ooms: errors until the size of the start had settled.
        start_steps: steps made until then.
        back: steps from the co-tenant's end until the best size was back; None: never.
        replayed: samples that were run again, those of a search among them.
        distance: of the trained model from the oracle's, as a fraction of the way from the start;
            None with BatchNorm, which a split changes.
        sizes: longest piece of each step, 0 where it failed.
    """

    workload: str
    visit: int
    contender: str
    ooms: int
    made: int
    start_ooms: int
    start_steps: int
    back: int | None
    replayed: int
    distance: float | None
    sizes: list[int]


@dataclass(frozen=True)
class Run(Counts):
    """Figures of one contender's run with a clock.

    Attributes:
        step_ms: of the oracle, median of the settled steps before the visit.
        seconds: all of the run, steps made in vain and searches among them.
        ratio: to the oracle's.
        start_lost: seconds of the start beyond the oracle's for the steps that counted.
        settled: seconds of a step against the oracle's same one, median of the last half before the
            visit; below 1 is faster.
        settled_low: first quartile of these ratios.
        settled_high: third quartile.
        milliseconds: of each step.
    """

    step_ms: float
    seconds: float
    ratio: float
    start_lost: float
    settled: float
    settled_low: float
    settled_high: float
    milliseconds: list[float]


def rows(quick: bool, rounds: int, device: torch.device = CPU) -> list[Counts]:
    """Return the figures of all workloads, on a CPU or on a CUDA device."""
    return on_cpu(quick, rounds) if device.type == "cpu" else on_cuda(quick, rounds, device)


def on_cuda(quick: bool, rounds: int, device: torch.device) -> list[Counts]:
    """Return the figures without the peers that start the run again."""
    settle(device)
    simulated = simcuda.inside()
    course = QUICK if quick else Course(steps=30, comes=12, visit=6) if simulated else Course()
    made = [
        partial(make, samples // 2 if quick else samples, device)
        for make, samples in DEVICE_MODELS.values()
    ]
    return [
        row
        for _ in range(rounds)
        for make in made
        for row in measure(make, course, rounds=0 if simulated else 1 if quick else 3, turn=0)
    ]


def on_cpu(quick: bool, rounds: int) -> list[Counts]:
    """Return the figures of all contenders.

    From round to round the two visits change places. Peers that restart take long: they have short
    visits only.
    """
    found = []
    for turn in range(rounds):
        for at, (make, samples) in enumerate(MODELS.values()):
            long = (at + turn) % 2
            course = QUICK if quick else Course(visit=(20, 60)[long])
            size = max(28, samples // 4) if quick else samples
            found += measure(
                partial(make, size),
                course,
                rounds=1 if quick else 3,
                more=() if long else restarting(),
            )
    return found


def measure(
    make: Callable[[], Workload],
    course: Course,
    *,
    rounds: int,
    turn: int = 10,
    more: Sequence[Callable[[], Contender]] = (),
) -> list[Counts]:
    """Return the figures of all contenders on one workload.

    Args:
        make: the workload.
        course: of the run.
        rounds: of the sweep.
        turn: as in the task.
        more: contenders.
    """
    sweep = Sweep(make, rounds, most=12 if rounds > 1 else 8)
    task = Task(make, course.limits(sweep.limit_for(ALONE), sweep.limit_for(VISITED)), turn)
    jobs = compete(task, [partial(Oracle, sweep), Elastic, Planned, Halving, *more])
    return [
        _run(contender, job, jobs[Oracle.name], sweep, course) for contender, job in jobs.items()
    ]


def _run(contender: str, job: Job, oracle: Job, sweep: Sweep, course: Course) -> Counts:
    last = course.comes
    start = _settled(job.done[:last])
    gone = course.comes + course.visit
    fewest = sweep.best(job.task.limits[gone]).pieces
    counts = Counts(
        workload=job.workload.name,
        visit=course.visit,
        contender=contender,
        ooms=sum(step.ooms for step in job.done),
        made=len(job.done),
        start_ooms=sum(step.ooms for step in job.done[:start]),
        start_steps=start,
        back=next(
            (at for at, step in enumerate(job.done[gone:]) if 0 < job.pieces(step.size) <= fewest),
            None,
        ),
        replayed=job.replayed,
        distance=job.distance(oracle),
        sizes=[step.size for step in job.done],
    )
    if simcuda.inside():
        return counts
    half = [
        (mine.seconds, best.seconds)
        for mine, best in zip(job.done[:last], oracle.done[:last], strict=True)
    ][last // 2 :]
    low, middle, high = statistics.quantiles([mine / best for mine, best in half], n=4)
    counted = sum(step.size > 0 for step in job.done[:start])
    return Run(
        **vars(counts),
        step_ms=1e3 * statistics.median(best for _, best in half),
        seconds=job.seconds,
        ratio=job.seconds / oracle.seconds,
        start_lost=job.done[start - 1].ended - (oracle.done[counted - 1].ended if counted else 0.0),
        settled=middle,
        settled_low=low,
        settled_high=high,
        milliseconds=[round(1e3 * step.seconds, 2) for step in job.done],
    )


def _settled(done: Sequence[Done]) -> int:
    """Return the steps until the size is that of the last of them, and stays."""
    other = [at for at, step in enumerate(done) if step.size != done[-1].size]
    return other[-1] + 2 if other else 1


Columns = Mapping[str, Callable[[Any], object]]
WHO: Columns = {
    "workload": lambda run: run.workload,
    "visit": lambda run: f"{run.visit} steps",
    "": lambda run: run.contender,
}
TIMES: Columns = {
    "the oracle's step": lambda run: f"{run.step_ms:.0f} ms",
    "whole run": lambda run: f"{run.seconds:.1f} s",
    "against the oracle": lambda run: f"{run.ratio:.3f} ×",
    "lost at the start": lambda run: f"{run.start_lost:.2f} s",
    "settled step [quartiles]": lambda run: (
        f"{run.settled:.3f} × [{run.settled_low:.3f}, {run.settled_high:.3f}]"
    ),
}
COUNTS: Columns = {
    "OOMs": lambda run: run.ooms,
    "steps made": lambda run: run.made,
    "start: OOMs": lambda run: run.start_ooms,
    "steps to settle": lambda run: run.start_steps,
    "back after": lambda run: "never" if run.back is None else f"{run.back} steps",
    "samples replayed": lambda run: run.replayed,
    "distance": lambda run: "–" if run.distance is None else f"{run.distance:.0e}",
}


def text(runs: Sequence[Counts]) -> str:
    """Return the figures as a table."""
    return table(runs, {**WHO, **(TIMES if isinstance(runs[0], Run) else {}), **COUNTS})
