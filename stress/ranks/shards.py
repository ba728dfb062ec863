"""Random steps of a sharded job (FSDP2, HSDP), with errors at random operations of random ranks.

Evaluations, which gather parameters, come between them.
"""

from __future__ import annotations

import random
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from elastic_mbs import ElasticMBSError

from .losses import data
from .training import Counts, Training

GROUP = 2  # ranks that share one set of shards, in HSDP


def by_columns(parameter: nn.Parameter) -> Shard:
    """Return the placement of a parameter: its columns, where they divide by any number here."""
    columns = parameter.ndim == 2 and parameter.shape[1] % dist.get_world_size() == 0
    return Shard(1 if columns else 0)


def full(tensor: Tensor | None) -> Tensor | None:
    """Return the values of all ranks' shards. Every rank calls it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def states(model: nn.Module, *, buffers: bool = True) -> list[Tensor | None]:
    """Return copies of this rank's parameters and gradients, and of its buffers."""
    with torch.no_grad():
        found = [each for p in model.parameters() for each in (p, p.grad)]
        found += model.buffers() if buffers else ()
        return [None if each is None else _local(each).clone() for each in found]


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class Shards(Training):
    """A rank of a sharded model."""

    def __init__(
        self,
        rank: int,
        world: int,
        shared: random.Random,
        counts: Counts,
        *,
        replicated: bool = False,
        in_step: bool = False,
    ) -> None:
        """Draw a model; `replicated` is HSDP."""
        self._replicated = replicated
        self.distributed = "lockstep" if in_step else "local"
        super().__init__(rank, world, shared, counts)

    def wrap(self) -> nn.Module:
        """Shard the model, with any option of `fully_shard`."""
        shared, model = self.shared, self.model
        options: dict[str, Any] = {}
        if self._replicated:
            shape = (self.world // GROUP, GROUP)
            options["mesh"] = init_device_mesh("cpu", shape, mesh_dim_names=("r", "s"))
        if shared.random() < 0.3:
            options["shard_placement_fn"] = by_columns
        if shared.random() < 0.3:
            options["offload_policy"] = CPUOffloadPolicy(pin_memory=False)
        if shared.random() < 0.7:
            for head in model.heads:
                fully_shard(head, **options)
        fully_shard(model, **options)
        self.called = model
        return model

    def step(self, number: int) -> None:
        """Make one step, and sometimes an evaluation before it."""
        if self.shared.random() < 0.2:
            self.evaluate(100 * number + 50)
        super().step(number)

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
            self.check("an output", float((found - right).abs().max()))
            self.counts.evaluated += 1
        self.counts.struck += len(fault.hits)
        self.model.train()
        self.reference.train()

    def state(self) -> list[Tensor | None]:
        """Return copies of this rank's shards, their gradients, and buffers."""
        return states(self.model)

    def gradients(self) -> list[Tensor | None]:
        """Return the gradients of whole parameters."""
        return [full(parameter.grad) for parameter in self.model.parameters()]

    def follow(self) -> None:
        """Give the reference the model's values."""
        with torch.no_grad():
            for mine, right in zip(
                self.model.parameters(), self.reference.parameters(), strict=True
            ):
                values = full(mine.detach())
                assert values is not None
                right.copy_(values)
            for own, other in zip(self.model.buffers(), self.reference.buffers(), strict=True):
                other.copy_(own)

    def alike(self) -> bool:
        """Return whether gradients are there on all ranks alike, and replicas of shards equal."""
        used = torch.tensor([p.grad is not None for p in self.model.parameters()])
        everyone = [torch.zeros_like(used) for _ in range(self.world)]
        dist.all_gather(everyone, used)
        if not all(torch.equal(used, each) for each in everyone):
            return False
        if not self._replicated:
            return True
        there = [each for each in states(self.model, buffers=False) if each is not None]
        flat = torch.cat([each.reshape(-1) for each in there])
        others: list[Any] = [None] * self.world
        dist.all_gather_object(others, flat)
        return torch.equal(flat, others[(self.rank + GROUP) % self.world])
