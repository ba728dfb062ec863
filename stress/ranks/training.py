"""A model in training on one rank: random steps, and the comparison with a reference."""

from __future__ import annotations

import copy
import math
import random
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from elastic_mbs import (
    DistributedOptions,
    ElasticMBS,
    ElasticMBSError,
    MemoryOptions,
    Policy,
    RecoveryOptions,
    StepResult,
)
from elastic_mbs.distributed import ranks
from elastic_mbs.testing import InjectOOM

from ..console import Tally
from ..reference.state import error_of
from .losses import OPTIONS, Net, Totals, data, loss_of

# Largest difference of a gradient or a loss, relative to its largest entry: a split sums in another
# order.
TOLERANCE = 1e-12
STEPS = (6, 14)  # steps with one model, from and to


@dataclass
class Counts(Tally):
    """The figures of one rank, or of several."""

    steps: int = 0  # of the job: its first rank counts them
    struck: int = 0  # operations made to fail
    ooms: int = 0  # out-of-memory errors from which a call has recovered
    early: int = 0  # sums that began while a backward ran
    checked: int = 0  # calls whose gradient and loss were compared
    evaluated: int = 0  # evaluations that were compared
    vetoed: int = 0  # optimizer's steps that no rank has made
    worst: float = 0.0  # largest difference
    # typed errors that ended a call or a step
    typed: Counter[str] = field(default_factory=Counter)
    # outcomes that are not allowed
    wrong: Counter[str] = field(default_factory=Counter)

    def line(self) -> str:
        """Return the figures in words."""
        return (
            f"{self.steps} steps, {self.struck} errors struck, {self.ooms} recovered, "
            f"{self.typed.total()} calls and steps ended typed, {self.early} sums begun in a "
            f"backward, {self.checked} gradients checked, {self.wrong.total()} wrong, worst "
            f"{self.worst:.1e}"
        )


def same(before: Sequence[Tensor | None], after: Sequence[Tensor | None]) -> bool:
    """Return whether two lists of tensors are the same, bit for bit."""
    return all(
        new is None if old is None else new is not None and torch.equal(old, new)
        for old, new in zip(before, after, strict=True)
    )


class Training(ABC):
    """A model and its runtime on one rank, from its first step to its last.

    Attributes:
        model: as its modules are.
        called: the module that a step calls.
        reference: the same on each rank, which sees no error.
        mbs: the runtime.
    """

    called: nn.Module
    distributed: Literal["local", "lockstep"] = "local"  # the mode

    def __init__(
        self,
        rank: int,
        world: int,
        shared: random.Random,
        counts: Counts,
        *,
        overlap: bool = False,
    ) -> None:
        """Draw a model, a loss and options.

        Args:
            rank: the number of this rank.
            world: how many there are.
            shared: draws the same on every rank.
            counts: figures, to which steps add.
            overlap: sums begin in the last backward.
        """
        self.rank, self.world, self.shared, self.counts = rank, world, shared, counts
        self.kind = shared.choice(["plain", "plain", "dropout", "bn"])
        self.mode = shared.choice(["mean", "mean", "tokens", "sum", "named"])
        torch.manual_seed(shared.randrange(1000))
        self.model = Net(self.kind).double()
        self.reference = copy.deepcopy(self.model)
        # counts do not change, so sums that were sent in a backward are good
        self.steady = shared.random() < 0.5
        wrapped = self.wrap()
        on_host = shared.random() < 0.7  # else the sums are those of a device
        ranks.is_on_host = lambda model: on_host
        isolate = shared.random() < 0.2
        self.mbs = ElasticMBS(
            wrapped,
            distributed=DistributedOptions(timeout=30, overlap=overlap, mode=self.distributed),
            memory=MemoryOptions(wait_for_memory=0),
            recovery=RecoveryOptions(replay="isolate" if isolate else "auto"),
            # BatchNorm over two samples that are alike would magnify every rounding
            policy=Policy(min_micro_batch_size=4 if self.kind == "bn" else 1),
            **OPTIONS[self.mode],
        )
        foreach = shared.choice([None, True, False])
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01, foreach=foreach)

    @abstractmethod
    def wrap(self) -> nn.Module:
        """Wrap or shard the model; set `called`, and return the module for the runtime."""

    def fault(self, operations: int, chance: float) -> InjectOOM:
        """Return an injector for this rank. Every rank draws for all of them."""
        drawn = [
            (self.shared.random(), self.shared.random(), self.shared.randrange(10**6))
            for _ in range(self.world)
        ]
        often, lasting, seed = drawn[self.rank]
        own = random.Random(seed)

        def place() -> int:
            return round(math.exp(own.random() * math.log(operations)))

        if often > chance:
            return InjectOOM()
        if lasting < 0.08:
            return InjectOOM(always_from=place())
        return InjectOOM([place() for _ in range(own.randint(1, 3))])

    # ------------------------------------------------------------------ one step

    def step(self, number: int) -> None:
        """Make one step: one or two calls, and an optimizer's step."""
        calls = self.shared.choice([1, 1, 1, 2])
        finished = [self.call(100 * number + i) for i in range(calls)]  # both, whatever the first
        if not self.alike():
            self.counts.wrong["ranks differ"] += 1
        if all(finished):
            self.optimize()
        self.optimizer.zero_grad()
        self.reference.zero_grad()
        self.follow()

    def call(self, number: int) -> bool:
        """Make one training call on all ranks; return whether it was finished."""
        lengths = [4, 8, 12] if self.kind == "bn" else [None, 1, 3, 6, 9, 12]
        sizes = [self.shared.choice(lengths) for _ in range(self.world)]
        if self.steady:
            sizes = [12] * self.world
        batches = [None if n is None else data(rank, number, n) for rank, n in enumerate(sizes)]
        both = [self.shared.random() < 0.5 for _ in sizes]
        if self.distributed == "lockstep":  # all pieces run the same units
            both = [both[0]] * self.world
        before = self.state()
        streams = torch.get_rng_state()

        def loss_fn(x: Tensor) -> Any:
            return loss_of(self.mode, self.called(x, both[self.rank]), x)

        fault = self.fault(400, 0.5)
        try:
            with fault:
                result = self.mbs.backward(loss_fn, batches[self.rank])
        except ElasticMBSError as error:
            self.ended(error, before)
            return False
        finally:
            self.counts.struck += len(fault.hits)
        self.counts.ooms += result.ooms
        totals = Totals(self.mode, batches)
        if self.kind == "plain":
            loss = self.one_process(totals, batches, both)
        else:
            loss = self.same_pieces(totals, batches[self.rank], both[self.rank], result, streams)
        found = [result.loss.item()]
        if self.mode == "named":
            found.append(sum(each.item() for each in result.losses.values()))
        off = max(abs(loss - each) for each in found) / max(1.0, abs(loss))
        self.check("a gradient or loss", max(off, self.difference()))
        self.counts.checked += 1
        return True

    def check(self, what: str, off: float) -> None:
        """Count a difference, and a wrong outcome where it is more than rounding."""
        self.counts.worst = max(self.counts.worst, off)
        if not off <= TOLERANCE:
            self.counts.wrong[what] += 1

    def one_process(self, totals: Totals, batches: list[Tensor | None], both: list[bool]) -> float:
        """Run the joined batch in the reference."""
        parts = [
            totals.loss(self.reference(x, used), x)
            for x, used in zip(batches, both, strict=True)
            if x is not None
        ]
        if not parts:
            return 0.0
        loss = torch.stack(parts).sum()
        loss.backward()
        return loss.item()

    def same_pieces(
        self,
        totals: Totals,
        x: Tensor | None,
        both: bool,
        result: StepResult,
        streams: Tensor,
    ) -> float:
        """Run the committed pieces in the reference, and add up over the ranks."""
        after = torch.get_rng_state()
        torch.set_rng_state(streams)
        old = [None if p.grad is None else p.grad for p in self.reference.parameters()]
        self.reference.zero_grad()
        total = torch.zeros((), dtype=torch.float64)
        for start, stop in result.partition:
            assert x is not None
            piece = x[start:stop]
            loss = totals.loss(self.reference(piece, both), piece)
            loss.backward()
            total += loss.detach()
        torch.set_rng_state(after)
        for parameter, before in zip(self.reference.parameters(), old, strict=True):
            grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            dist.all_reduce(grad)
            parameter.grad = grad if before is None else grad + before
        dist.all_reduce(total)
        return total.item()

    def optimize(self) -> None:
        """Make an optimizer's step on all ranks, where it fails the first time, a second time."""
        before = self.state()
        fault = self.fault(40, 0.3)
        try:
            with fault:
                self.mbs.optimizer_step(self.optimizer)
        except ElasticMBSError as error:
            self.counts.vetoed += 1
            self.ended(error, before)
            self.mbs.optimizer_step(self.optimizer)
        finally:
            self.counts.struck += len(fault.hits)

    # ------------------------------------------------------------------ what has to hold

    def difference(self) -> float:
        """Return the relative error of the gradients."""
        return error_of(
            [_some(each) for each in self.gradients()],
            [_some(parameter.grad) for parameter in self.reference.parameters()],
        )

    def ended(self, error: ElasticMBSError, before: list[Tensor | None]) -> None:
        """Check that an error has left everything as it was."""
        self.counts.typed[type(error).__name__] += 1
        if "cannot be reached" in str(error):
            raise error
        if not same(before, self.state()):
            self.counts.wrong["not put back"] += 1

    @abstractmethod
    def state(self) -> list[Tensor | None]:
        """Return copies of this rank's gradients, parameters and buffers."""

    @abstractmethod
    def gradients(self) -> list[Tensor | None]:
        """Return the gradients of whole parameters. Every rank calls it."""

    @abstractmethod
    def follow(self) -> None:
        """Give the reference the model's values. Every rank calls it."""

    @abstractmethod
    def alike(self) -> bool:
        """Return whether ranks have the same, bit for bit. Every rank calls it."""


def _some(grad: Tensor | None) -> Tensor | None:
    """Return a gradient, or None for one of zeros: a leaf that no rank has used may have either."""
    return None if grad is None or not grad.any() else grad
