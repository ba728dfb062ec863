"""Training under a memory limit of any kind, in this process or in a child, and its report."""

import ctypes
import gc
import os
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from elastic_mbs import OutOfMemory
from elastic_mbs.memory import Headroom, UsageMeter, oom
from stress.limits import MemoryLimit, open_limit
from tests.helpers.steps import elastic, grads, off_by

Emit = Callable[[dict[str, Any]], None]
MEBI = 1 << 20
SAMPLES, ROWS, WIDTH = 32, 32, 256


def train(emit: Emit, kind: str) -> None:
    """Run out of memory in forward and in backward; then let a co-tenant come and go."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(64, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 10)
    ).double()
    x, y = (
        torch.randn(SAMPLES, ROWS, 64, dtype=torch.float64),
        torch.randint(0, 10, (SAMPLES, ROWS)),
    )
    in_backward: list[int] = []
    memory = open_limit(kind)

    def loss_fn(batch: tuple[Tensor, Tensor]) -> Tensor:
        hidden = model[:2](batch[0])
        if in_backward:
            hidden.register_hook(
                lambda _: memory.resize(in_backward.pop()) if in_backward else None
            )
        return functional.cross_entropy(model[2:](hidden).flatten(0, 1), batch[1].flatten())

    def piece(size: int) -> None:
        loss_fn((x[:size], y[:size])).backward()

    def live() -> int:
        model.zero_grad()
        gc.collect()
        return memory.live()

    with memory:
        memory.warm(piece, [1, 2, 4, 8, 16, SAMPLES])
        piece(SAMPLES)
        rest = live()
        memory.reset_peak()
        piece(SAMPLES)
        need, whole = memory.peak() - rest, grads(model)
        emit({"what": "needs", "onednn": torch.backends.mkldnn.enabled})
        for phase in ("forward", "backward"):
            events: list[Any] = []
            before, failures = live(), memory.failures()
            with elastic(
                model, micro_batch_size=SAMPLES, on_event=events.append, sensor=memory.sensor
            ) as mbs:
                narrow = before + need * 45 // 100
                in_backward.append(narrow) if phase == "backward" else memory.resize(narrow)
                pieces = len(mbs.backward(loss_fn, (x, y)).partition)
            failures = None if failures is None else (memory.failures() or 0) - failures
            memory.resize(None)
            ooms = [event for event in events if isinstance(event, OutOfMemory)]
            found = {
                "phases": [event.phase for event in ooms],
                "message": ooms[0].message if ooms else "",
                "worst": off_by(model, whole),
            }
            emit(
                {
                    "what": phase,
                    "pieces": pieces,
                    "failures": failures,
                    **found,
                    "left": live() - before,
                }
            )
        _come_and_go(emit, memory)
    emit({"what": "lifted", "bytes": MEBI * len(_taken(64)[0])})


def _come_and_go(emit: Emit, memory: MemoryLimit) -> None:
    start, meter = memory.live(), memory.sensor
    memory.resize(start + 20 * MEBI)
    kept = torch.zeros(8 * MEBI, dtype=torch.uint8)
    memory.occupy(10 * MEBI)
    reading = meter.read() if meter is not None else None
    assert isinstance(reading, Headroom)
    figures = {name: getattr(reading, name) for name in ("free", "capacity", "total", "source")}
    emit(
        {
            "what": "beside",
            "others": memory.others(),
            "live": memory.live() - start,
            "kept": len(kept),
            **figures,
        }
    )
    emit({"what": "refused", "kind": _taken(4)[1]})
    memory.occupy(0)
    torch.zeros(8 * MEBI, dtype=torch.uint8)
    assert isinstance(meter, UsageMeter)
    memory.reset_peak()
    torch.zeros(6 * MEBI, dtype=torch.uint8)
    meter.reset_peak()  # as a runtime does, inside the interval of another
    usage = meter.usage()
    assert usage is not None
    emit(
        {
            "what": "alone",
            "others": memory.others(),
            "peak": memory.peak() - start,
            "of the runtime": usage.peak_allocated - start,
        }
    )


def _taken(mebi: int) -> tuple[list[Tensor], str | None]:
    """Take up to `mebi` blocks of 1 MiB; return them, and the kind of the error that stopped it."""
    blocks: list[Tensor] = []
    try:
        while len(blocks) < mebi:
            blocks.append(torch.zeros(MEBI, dtype=torch.uint8))
    except RuntimeError as error:
        verdict = oom.classify(error)
        return blocks, None if verdict is None else verdict.kind.value
    return blocks, "none"


def take_beside_holes(emit: Emit, mebi: int) -> None:
    """Leave a hole of `mebi` MiB in the heap, open the process limit with half of it, and take."""
    libc = ctypes.CDLL(None)
    libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
    small = 1 << 15  # bytes, below any size from which the heap maps a block of its own
    blocks = [libc.malloc(small) for _ in range(mebi * MEBI // small + 1)]
    for block in blocks[:-1]:  # the last stays, so the hole is not given back
        libc.free(block)
    with (memory := open_limit("rlimit")):
        memory.resize(memory.live() + mebi * MEBI // 2)
        taken, kind = _taken(mebi)
        emit({"taken": len(taken), "kind": kind})


def share(emit: Emit, size: int, hold: float) -> None:
    """Take up to `size` bytes of a shared device in blocks of 1 MiB, and hold them for a while."""
    with (memory := open_limit("shim", shared=True)):
        blocks, kind = _taken(size // MEBI)
        emit(
            {
                "pid": os.getpid(),
                "held": len(blocks) * MEBI,
                "kind": kind,
                "others": memory.others(),
            }
        )
        time.sleep(hold)
