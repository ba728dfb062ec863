"""Forwards and steps of DDP itself between calls change no gradient of the calls, nor theirs."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel as DDP

from elastic_mbs import DistributedOptions, ElasticMBS, Policy
from stress.ranks.job import run_ranks, values
from stress.ranks.losses import data
from tests.helpers.ddp import FailingBackward, failing, joined, net, worst

TIMEOUT = DistributedOptions(timeout=20)
STEPS = 4


def square(out: Tensor) -> Tensor:
    return out.pow(2).mean()


def forward_first(rank: int, world: int, only_first: bool, flags: dict[str, Any]) -> list[float]:
    """Call the wrapper with gradients, and drop what it returns, before each call."""
    model, reference = net(), net()
    ddp, found = DDP(model, **flags), []
    with ElasticMBS(ddp, distributed=TIMEOUT, policy=Policy(max_micro_batch_size=4)) as mbs:
        for step in range(STEPS):
            batches = [data(each, step) for each in range(world)]
            if rank == 0 or not only_first:
                ddp(batches[rank])
            FailingBackward.left = int(step % world == rank)
            alone = None if only_first and rank and step == 2 else batches[rank]
            mbs.backward(lambda x: square(ddp(failing(x))), alone)
            there = batches[:1] if only_first and step == 2 else batches
            square(reference(joined(there))).backward()
            found.append(worst(model, reference))
            model.zero_grad()
            reference.zero_grad()
    square(ddp(batches[rank])).backward()  # DDP itself still sums
    for each in batches:
        (square(reference(each)) / world).backward()
    return [*found, worst(model, reference)]


@pytest.mark.parametrize("only_first", [False, True])
@pytest.mark.parametrize("flags", [{}, {"find_unused_parameters": True}], ids=["plain", "unused"])
def test_a_forward_whose_loss_was_dropped_changes_no_gradient(
    only_first: bool, flags: dict[str, Any]
) -> None:
    for errors in values(run_ranks(forward_first, only_first, flags)):
        assert max(errors) <= 1e-12, errors
