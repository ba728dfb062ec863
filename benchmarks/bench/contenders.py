"""Contenders: the oracle, elastic_mbs, and the rules of its peers.

Each has a `step`, or a `train` where its rule is about whole runs.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from typing import Any

import torch

from benchmarks.bench.job import Job
from benchmarks.bench.sweep import Sweep
from elastic_mbs import ElasticMBS, Policy


class Contender:
    """A maker of the steps of a run, one after the other."""

    name = ""
    # The model at the end is that of the loop by hand, but for rounding (BatchNorm apart).
    same_training = True

    def train(self, job: Job) -> None:
        """Make all steps of the task."""
        for index in range(job.task.steps):
            with job.step(index) as batch:
                self.step(job, batch)

    def step(self, job: Job, batch: Any) -> None:
        """Make one step of the optimizer on the whole batch."""
        raise NotImplementedError


class Oracle(Contender):
    """The loop by hand with the best size that fits, known in advance for each step."""

    name = "oracle"

    def __init__(self, sweep: Sweep) -> None:
        self.sweep = sweep

    def step(self, job: Job, batch: Any) -> None:
        """Make a step that cannot fail."""
        job.train(batch, self.sweep.best(job.budget.limit).size)


class Fixed(Contender):
    """The loop by hand with one size."""

    name = "best fixed size"

    def __init__(self, size: int) -> None:
        self.size = size

    def step(self, job: Job, batch: Any) -> None:
        """Make a step of the same size as all others."""
        job.train(batch, self.size)


class Elastic(Contender):
    """`mbs.backward` in place of `loss.backward()`, with default options."""

    name = "elastic_mbs"

    def __init__(self, policy: Policy | None = None) -> None:
        self.policy = policy

    def train(self, job: Job) -> None:
        """Make all steps, with the runtime's own start on the clock."""
        with job.running():
            self.mbs = ElasticMBS(job.model, count=job.workload.count, policy=self.policy)
        with self.mbs:
            super().train(job)

    def step(self, job: Job, batch: Any) -> None:
        """Make a step as in the README."""
        partition = self.mbs.backward(job.workload.loss_fn, batch).partition
        job.optimizer.step()
        job.optimizer.zero_grad()
        job.size = max(stop - start for start, stop in partition)


class Planned(Elastic):
    """`Elastic` with `mbs.plan` before the first step, on the clock."""

    name = "elastic_mbs with plan"

    def step(self, job: Job, batch: Any) -> None:
        """Make a step, and plan before the first one."""
        if not job.done:
            self.mbs.plan(job.workload.loss_fn, batch, optimizer=job.optimizer)
        super().step(job, batch)


class Halving(Contender):
    """Composer's rule for `device_train_microbatch_size="auto"`.

    It halves, makes the whole step again, and never grows. Composer itself refuses a CPU.
    """

    name = "halving (Composer's rule)"

    def train(self, job: Job) -> None:
        """Make all steps, starting with the whole batch."""
        self.size = job.samples
        super().train(job)

    def step(self, job: Job, batch: Any) -> None:
        """Make the step again until it comes through."""
        while not self._came_through(job, batch):
            job.optimizer.zero_grad()
            self.size = max(1, self.size // 2)

    def _came_through(self, job: Job, batch: Any) -> bool:
        try:
            job.train(batch, self.size)
        except torch.OutOfMemoryError:
            return False
        return True


class Accelerate(Contender):
    """accelerate's `find_executable_batch_size` around the run, as its documentation shows.

    After an error it takes 0.9 times the size, and the run starts again.
    """

    name = "accelerate"

    def train(self, job: Job) -> None:
        """Make all steps.

        Making model and optimizer anew, and collecting garbage, is off the clock.
        """
        from accelerate.utils import find_executable_batch_size

        @find_executable_batch_size(starting_batch_size=job.samples)  # type: ignore[untyped-decorator]  # it may be missing
        def run(batch_size: int) -> None:
            train_from_start(job, batch_size)

        run()


class Lightning(Contender):
    """Lightning's BatchSizeFinder before the run.

    An error ends the run, and whoever started it starts it again at once.
    """

    name = "Lightning"

    def train(self, job: Job) -> None:
        """Make all steps with the size that Lightning's search finds, under its Trainer.

        The run is the loop by hand, which is cheaper than the Trainer's.
        """
        from benchmarks.bench.lightning_search import search

        size = search(job)
        while not self._came_through(job, size):
            # A size that has failed at once is not tried twice.
            size = min(search(job), size // 2 if job.done[-1].index == 0 else size)

    def _came_through(self, job: Job, size: int) -> bool:
        try:
            train_from_start(job, size)
        except torch.OutOfMemoryError:
            return False
        return True


def train_from_start(job: Job, size: int) -> None:
    """Make the whole run with one size, from the model's first state."""
    job.restart()
    for index in range(job.task.steps):
        with job.step(index) as batch:
            job.train(batch, size)


def installed(packages: Sequence[str] = ("accelerate", "lightning")) -> dict[str, str | None]:
    """Return the versions of the peers.

    None stands for those that are missing, which then do not take part.
    """
    return {
        name: importlib.metadata.version(name) if importlib.util.find_spec(name) else None
        for name in packages
    }


def restarting() -> list[Callable[[], Contender]]:
    """Return the installed peers that start the run again after an error."""
    found = installed()
    return [
        *([Accelerate] if found["accelerate"] else []),
        *([Lightning] if found["lightning"] else []),
    ]
