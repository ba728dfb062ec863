"""A reading in doubt, end to end: nothing grows on it, it is told once, training goes on exactly, and growth comes back with the sensor."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn

from elastic_mbs import (
    ElasticMBS,
    Event,
    Headroom,
    MemoryBudget,
    MemoryOptions,
    MicroBatchFloorError,
    Policy,
    SensorBack,
    SensorLost,
    WaitingForMemory,
)
from elastic_mbs.memory import Holder
from elastic_mbs.testing import InjectOOM
from tests.helpers.steps import cross_entropy, elastic, mlp, off_by, pairs, whole_gradient

MIB = 1024**2
LOST = "NVML: NVMLError_GpuIsLost: GPU is lost"
ROOM = Headroom(free=100 * MIB, total=1024 * MIB, held_by_others=300 * MIB, source="test", at=0.0)


def test_a_reading_in_doubt_stops_growth_and_not_training() -> None:
    model, batch, events = nn.Linear(6, 4).double(), pairs(64), list[Event]()
    wanted = whole_gradient(model, lambda net: cross_entropy(net)(batch))
    with MemoryBudget("1GiB", track=(model, batch)) as budget:
        sensor: Any = SimpleNamespace(doubt=None, read=lambda: replace(cast(Headroom, budget.read()), doubt=sensor.doubt))
        policy = Policy(patience=1, jitter=0.0, cooldown=0.0, min_gain=0.0, seed=0)
        memory = MemoryOptions(sensor=sensor, monitor_interval=0)
        mbs = ElasticMBS(model, micro_batch_size=2, policy=policy, on_event=events.append, memory=memory)

        def calls(n: int) -> list[int]:
            sizes = []
            for _ in range(n):
                model.zero_grad()
                sizes.append(mbs.backward(cross_entropy(model), batch).micro_batch_size)
                assert off_by(model, wanted) <= 1e-12
            return sizes

        alive = calls(4)
        assert alive[-1] > alive[0]
        sensor.doubt = LOST
        frozen = calls(12)
        assert len(set(frozen[1:])) == 1
        assert frozen[-1] < 64
        with InjectOOM(at=[5]):
            model.zero_grad()
            shrunk = mbs.backward(cross_entropy(model), batch)
        assert shrunk.ooms == 1
        assert off_by(model, wanted) <= 1e-12
        assert isinstance(mbs.headroom, Headroom), "the figures stay usable"
        sensor.doubt = None
        assert calls(30)[-1] > shrunk.micro_batch_size
    changes = [event for event in events if isinstance(event, SensorLost | SensorBack)]
    assert changes == [SensorLost(mbs.settings.name, LOST), SensorBack(mbs.settings.name, "budget")]


@pytest.mark.parametrize("known", [True, False])
def test_at_the_floor_the_biggest_holders_and_the_doubt_are_named_where_they_are_known(known: bool) -> None:
    model, events = mlp(), list[Event]()
    holders = (Holder(4711, "python", 200 * MIB), Holder(12, None, 60 * MIB), Holder(13, "Xorg"), Holder(14))
    reading = replace(ROOM, doubt=LOST, holders=holders) if known else ROOM
    sensor = SimpleNamespace(read=lambda: reading)
    mbs = elastic(model, micro_batch_size=1, sensor=sensor, wait_for_memory=2.0, on_event=events.append)
    naps: list[float] = []
    mbs._context.sleep = naps.append

    def loss_fn(_: object) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 MiB.")

    with pytest.raises(MicroBatchFloorError) as caught:
        mbs.backward(loss_fn, pairs(2))
    names = "python (PID 4711) 200.0 MiB, PID 12 60.0 MiB, Xorg (PID 13), and 1 more" if known else ""
    said = f" (processes there: {names}) (in doubt: {LOST})" if known else ""
    assert f"300.0 MiB held by others{said}. Ways out" in str(caught.value)
    assert sum(naps) == pytest.approx(2.0), "a figure in doubt is good enough to wait by"
    [wait] = [event for event in events if isinstance(event, WaitingForMemory)]
    assert wait.holders == names
    assert wait.line().endswith(f"held by others 300.0 MiB: {names})" if known else "held by others 300.0 MiB)")
