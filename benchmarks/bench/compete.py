"""Contenders on one task, in turns."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from benchmarks.bench.contenders import Contender
from benchmarks.bench.job import Job, Task
from benchmarks.bench.turns import HandOver, in_turns

Entry = Callable[[], Contender]


def compete(
    task: Task,
    entries: Sequence[Entry],
    prepare: Callable[[str, Job], None] = lambda name, job: None,
) -> Mapping[str, Job]:
    """Return each contender's run, by its name.

    Args:
        task: the same for all, each with a model and a limit of its own.
        entries: make the contenders.
        prepare: changes a contender's job before its run.
    """
    jobs: dict[str, Job] = {}

    def run(entry: Entry, hand_over: HandOver) -> None:
        contender = entry()
        job = Job(task, hand_over)
        jobs[contender.name] = job
        prepare(contender.name, job)
        contender.train(job)
        job.end()

    if not task.turn:  # in this very thread: cuBLAS would keep a workspace for each other one
        for entry in entries:
            run(entry, lambda: None)
        return jobs
    in_turns([partial(run, entry) for entry in entries])
    return jobs
