"""The floor of a piece that cannot be cut: tried again where there is room, and honest figures."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor, nn

from elastic_mbs import (
    CallFailed,
    ElasticMBS,
    Event,
    Headroom,
    MemoryBudget,
    MemoryOptions,
    MicroBatchFloorError,
    OutOfMemory,
)
from elastic_mbs.testing import InjectOOM
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
from tests.helpers.strikes import until_clean

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
        mbs = ElasticMBS(model, memory=MemoryOptions(monitor_interval=0, wait_for_memory=0))
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


@pytest.mark.no_oom_injection
def test_a_rollback_takes_no_memory_so_each_failure_has_its_event() -> None:
    survived = 0
    for inject in until_clean(lambda n: InjectOOM(at=range(n, n + 4)), stride=2, least=10):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)).double()
        events, batch = list[Event](), pairs(2)
        mbs = elastic(model, micro_batch_size=2, min_micro_batch_size=2, on_event=events.append)
        before = [buffer.clone() for buffer in model.buffers()]
        try:
            with inject:
                result = mbs.backward(cross_entropy(model), batch)
        except MicroBatchFloorError:
            failed = sum(event.ooms for event in events if isinstance(event, CallFailed))
            assert all(map(torch.equal, before, model.buffers()))
        else:
            failed = result.ooms
            survived += failed > 0
        assert sum(isinstance(event, OutOfMemory) for event in events) == failed, inject.hits
    assert survived > 3
