"""Random steps of a DDP job, with errors at random operations of random ranks.

All operations of a call and of an optimizer's step can fail, those of the sums, too. The gradient
is compared with one process over the joined batch, and, where it depends on the pieces (dropout,
BatchNorm), with the committed pieces run again on each rank.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

from elastic_mbs.distributed import buckets, torch_private

from .training import Counts, Training

FLAGS: list[dict[str, Any]] = [
    {},
    {"find_unused_parameters": True},
    {"static_graph": True},
    {"gradient_as_bucket_view": True},
    {"broadcast_buffers": False},
]


class Replicas(Training):
    """A replica of a DDP model."""

    def __init__(
        self,
        rank: int,
        world: int,
        shared: random.Random,
        counts: Counts,
        overlap: bool | None = None,
    ) -> None:
        """Draw a model, and where `overlap` is None, whether it has overlap."""
        drawn = shared.random() < 0.7
        super().__init__(rank, world, shared, counts, overlap=drawn if overlap is None else overlap)

    def wrap(self) -> nn.Module:
        """Wrap the model, with any flag of DDP's."""
        shared = self.shared
        buckets.CAP = shared.choice([300, 2**20])  # some buckets, or one
        ddp = DDP(self.model, **shared.choice(FLAGS))
        self.called = self.model if shared.random() < 0.3 else ddp
        return ddp

    def state(self) -> list[Tensor | None]:
        """Return copies of gradients, parameters and buffers."""
        grads = [None if p.grad is None else p.grad.clone() for p in self.model.parameters()]
        values = [*self.model.parameters(), *self.model.buffers()]
        return [*grads, *(value.detach().clone() for value in values)]

    def gradients(self) -> list[Tensor | None]:
        """Return the gradients."""
        return [parameter.grad for parameter in self.model.parameters()]

    def follow(self) -> None:
        """Give the reference the model's values."""
        self.reference.load_state_dict(self.model.state_dict())

    def alike(self) -> bool:
        """Return whether the replicas have the same parameters and gradients."""
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.model.parameters()]
        tensors = [*self.model.parameters(), *grads]
        flat = torch.cat([tensor.detach().reshape(-1) for tensor in tensors])
        others = [torch.zeros_like(flat) for _ in range(self.world)]
        dist.all_gather(others, flat)
        return all(torch.equal(flat, other) for other in others)


@contextmanager
def counting_early_sums(counts: Counts) -> Iterator[None]:
    """Count the sums that begin while a backward runs."""
    begin = torch_private.all_reduce

    def all_reduce(group: torch_private.Group, tensor: Tensor) -> dist.Work:
        counts.early += torch._C._current_graph_task_id() >= 0
        return begin(group, tensor)

    torch_private.all_reduce = all_reduce
    try:
        yield
    finally:
        torch_private.all_reduce = begin
