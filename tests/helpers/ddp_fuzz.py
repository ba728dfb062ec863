"""Random steps of a DDP job, with errors at random operations of random ranks.

All operations of a call and of an optimizer's step can fail, those of the sums, too. The gradient
is compared with one process over the joined batch, and, where it depends on the pieces (dropout,
BatchNorm), with the committed pieces run again on each rank.

    python -m tests.helpers.ddp_fuzz SEED STEPS RANKS SECONDS
"""

from __future__ import annotations

import copy
import logging
import math
import random
import sys
import time
import warnings
from collections import Counter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

from elastic_mbs import (
    DistributedOptions,
    ElasticMBS,
    ElasticMBSError,
    MemoryOptions,
    Policy,
    RecoveryOptions,
    StepResult,
)
from elastic_mbs.distributed import buckets
from elastic_mbs.testing import InjectOOM
from tests.helpers.ddp import data, same, worst
from tests.helpers.ranks import run_ranks

FLAGS: list[dict[str, Any]] = [
    {},
    {"find_unused_parameters": True},
    {"static_graph": True},
    {"gradient_as_bucket_view": True},
    {"broadcast_buffers": False},
]


class Net(nn.Module):
    """A model with a tied weight and a head that only some steps use."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        extra = {"dropout": nn.Dropout(0.3), "bn": nn.BatchNorm1d(8)}.get(kind, nn.Identity())
        self.body = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), extra, nn.Linear(8, 8), nn.Tanh())
        self.tied = nn.Linear(8, 8)
        inner = self.body[3]
        assert isinstance(inner, nn.Linear)
        self.tied.weight = inner.weight
        self.heads = nn.ModuleList([nn.Linear(8, 2), nn.Linear(8, 2)])

    def forward(self, x: Tensor, both: bool) -> Tensor:
        hidden = self.tied(self.body(x))
        out: Tensor = self.heads[0](hidden)
        return out + self.heads[1](hidden) if both else out


def counted(x: Tensor) -> Tensor:
    return (x[:, 0] > -0.3).long()


class Totals:
    """The counts of all ranks' samples: one loss is a sum over terms / their total."""

    def __init__(self, mode: str, batches: list[Tensor | None]) -> None:
        there = [batch for batch in batches if batch is not None]
        samples = float(sum(len(batch) for batch in there))
        terms = float(sum(int(counted(batch).sum()) for batch in there))
        self.samples = {"mean": samples, "named": samples, "sum": 10.0}.get(mode, math.inf)
        self.terms = terms if mode in ("tokens", "named") and terms else math.inf

    def loss(self, out: Tensor, x: Tensor) -> Tensor:
        each = out.pow(2).mean(1)
        return each.sum() / self.samples + (each * counted(x)).sum() / self.terms


def loss_of(mode: str, out: Tensor, x: Tensor) -> Tensor | dict[str, Tensor]:
    """Return what the user's function returns: a mean, a sum, or two losses."""
    each, valid = out.pow(2).mean(1), counted(x)
    tokens = (each * valid).sum() / valid.sum().clamp(min=1)
    if mode == "named":
        return {"all": each.mean(), "some": tokens}
    return {"mean": each.mean(), "tokens": tokens, "sum": each.sum() / 10}[mode]


OPTIONS: dict[str, dict[str, Any]] = {
    "mean": {},
    "tokens": {"count": counted},
    "sum": {"reduction": "sum"},
    "named": {"count": {"all": None, "some": counted}},
}


class Run:
    """One model and its runtime on one rank, from its first step to its last."""

    def __init__(self, rank: int, world: int, shared: random.Random, seen: Counter[str]) -> None:
        self.rank, self.world, self.shared, self.seen = rank, world, shared, seen
        self.kind = shared.choice(["plain", "plain", "dropout", "bn"])
        self.mode = shared.choice(["mean", "mean", "tokens", "sum", "named"])
        torch.manual_seed(shared.randrange(1000))
        self.model = Net(self.kind).double()
        self.reference = copy.deepcopy(self.model)
        flags = shared.choice(FLAGS)
        self.sends_buffers = flags.get("broadcast_buffers", True)
        ddp = DDP(self.model, **flags)
        self.called = self.model if shared.random() < 0.3 else ddp
        isolate = shared.random() < 0.2
        self.mbs = ElasticMBS(
            ddp,
            distributed=DistributedOptions(timeout=30, overlap=shared.random() < 0.7),
            memory=MemoryOptions(wait_for_memory=0),
            recovery=RecoveryOptions(replay="isolate" if isolate else "auto"),
            # BatchNorm over two samples that are alike would magnify every rounding
            policy=Policy(min_micro_batch_size=4 if self.kind == "bn" else 1),
            **OPTIONS[self.mode],
        )
        foreach = shared.choice([None, True, False])
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01, foreach=foreach)
        self.steady = shared.random() < 0.5
        self.worst = 0.0

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
        self.check_alike()
        if all(finished):
            self.optimize()
        self.optimizer.zero_grad()
        self.reference.zero_grad()
        self.follow()
        self.seen["steps"] += 1

    def call(self, number: int) -> bool:
        """Make one training call on all ranks; return whether it was finished."""
        lengths = [4, 8, 12] if self.kind == "bn" else [None, 1, 3, 6, 9, 12]
        sizes = [self.shared.choice(lengths) for _ in range(self.world)]
        if self.steady:  # counts do not change, so sums that were sent are good
            sizes = [12] * self.world
        batches = [None if n is None else data(rank, number, n) for rank, n in enumerate(sizes)]
        both = [self.shared.random() < 0.5 for _ in sizes]
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
            self.seen["struck"] += len(fault.hits)
        self.seen["ooms"] += result.ooms
        totals = Totals(self.mode, batches)
        if self.kind == "plain":
            loss = self.one_process(totals, batches, both)
        else:
            loss = self.same_pieces(totals, batches[self.rank], both[self.rank], result, streams)
        self.drop_zeros()
        scale = max(1.0, abs(loss))
        self.worst = max(self.worst, self.difference(), abs(loss - result.loss.item()) / scale)
        return True

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

    def drop_zeros(self) -> None:
        """Drop the reference's gradients of heads that no rank has used."""
        pairs = zip(self.model.parameters(), self.reference.parameters(), strict=True)
        for mine, right in pairs:
            if mine.grad is None and right.grad is not None and not right.grad.any():
                right.grad = None

    def optimize(self) -> None:
        before = self.state()
        fault = self.fault(40, 0.3)
        try:
            with fault:
                self.mbs.optimizer_step(self.optimizer)
        except ElasticMBSError as error:
            self.seen["vetoed"] += 1
            self.note(error)
            self.seen["stale"] += not same(before, self.state())
            self.mbs.optimizer_step(self.optimizer)
        finally:
            self.seen["struck"] += len(fault.hits)

    # ------------------------------------------------------------------ what has to hold

    def state(self) -> list[Tensor | None]:
        grads = [None if p.grad is None else p.grad.clone() for p in self.model.parameters()]
        values = [*self.model.parameters(), *self.model.buffers()]
        return [*grads, *(value.detach().clone() for value in values)]

    def difference(self) -> float:
        """Return the relative error of the gradients."""
        return worst(self.model, self.reference)

    def follow(self) -> None:
        """Give the reference the model's values."""
        self.reference.load_state_dict(self.model.state_dict())

    def ended(self, error: ElasticMBSError, before: list[Tensor | None]) -> None:
        """Check that an error has left everything as it was."""
        self.seen["typed"] += 1
        self.note(error)
        self.seen["stale"] += not same(before, self.state())

    def note(self, error: ElasticMBSError) -> None:
        self.seen[type(error).__name__] += 1
        if "cannot be reached" in str(error):
            raise error

    def check_alike(self) -> None:
        """Check that the replicas are the same, bit for bit."""
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.model.parameters()]
        tensors = [*self.model.parameters(), *grads]
        flat = torch.cat([tensor.detach().reshape(-1) for tensor in tensors])
        others = [torch.zeros_like(flat) for _ in range(self.world)]
        dist.all_gather(others, flat)
        self.seen["drifted"] += not all(torch.equal(flat, other) for other in others)


def count_early_sums(seen: Counter[str]) -> None:
    """Count the sums that begin while a backward runs."""
    begin = dist.all_reduce

    def all_reduce(*args: Any, **options: Any) -> Any:
        seen["early"] += torch._C._current_graph_task_id() >= 0
        return begin(*args, **options)

    dist.all_reduce = all_reduce


def fuzz(rank: int, world: int, seed: int, steps: int, seconds: float) -> dict[str, float]:
    """Make `steps` steps, or as many as `seconds` allow; return what was counted."""
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    shared = random.Random(seed)  # it draws the same on every rank
    seen = Counter[str]()
    count_early_sums(seen)
    buckets.FIRST = buckets.CAP = 300 if seed % 2 else 2**20
    errors: dict[str, float] = {}
    began = time.monotonic()
    while seen["steps"] < steps:
        late = torch.tensor([float(time.monotonic() - began > seconds)])
        dist.broadcast(late, 0)
        if late.item():
            break
        run = Run(rank, world, shared, seen)
        with run.mbs:
            for _ in range(shared.randint(6, 14)):
                run.step(seen["steps"])
        errors[f"worst {run.kind}"] = max(errors.get(f"worst {run.kind}", 0.0), run.worst)
    return {**seen, **errors}


if __name__ == "__main__":
    given_seed, given_steps, ranks = map(int, sys.argv[1:4])
    limit = float(sys.argv[4])
    began = time.monotonic()
    outcomes = run_ranks(fuzz, given_seed, given_steps, limit, world=ranks, wall=limit + 120)
    for number, outcome in enumerate(outcomes):
        print(number, outcome.status, outcome.value, flush=True)
    print(f"{time.monotonic() - began:.0f} s")
