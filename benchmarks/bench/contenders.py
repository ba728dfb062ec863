"""Who trains: the oracle, elastic_mbs, and the rules of its peers, each with a `step`, or a `train` where its rule is about whole runs."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from typing import Any

import torch

from benchmarks.bench.job import Job
from benchmarks.bench.sweep import Sweep
from elastic_mbs import ElasticMBS, Policy


class Contender:
    """Makes the steps of a run, one after the other."""

    name = ""
    # the model at the end is that of the hand-written loop, but for rounding (BatchNorm apart)
    same_training = True

    def train(self, job: Job) -> None:
        """All steps of the task."""
        for index in range(job.task.steps):
            with job.step(index) as batch:
                self.step(job, batch)

    def step(self, job: Job, batch: Any) -> None:
        """One step of the optimizer on the whole batch."""
        raise NotImplementedError


class Oracle(Contender):
    """The hand-written loop with the best size that fits, known in advance for each step."""

    name = "oracle"

    def __init__(self, sweep: Sweep) -> None:
        self.sweep = sweep

    def step(self, job: Job, batch: Any) -> None:
        """Nothing fails."""
        job.train(batch, self.sweep.best(job.budget.limit).size)


class Fixed(Contender):
    """The hand-written loop with one size."""

    name = "best fixed size"

    def __init__(self, size: int) -> None:
        self.size = size

    def step(self, job: Job, batch: Any) -> None:
        """Always the same."""
        job.train(batch, self.size)


class Elastic(Contender):
    """`mbs.backward` in the place of `loss.backward()`, everything else by default."""

    name = "elastic_mbs"

    def __init__(self, policy: Policy | None = None) -> None:
        self.policy = policy

    def train(self, job: Job) -> None:
        """The runtime's own start is on the clock."""
        with job.running():
            self.mbs = ElasticMBS(job.model, count=job.workload.count, policy=self.policy)
        with self.mbs:
            super().train(job)

    def step(self, job: Job, batch: Any) -> None:
        """As in the README."""
        partition = self.mbs.backward(job.workload.loss_fn, batch).partition
        job.optimizer.step()
        job.optimizer.zero_grad()
        job.size = max(stop - start for start, stop in partition)


class Planned(Elastic):
    """The same, with `mbs.plan` before the first step, on the clock."""

    name = "elastic_mbs with plan"

    def step(self, job: Job, batch: Any) -> None:
        """The first one plans."""
        if not job.done:
            self.mbs.plan(job.workload.loss_fn, batch, optimizer=job.optimizer)
        super().step(job, batch)


class Halving(Contender):
    """Composer's rule for `device_train_microbatch_size="auto"`: halve, make the whole step again, never grow. Composer itself refuses a CPU."""

    name = "halving (Composer's rule)"

    def train(self, job: Job) -> None:
        """From the whole batch."""
        self.size = job.samples
        super().train(job)

    def step(self, job: Job, batch: Any) -> None:
        """Until it comes through."""
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
    """accelerate's `find_executable_batch_size` around the run, as its documentation shows: 0.9 times the size, and the run from its start."""

    name = "accelerate"

    def train(self, job: Job) -> None:
        """Making model and optimizer anew, and collecting garbage, is off the clock."""
        from accelerate.utils import find_executable_batch_size

        @find_executable_batch_size(starting_batch_size=job.samples)  # type: ignore[untyped-decorator]  # it may be missing
        def run(batch_size: int) -> None:
            train_from_start(job, batch_size)

        run()


class Lightning(Contender):
    """Lightning's BatchSizeFinder before the run; an error in the run ends it, and whoever started it starts it again at once."""

    name = "Lightning"

    def train(self, job: Job) -> None:
        """The search is Lightning's, under its Trainer; the run is the hand-written loop with what it found, which is cheaper than the Trainer's."""
        from benchmarks.bench.lightning_search import search

        size = search(job)
        while not self._came_through(job, size):
            # what has failed at once is not tried twice
            size = min(search(job), size // 2 if job.done[-1].index == 0 else size)

    def _came_through(self, job: Job, size: int) -> bool:
        try:
            train_from_start(job, size)
        except torch.OutOfMemoryError:
            return False
        return True


def train_from_start(job: Job, size: int) -> None:
    """The whole run with one size, from what the model was at first."""
    job.restart()
    for index in range(job.task.steps):
        with job.step(index) as batch:
            job.train(batch, size)


def installed(packages: Sequence[str] = ("accelerate", "lightning")) -> dict[str, str | None]:
    """Versions of the peers; None for those that are missing, which then do not take part."""
    return {
        name: importlib.metadata.version(name) if importlib.util.find_spec(name) else None
        for name in packages
    }


def restarting() -> list[Callable[[], Contender]]:
    """The peers that start the run again after an error, as far as they are installed."""
    found = installed()
    return [
        *([Accelerate] if found["accelerate"] else []),
        *([Lightning] if found["lightning"] else []),
    ]
