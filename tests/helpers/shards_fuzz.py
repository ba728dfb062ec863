"""Random steps of a sharded job (FSDP2, HSDP), with errors at random operations of random ranks.

As `tests.helpers.ddp_fuzz`, which has the losses and the faults. With four ranks some runs are
HSDP.

    python -m tests.helpers.shards_fuzz SEED STEPS RANKS SECONDS
"""

from __future__ import annotations

import copy
import logging
import random
import sys
import time
import warnings
from collections import Counter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

from elastic_mbs import (
    DistributedOptions,
    ElasticMBS,
    ElasticMBSError,
    MemoryOptions,
    Policy,
    RecoveryOptions,
)
from tests.helpers.ddp import data
from tests.helpers.ddp_fuzz import OPTIONS, Net, Run
from tests.helpers.ranks import run_ranks
from tests.helpers.shards import by_columns, full, states, worst


class ShardedRun(Run):
    """One sharded model and its runtime on one rank, from its first step to its last."""

    def __init__(self, rank: int, world: int, shared: random.Random, seen: Counter[str]) -> None:
        self.rank, self.world, self.shared, self.seen = rank, world, shared, seen
        self.kind = shared.choice(["plain", "plain", "dropout", "bn"])
        self.mode = shared.choice(["mean", "mean", "tokens", "sum", "named"])
        torch.manual_seed(shared.randrange(1000))
        model = Net(self.kind).double()
        self.model = self.called = model
        self.reference = copy.deepcopy(model)
        options: dict[str, Any] = {}
        self.steady = False  # nothing is sent ahead
        self.replicas = world == 4 and shared.random() < 0.7
        if self.replicas:
            options["mesh"] = init_device_mesh("cpu", (2, 2), mesh_dim_names=("r", "s"))
        if shared.random() < 0.3:
            options["shard_placement_fn"] = by_columns
        if shared.random() < 0.3:
            options["offload_policy"] = CPUOffloadPolicy(pin_memory=False)
        if shared.random() < 0.7:
            for head in model.heads:
                fully_shard(head, **options)
        fully_shard(model, **options)
        isolate = shared.random() < 0.2
        self.mbs = ElasticMBS(
            model,
            distributed=DistributedOptions(timeout=30),
            memory=MemoryOptions(wait_for_memory=0),
            recovery=RecoveryOptions(replay="isolate" if isolate else "auto"),
            # BatchNorm over two samples that are alike would magnify every rounding
            policy=Policy(min_micro_batch_size=4 if self.kind == "bn" else 1),
            **OPTIONS[self.mode],
        )
        foreach = shared.choice([None, True, False])
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=foreach)
        self.worst = 0.0

    def step(self, number: int) -> None:
        """Make one step, and sometimes an evaluation before it."""
        if self.shared.random() < 0.2:
            self.evaluate(100 * number + 50)
        super().step(number)
        self.seen["replicated"] += self.replicas

    def evaluate(self, number: int) -> None:
        """Evaluate batches of other lengths on every rank, some of them with errors."""
        lengths = [self.shared.choice([4, 8, 12]) for _ in range(self.world)]
        x = data(self.rank, number, lengths[self.rank])
        before = self.state()
        self.model.eval()
        self.reference.eval()
        fault = self.fault(80, 0.5)
        try:
            with fault:
                found = self.mbs.evaluate(lambda x: self.model(x, both=True), x)
        except ElasticMBSError as error:
            self.ended(error, before)
        else:
            with torch.no_grad():
                right = self.reference(x, both=True)
            self.worst = max(self.worst, float((found - right).abs().max()))
            self.seen["evaluated"] += 1
        self.seen["struck"] += len(fault.hits)
        self.model.train()
        self.reference.train()

    # ------------------------------------------------------------------ what has to hold

    def state(self) -> list[Tensor | None]:
        return states(self.model)

    def difference(self) -> float:
        return worst(self.model, self.reference)

    def follow(self) -> None:
        with torch.no_grad():
            for mine, right in zip(
                self.model.parameters(), self.reference.parameters(), strict=True
            ):
                values = full(mine.detach())
                assert values is not None
                right.copy_(values)
            for own, other in zip(self.model.buffers(), self.reference.buffers(), strict=True):
                other.copy_(own)

    def check_alike(self) -> None:
        """Check that all ranks have the same gradients, and replicas of shards the same values."""
        used = torch.tensor([p.grad is not None for p in self.model.parameters()])
        everyone = [torch.zeros_like(used) for _ in range(self.world)]
        dist.all_gather(everyone, used)
        self.seen["drifted"] += not all(torch.equal(used, each) for each in everyone)
        if not self.replicas:
            return
        there = [each for each in states(self.model, buffers=False) if each is not None]
        flat = torch.cat([each.reshape(-1) for each in there])
        others: list[Any] = [None] * self.world
        dist.all_gather_object(others, flat)
        self.seen["drifted"] += not torch.equal(flat, others[(self.rank + 2) % self.world])


def fuzz(rank: int, world: int, seed: int, steps: int, seconds: float) -> dict[str, float]:
    """Make `steps` steps, or as many as `seconds` allow; return what was counted."""
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    shared = random.Random(seed)  # it draws the same on every rank
    seen = Counter[str]()
    errors: dict[str, float] = {}
    began = time.monotonic()
    while seen["steps"] < steps:
        late = torch.tensor([float(time.monotonic() - began > seconds)])
        dist.broadcast(late, 0)
        if late.item():
            break
        run = ShardedRun(rank, world, shared, seen)
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
