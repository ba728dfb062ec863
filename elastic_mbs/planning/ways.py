"""Ways to save memory and their time: none, saved tensors on the host, or blocks run again.

PAPAYA (arXiv 2303.14633): C bytes may be used, and a piece of m samples takes α·m + β bytes and
γ·m + δ seconds. A way that has α′ and γ′ instead is faster exactly if its P-score
(α − α′)/(γ′ − γ) is above the P-point (C − β)/δ: if γ′ + δ/m′ is below γ + δ/m for the largest
sizes m′ and m that fit. Here these sizes come from traces and not from a straight line, pieces are
whole, and δ grows with the number of operations.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from typing import Any, NamedTuple

import torch
from torch import Tensor

from elastic_mbs.batch.containers import tensors_in
from elastic_mbs.engine.shared.resources import Resources
from elastic_mbs.escalation.checkpoint import CheckpointedBlocks
from elastic_mbs.escalation.offload import HostSlot, OffloadedTensors
from elastic_mbs.memory.budget import on_host
from elastic_mbs.planning.lines import Trace
from elastic_mbs.planning.report import PlannedWay
from elastic_mbs.planning.timeline import Timeline
from elastic_mbs.rollback.saved_tensors import Slot

COPIED = 4 * 2**20  # bytes of the copies that are timed
COPIES = 5


class Way(StrEnum):
    """A way to run a piece."""

    NONE = "none"
    OFFLOAD = "offload"
    CHECKPOINT = "checkpoint"


class NoWayError(Exception):
    """The model has nothing that this way applies to."""


class Known(NamedTuple):
    """The measured times."""

    # γ, in seconds per sample, and δ, in seconds per piece, without any of the ways
    time: tuple[float, float] | None = None
    move: float | None = None  # seconds for a byte to go to the host and come back


class _Moved(OffloadedTensors):
    """Saved tensors on the host, for fakes: their bytes do not count on the device."""

    def __init__(self, context: Resources, data: Any, timeline: Timeline) -> None:
        held = (
            tensor
            for root in context.model.roots
            for tensor in (*root.parameters(), *root.buffers())
        )
        once = iter([*held, *tensors_in(data)])  # entered once: it keeps no fakes
        super().__init__(lambda: once)
        self.bytes = 0
        self._timeline = timeline

    def _slot(self, tensor: Tensor) -> Slot:
        self._timeline.elsewhere = True
        try:
            slot = super()._slot(tensor)
        finally:
            self._timeline.elsewhere = False
        if isinstance(slot, HostSlot):
            self.bytes += tensor.nbytes
        return slot


@contextmanager
def made(way: Way, context: Resources, data: Any, timeline: Timeline) -> Iterator[_Moved | None]:
    """Make a piece inside the block in this way."""
    if way is Way.OFFLOAD:
        with _Moved(context, data, timeline) as moved:
            yield moved
    elif way is Way.CHECKPOINT:
        blocks = CheckpointedBlocks(context.model.roots, context.streams)
        if not blocks.blocks:
            raise NoWayError(
                "the model has no blocks: no gradient_checkpointing_enable(), no nn.ModuleList, "
                "no nn.Sequential"
            )
        with blocks:
            yield None
    else:
        yield None


def seconds_to_move(device: torch.device) -> float | None:
    """Return the seconds for a byte to go to the host and back; None without room to try.

    The best of a few copies counts.
    """
    best = math.inf
    try:
        with on_host():
            tensor = torch.zeros(COPIED, dtype=torch.uint8, device=device)
            for _ in range(COPIES):
                began = time.perf_counter()
                HostSlot(tensor).get()[0].item()  # which waits for the device
                best = min(best, time.perf_counter() - began)
    except torch.OutOfMemoryError:
        return None
    return best / COPIED


def weighed(
    way: Way,
    *,
    trace: Trace,
    none: Trace,
    samples: int,
    largest: int,
    pieces: int,
    before: int,
    known: Known,
) -> PlannedWay:
    """Return the gain and cost of one way compared with none.

    Its largest pieces cut the batch into `pieces`, 0 if none fits; without any way there would be
    `before`.
    """
    work = trace.flops / trace.size / (none.flops / none.size) if none.flops else None
    calls = len(trace.operations) / len(none.operations)
    moved = trace.moved / trace.size
    seconds = pays = None
    if (
        pieces
        and known.time is not None
        and work is not None
        and (not moved or known.move is not None)
    ):
        per_sample = known.time[0] * work + moved * (known.move or 0.0)
        seconds = per_sample * samples + known.time[1] * calls * pieces
    if pieces and work is not None and not moved and (fewer := before - calls * pieces) > 0:
        pays = samples * (work - 1) / fewer
    return PlannedWay(way.value, largest, pieces, work, round(moved), seconds, pays)
