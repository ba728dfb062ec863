"""A whole run: start-up, one visit of a co-tenant, and its end. Shows what a start costs, too, and the speed at the settled size."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from tools.bench.compete import compete
from tools.bench.contenders import Contender, Elastic, Halving, Oracle, Planned, restarting
from tools.bench.job import Done, Job, Task
from tools.bench.models import MODELS
from tools.bench.report import table
from tools.bench.sweep import Sweep

ALONE, VISITED = 3, 7
"""Pieces of the best size without the co-tenant and with it."""


@dataclass(frozen=True)
class Course:
    """How many steps a run has, and when the co-tenant comes."""

    steps: int = 200
    comes: int = 80
    visit: int = 20

    def limits(self, alone: int, visited: int) -> list[int]:
        """Bytes at each step."""
        return [visited if self.comes <= step < self.comes + self.visit else alone for step in range(self.steps)]


@dataclass(frozen=True)
class Run:
    """One contender's run.

    Attributes:
        workload: what was trained.
        visit: steps that the co-tenant stayed.
        step_ms: of the oracle, median of the settled steps before the visit.
        contender: who trained.
        seconds: all of the run, steps made in vain and searches among them.
        ratio: to the oracle's.
        ooms: out-of-memory errors, those of a search among them.
        made: steps made, also in vain.
        start_ooms: until the size of the start had settled.
        start_steps: steps made until then.
        start_lost: seconds until then beyond the oracle's for the steps that counted.
        settled: seconds of a step against the oracle's same one, median of the last half before the visit; below 1 is faster.
        settled_low: first quartile of these ratios.
        settled_high: third quartile.
        back: steps from the co-tenant's end until the best size was back; None: never.
        distance: of the trained model from the oracle's, as a fraction of the way from the start; None with BatchNorm, which a split changes.
        sizes: longest piece of each step, 0 where it failed.
        milliseconds: of each step.
    """

    workload: str
    visit: int
    step_ms: float
    contender: str
    seconds: float
    ratio: float
    ooms: int
    made: int
    start_ooms: int
    start_steps: int
    start_lost: float
    settled: float
    settled_low: float
    settled_high: float
    back: int | None
    distance: float | None
    sizes: list[int]
    milliseconds: list[float]


def rows(quick: bool, rounds: int) -> list[Run]:
    """All workloads; from round to round the two visits change places. Who restarts takes long: in short visits only."""
    found = []
    for turn in range(rounds):
        for at, (name, (_, samples)) in enumerate(MODELS.items()):
            long = (at + turn) % 2
            course = Course(steps=24, comes=12, visit=4) if quick else Course(visit=(20, 60)[long])
            size = max(28, samples // 4) if quick else samples
            found += measure(name, course, rounds=1 if quick else 3, samples=size, more=() if long else restarting())
    return found


def measure(name: str, course: Course, *, rounds: int, samples: int, more: Sequence[Callable[[], Contender]]) -> list[Run]:
    """All contenders on one workload.

    Args:
        name: of `MODELS`.
        course: of the run.
        rounds: of the sweep.
        samples: of a batch.
        more: contenders.
    """
    workload = partial(MODELS[name][0], samples)
    sweep = Sweep(workload, rounds, most=12 if rounds > 1 else 8)
    task = Task(workload, course.limits(sweep.limit_for(ALONE), sweep.limit_for(VISITED)))
    jobs = compete(task, [partial(Oracle, sweep), Elastic, Planned, Halving, *more])
    return [_run(contender, job, jobs[Oracle.name], sweep, course) for contender, job in jobs.items()]


def _run(contender: str, job: Job, oracle: Job, sweep: Sweep, course: Course) -> Run:
    last = course.comes
    start = _settled(job.done[:last])
    half = [(mine.seconds, best.seconds) for mine, best in zip(job.done[:last], oracle.done[:last], strict=True)][last // 2 :]
    low, middle, high = statistics.quantiles([mine / best for mine, best in half], n=4)
    counted = sum(step.size > 0 for step in job.done[:start])
    gone = course.comes + course.visit
    fewest = sweep.best(job.task.limits[gone]).pieces
    return Run(
        workload=job.workload.name,
        visit=course.visit,
        step_ms=1e3 * statistics.median(best for _, best in half),
        contender=contender,
        seconds=job.seconds,
        ratio=job.seconds / oracle.seconds,
        ooms=job.budget.ooms,
        made=len(job.done),
        start_ooms=sum(step.ooms for step in job.done[:start]),
        start_steps=start,
        start_lost=job.done[start - 1].ended - (oracle.done[counted - 1].ended if counted else 0.0),
        settled=middle,
        settled_low=low,
        settled_high=high,
        back=next((at for at, step in enumerate(job.done[gone:]) if 0 < job.pieces(step.size) <= fewest), None),
        distance=job.distance(oracle),
        sizes=[step.size for step in job.done],
        milliseconds=[round(1e3 * step.seconds, 2) for step in job.done],
    )


def _settled(done: Sequence[Done]) -> int:
    """Steps until the size is that of the last of them, and stays."""
    other = [at for at, step in enumerate(done) if step.size != done[-1].size]
    return other[-1] + 2 if other else 1


def text(runs: Sequence[Run]) -> str:
    """As a table."""
    return table(
        runs,
        {
            "workload": lambda run: f"{run.workload}, {run.step_ms:.0f} ms",
            "visit": lambda run: f"{run.visit} steps",
            "": lambda run: run.contender,
            "whole run": lambda run: f"{run.seconds:.1f} s",
            "against the oracle": lambda run: f"{run.ratio:.3f} ×",
            "OOMs": lambda run: run.ooms,
            "steps made": lambda run: run.made,
            "start: OOMs": lambda run: run.start_ooms,
            "steps to settle": lambda run: run.start_steps,
            "lost": lambda run: f"{run.start_lost:.2f} s",
            "settled step [quartiles]": lambda run: f"{run.settled:.3f} × [{run.settled_low:.3f}, {run.settled_high:.3f}]",
            "back after": lambda run: "never" if run.back is None else f"{run.back} steps",
            "distance": lambda run: "–" if run.distance is None else f"{run.distance:.0e}",
        },
    )
