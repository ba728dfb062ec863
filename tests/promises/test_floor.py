"""The floor of a piece that cannot be cut: tried again where there is room, and honest figures."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor, nn

from elastic_mbs import ElasticMBS, Headroom, MemoryBudget, MemoryOptions, MicroBatchFloorError
from tests.helpers.steps import (
    FailOn,
    cross_entropy,
    elastic,
    failing,
    mlp,
    off_by,
    pairs,
    whole_gradient,
)

MIB = 1024**2


class _Plenty:
    """A sensor that sees all memory free at every look."""

    def read(self) -> Headroom:
        return Headroom(1024 * MIB, 1024 * MIB, 0, "test", 0.0)


@pytest.mark.parametrize("failures", [2, 5])
def test_memory_that_is_short_for_a_moment_at_the_floor_ends_nothing(failures: int) -> None:
    # At every look all is free: a neighbour's peaks of some milliseconds.
    model, batch = mlp(), pairs(1)
    mbs = elastic(model, sensor=_Plenty(), wait_for_memory=30.0)
    naps = list[float]()
    mbs._resources.sleep = naps.append
    fail = FailOn(
        *range(1, failures + 1),
        error=lambda: torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 MiB."),
    )
    assert mbs.backward(failing(model, fail), batch).ooms == failures
    assert naps == [0.25] * (failures - 1)
    assert off_by(model, whole_gradient(model, lambda net: cross_entropy(net)(batch))) <= 1e-12


def test_figures_at_the_floor_do_not_contradict_each_other() -> None:
    # The look after the failure shows what the failed attempt had held as free.
    model, batch = nn.Linear(1000, 1000), torch.randn(1, 1000)
    with MemoryBudget("64MiB", track=(model, batch)) as budget:
        mbs = ElasticMBS(model, memory=MemoryOptions(monitor_interval=0))
        budget.limit = budget.live + 1_500_000

        def loss_fn(x: Tensor) -> Tensor:
            return sum((model(x).expand(200, -1).exp().sum() for _ in range(4)), x.sum())

        with pytest.raises(MicroBatchFloorError) as caught:
            mbs.backward(loss_fn, batch)
    text = str(caught.value)
    asked = re.search(r"asked for ([\d.]+) KiB on top of ([\d.]+) MiB that this process held", text)
    assert asked, text
    assert float(asked[1]) / 1024 + float(asked[2]) > budget.limit / MIB
    assert "; without the attempt 1.4 MiB of 64.0 MiB were free" in text
    assert "enough for it" not in text
