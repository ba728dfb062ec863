"""Time from a co-tenant's end to full speed, at steps of 5 ms to 5 s.

The longest steps are slept: their loss sleeps for as long as its samples would take.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from benchmarks.bench.compete import compete
from benchmarks.bench.contenders import Elastic
from benchmarks.bench.job import Task
from benchmarks.bench.models import conv, mlp, sleeper
from benchmarks.bench.report import table
from benchmarks.bench.sweep import Sweep
from benchmarks.workloads import Workload


@dataclass(frozen=True)
class Recovery:
    """The visits at one length of step.

    Attributes:
        workload: its name.
        step: seconds of a step at full speed, median.
        visits: number of visits.
        steps: from the end of each until the whole batch ran in one piece again; the steps of the
            rest of its time where it never did.
        seconds: duration of these steps.
        ooms: out-of-memory errors in all.
    """

    workload: str
    step: float
    visits: int
    steps: list[int]
    seconds: list[float]
    ooms: int


@dataclass(frozen=True)
class Course:
    """Steps before the first visit, of a visit, and after each one."""

    before: int
    visit: int
    after: int
    visits: int

    def limits(self, alone: int, visited: int) -> list[int]:
        """Return the bytes at each step."""
        return [alone] * self.before + ([visited] * self.visit + [alone] * self.after) * self.visits

    @property
    def returns(self) -> list[int]:
        """Steps at which the co-tenant has gone."""
        return [
            self.before + self.visit + at * (self.visit + self.after) for at in range(self.visits)
        ]


def rows(quick: bool, rounds: int) -> list[Recovery]:
    """Return the figures of four lengths of step.

    On a CPU a step of half a second is hardly faster in one piece: those are slept.
    """
    usual = Course(4, 4, 16, 1) if quick else Course(20, 20, 40, 6 * rounds)
    found = [measure(partial(conv, 12), usual)]
    if not quick:
        found.append(measure(partial(mlp, 512), Course(8, 10, 16, 3 * rounds)))
    for seconds, course in (
        [(0.02, Course(4, 4, 6, 1))]
        if quick
        else [(0.5, Course(2, 4, 6, 2 * rounds)), (5.0, Course(1, 1, 3, rounds))]
    ):
        found.append(measure(partial(sleeper, 64, seconds), course, partial(sleeper, 64, 0.0)))
    return found


def measure(
    make: Callable[[], Workload], course: Course, sweep_with: Callable[[], Workload] | None = None
) -> Recovery:
    """Return the figures of one length of step.

    Args:
        make: the workload.
        course: of the run.
        sweep_with: the same workload without its sleep.
    """
    sweep = Sweep(sweep_with or make, 1, most=4)
    job = compete(
        Task(make, course.limits(sweep.limit_for(1), sweep.limit_for(3)), turn=0), [Elastic]
    )[Elastic.name]
    after = [job.done[at : at + course.after] for at in course.returns]
    slow = [
        next((at for at, step in enumerate(steps) if step.size == job.samples), len(steps))
        for steps in after
    ]
    return Recovery(
        workload=job.workload.name,
        step=statistics.median(step.seconds for step in job.done if step.size == job.samples),
        visits=course.visits,
        steps=slow,
        seconds=[
            sum(step.seconds for step in steps[:count])
            for steps, count in zip(after, slow, strict=True)
        ],
        ooms=job.budget.ooms,
    )


def text(found: Sequence[Recovery]) -> str:
    """Return the figures as a table."""
    return table(
        found,
        {
            "workload": lambda row: row.workload,
            "step": lambda row: f"{1e3 * row.step:.0f} ms",
            "visits": lambda row: row.visits,
            "OOMs": lambda row: row.ooms,
            "steps until full speed, median (most)": lambda row: (
                f"{statistics.median(row.steps):.0f} ({max(row.steps)})"
            ),
            "seconds": lambda row: f"{statistics.median(row.seconds):.3f} ({max(row.seconds):.3f})",
        },
    )
