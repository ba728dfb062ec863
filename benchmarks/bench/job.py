"""A contender's job.

A model and its optimizer, batches, and a memory limit that a script moves from step to step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from benchmarks.bench.device import MemoryFraction, limit_on
from benchmarks.workloads import Workload, pinned, wait

LEARNING_RATE = 0.01


@dataclass(frozen=True)
class Task:
    """A training run under a script.

    Attributes:
        make: the workload; the same one each time.
        limits: bytes of the limit at each step; its length is that of the run. Steps that are made
            again go on in the script, as time does: when it is over, its last limit stays.
        turn: steps after which others get their turn; 0 for none before the end. On a device there
            is none: all share its allocator and its limit.
    """

    make: Callable[[], Workload]
    limits: Sequence[int]
    turn: int = 10

    @property
    def steps(self) -> int:
        """Steps of the run."""
        return len(self.limits)


@dataclass(frozen=True)
class Done:
    """A step, also a failed one.

    Attributes:
        index: number of the step in the run.
        seconds: its duration, with a search before it on the clock.
        ended: seconds since the start of the run.
        size: samples of its longest piece; 0 where it failed.
        ooms: out-of-memory errors in these seconds.
    """

    index: int
    seconds: float
    ended: float
    size: int
    ooms: int


@dataclass
class Job:
    """A contender's run of a task.

    Attributes:
        task: the run to make.
        hand_over: lets the other contenders run.
        size: set by a contender in each step: samples of its longest piece.
        seconds: duration so far, of steps and of other work under the budget.
        done: the steps so far.
        given: samples that the loss function has had, those of failed pieces among them.
    """

    task: Task
    hand_over: Callable[[], None]
    size: int = 0
    seconds: float = 0.0
    done: list[Done] = field(default_factory=list)
    given: int = 0

    def __post_init__(self) -> None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            made = self.task.make()
        self.workload = replace(made, loss_fn=self._counting(made.loss_fn))
        self.model = made.model
        self.samples = made.samples
        self.device = made.device
        self._start = {
            name: tensor.to("cpu", copy=True) for name, tensor in self.model.state_dict().items()
        }
        self.optimizer = self._optimizer()
        self.budget = limit_on(
            self.device, max(self.task.limits), track=(self.model, self.optimizer)
        )

    def _counting(self, loss_fn: Callable[[Any], Tensor]) -> Callable[[Any], Tensor]:
        def counted(piece: Any) -> Tensor:
            first = next(iter(piece.values())) if isinstance(piece, Mapping) else piece[0]
            if not isinstance(first, FakeTensor):  # fake tensors are a plan's
                self.given += len(first)
            return loss_fn(piece)

        return counted

    def _optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.model.parameters(), lr=LEARNING_RATE, momentum=0.9)

    def restart(self) -> None:
        """Put the model and its optimizer back to the start.

        This is not done under the budget, which would count the copies.
        """
        self.model.load_state_dict(self._start)
        self.model.zero_grad()
        self.optimizer = self._optimizer()

    def end(self) -> None:
        """Leave a device to the next contender.

        The trained model is on the host then.
        """
        if isinstance(self.budget, MemoryFraction):
            self.model.cpu()
            self.optimizer = self._optimizer()  # the old one has its state on the device
            self.budget.lift()

    @contextmanager
    def running(self) -> Iterator[None]:
        """Run the block under the limit, and on the clock."""
        with self.budget:
            began = time.perf_counter()
            try:
                yield
            finally:
                wait(self.device)
                self.seconds += time.perf_counter() - began

    @contextmanager
    def step(self, index: int) -> Iterator[Any]:
        """Make step `index` of the run, with its batch, under the script's present limit."""
        attempts = len(self.done)
        if self.task.turn and attempts and attempts % self.task.turn == 0:
            self.hand_over()
        self.budget.limit = self.task.limits[min(attempts, self.task.steps - 1)]
        self.size = 0
        batch = self.batch(index)  # beside the clock, as a data loader's workers make it
        try:
            with self.running():
                yield batch
        finally:
            before = self.done[-1].ended if self.done else 0.0
            ooms = sum(step.ooms for step in self.done)
            self.done.append(
                Done(index, self.seconds - before, self.seconds, self.size, self.budget.ooms - ooms)
            )

    @property
    def replayed(self) -> int:
        """Samples that were run again; also those of a search."""
        return self.given - self.samples * self.task.steps

    def pieces(self, size: int) -> int:
        """Return the number of pieces of that size in a batch."""
        return -(-self.samples // size) if size else 0

    def batch(self, index: int) -> Any:
        """Return the batch of a step: the workload's samples in an order of its own."""
        order = torch.randperm(self.samples, generator=torch.Generator().manual_seed(index))
        base = self.workload.batch
        if isinstance(base, dict):
            return {name: pinned(tensor[order], self.device) for name, tensor in base.items()}
        return tuple(pinned(tensor[order], self.device) for tensor in base)

    def train(self, batch: Any, size: int) -> None:
        """Make a step of the loop by hand. A failed one leaves gradients behind."""
        replace(self.workload, batch=batch, size=size).by_hand()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.size = size

    def distance(self, other: Job) -> float | None:
        """Return the distance of the trained model from another one of the same start.

        It is a fraction of the way; None where a split changes the training.
        """
        if any(isinstance(module, nn.BatchNorm2d) for module in self.model.modules()):
            return None
        return float((self.moved() - other.moved()).norm() / other.moved().norm())

    def moved(self) -> Tensor:
        """Return the way of each parameter from the start, as one vector."""
        return torch.cat(
            [
                (parameter.detach() - self._start[name]).flatten()
                for name, parameter in self.model.named_parameters()
            ]
        )
