"""Every rank knows how fast each of them is by itself."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP

from elastic_mbs import ElasticMBS
from elastic_mbs.distributed.control import Control
from elastic_mbs.engine.outcome import timing
from stress.ranks.job import run_ranks, values
from stress.ranks.losses import data
from tests.helpers.ddp import net


def speeds_of(rank: int, world: int, kind: str, options: dict[str, Any]) -> Any:
    """Make calls on a clock that only samples and waits for other ranks move."""
    now = [0.0]
    timing.monotonic = lambda: now[0]  # type: ignore[attr-defined]
    wait = Control.wait

    def slow_wait(self: Control, *args: Any) -> None:
        now[0] += 1000.0
        wait(self, *args)

    Control.wait = slow_wait  # type: ignore[assignment,method-assign]
    model: nn.Module = net()
    if kind == "ddp":
        model = DDP(model)
    else:
        fully_shard(model)

    def loss_fn(x: Tensor) -> Any:
        now[0] += len(x) * (1 + rank)
        each = model(x).pow(2)
        return {"one": each.mean(), "two": each.mean()} if options else each.mean()

    with ElasticMBS(model, **options) as mbs:
        found = [mbs.speeds]
        mbs.backward(loss_fn, data(rank, 0, 8))
        found.append(mbs.speeds)
        mbs.backward(loss_fn, data(rank, 1, 4) if rank == 0 else None)
        found.append(mbs.speeds)
    return found


@pytest.mark.parametrize("options", [{}, {"count": {"one": None, "two": None}}], ids=["", "names"])
@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_speeds_are_samples_per_second_without_the_waits_for_others(
    kind: str, options: dict[str, Any]
) -> None:
    for found in values(run_ranks(speeds_of, kind, options)):
        # a rank without a batch keeps its own
        assert found == [(), (1.0, 0.5), (1.0, 0.5)]


def test_one_process_has_no_speeds() -> None:
    model = net()
    with ElasticMBS(model) as mbs:
        mbs.backward(lambda x: model(x).pow(2).mean(), data(0, 0))
        assert mbs.speeds == ()
