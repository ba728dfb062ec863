"""What the errors and waits of a call say of a reading in doubt."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from elastic_mbs import (
    Event,
    Headroom,
    MicroBatchFloorError,
    WaitingForMemory,
)
from elastic_mbs.memory import Holder
from tests.helpers.steps import elastic, mlp, pairs

MIB = 1024**2
LOST = "NVML: NVMLError_GpuIsLost: GPU is lost"
ROOM = Headroom(free=100 * MIB, total=1024 * MIB, held_by_others=300 * MIB, source="test", at=0.0)


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
