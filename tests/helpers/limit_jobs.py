"""Trains under a memory limit and says what has happened there: the same for every kind, in this process or in a child."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from elastic_mbs import ElasticMBS, MemoryOptions, OutOfMemory
from elastic_mbs.memory import Headroom, UsageMeter, oom
from stress.limits import MemoryLimit, open_limit

Emit = Callable[[dict[str, Any]], None]
MEBI = 1 << 20
SAMPLES, ROWS, WIDTH = 32, 32, 256


def train(emit: Emit, kind: str) -> None:
    """Runs out of memory in forward and in backward, and says how that went; then has the co-tenant come and go."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 10)).double()
    x, y = torch.randn(SAMPLES, ROWS, 64, dtype=torch.float64), torch.randint(0, 10, (SAMPLES, ROWS))
    in_backward: list[int] = []
    memory = open_limit(kind)

    def loss_fn(batch: tuple[Tensor, Tensor]) -> Tensor:
        hidden = model[:2](batch[0])
        if in_backward:
            hidden.register_hook(lambda _: memory.resize(in_backward.pop()) if in_backward else None)
        return functional.cross_entropy(model[2:](hidden).flatten(0, 1), batch[1].flatten())

    def piece(size: int) -> None:
        loss_fn((x[:size], y[:size])).backward()

    with memory:
        memory.warm(piece, [1, 2, 4, 8, 16, SAMPLES])
        piece(SAMPLES)
        model.zero_grad()
        gc.collect()
        rest = memory.live()
        memory.reset_peak()
        piece(SAMPLES)
        need = memory.peak() - rest
        whole = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
        model.zero_grad()
        emit({"what": "needs", "need": need, "onednn": torch.backends.mkldnn.enabled})
        for phase in ("forward", "backward"):
            events: list[Any] = []
            gc.collect()
            before = memory.live()
            narrow = before + need * 45 // 100
            with ElasticMBS(
                model,
                micro_batch_size=SAMPLES,
                on_event=events.append,
                memory=MemoryOptions(sensor=memory.sensor, monitor_interval=0, wait_for_memory=0),
            ) as mbs:
                if phase == "backward":
                    in_backward.append(narrow)
                else:
                    memory.resize(narrow)
                failures = memory.failures()
                result = mbs.backward(loss_fn, (x, y))
                failures = None if failures is None else (memory.failures() or 0) - failures
            pieces = len(result.partition)
            del result  # it holds the loss
            memory.resize(None)
            worst = max(float((p.grad - w).abs().max() / w.abs().max()) for p, w in zip(model.parameters(), whole, strict=True) if p.grad is not None)
            model.zero_grad()
            ooms = [event for event in events if isinstance(event, OutOfMemory)]
            gc.collect()
            emit(
                {
                    "what": phase,
                    "phases": [event.phase for event in ooms],
                    "message": ooms[0].message if ooms else "",
                    "worst": worst,
                    "pieces": pieces,
                    "failures": failures,
                    "left": memory.live() - before,
                }
            )
        _come_and_go(emit, memory)
    blocks = [torch.zeros(MEBI, dtype=torch.uint8) for _ in range(64)]
    emit({"what": "lifted", "bytes": sum(map(len, blocks))})


def _come_and_go(emit: Emit, memory: MemoryLimit) -> None:
    start = memory.live()
    memory.resize(start + 20 * MEBI)
    kept = torch.zeros(8 * MEBI, dtype=torch.uint8)
    memory.occupy(10 * MEBI)
    reading = memory.sensor.read() if memory.sensor is not None else None
    emit({"what": "beside", "others": memory.others(), "live": memory.live() - start, "kept": len(kept), **_figures(reading)})
    try:
        torch.zeros(4 * MEBI, dtype=torch.uint8)
        emit({"what": "refused", "kind": None})
    except RuntimeError as error:
        verdict = oom.classify(error)
        emit({"what": "refused", "kind": None if verdict is None else verdict.kind.value})
    memory.occupy(0)
    torch.zeros(8 * MEBI, dtype=torch.uint8)
    meter = memory.sensor
    assert isinstance(meter, UsageMeter)
    memory.reset_peak()
    more = torch.zeros(6 * MEBI, dtype=torch.uint8)
    del more
    meter.reset_peak()  # as a runtime does, in the middle of somebody else's interval
    usage = meter.usage()
    assert usage is not None
    emit({"what": "alone", "others": memory.others(), "peak": memory.peak() - start, "of the runtime": usage.peak_allocated - start})


def _figures(reading: object) -> dict[str, Any]:
    assert isinstance(reading, Headroom)
    return {"free": reading.free, "capacity": reading.capacity, "total": reading.total, "source": reading.source}


def share(emit: Emit, size: int, hold: float) -> None:
    """Takes as much of a shared device as it can get, up to `size`, in blocks of 1 MiB; says so, and keeps it for a while."""
    memory = open_limit("shim", shared=True)
    with memory:
        blocks: list[Tensor] = []
        try:
            while len(blocks) * MEBI < size:
                blocks.append(torch.zeros(MEBI, dtype=torch.uint8))
        except RuntimeError as error:
            verdict = oom.classify(error)
            emit({"pid": os.getpid(), "held": len(blocks) * MEBI, "kind": None if verdict is None else verdict.kind.value, "others": memory.others()})
        else:
            emit({"pid": os.getpid(), "held": len(blocks) * MEBI, "kind": "none", "others": memory.others()})
        time.sleep(hold)
