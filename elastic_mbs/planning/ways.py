"""Ways to save memory and their time: none, and each step of `RecoveryOptions.escalate` by itself.

PAPAYA (arXiv 2303.14633): C bytes may be used, and a piece of m samples takes α·m + β bytes and
γ·m + δ seconds. A way that has α′ and γ′ instead is faster exactly if its P-score
(α − α′)/(γ′ − γ) is above the P-point (C − β)/δ: if γ′ + δ/m′ is below γ + δ/m for the largest
sizes m′ and m that fit. Here these sizes come from traces and not from a straight line, pieces are
whole, and δ grows with the number of operations.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from elastic_mbs.batch.containers import tensors_in
from elastic_mbs.engine.shared.resources import Resources
from elastic_mbs.escalation.checkpoint import CheckpointedBlocks, checkpointable, is_compiled
from elastic_mbs.escalation.head import OtherLayers
from elastic_mbs.escalation.inputs import Inputs
from elastic_mbs.escalation.ladder import Step, steps_of
from elastic_mbs.escalation.logits import ChunkedLogits
from elastic_mbs.escalation.offload import HostSlot, OffloadedTensors
from elastic_mbs.escalation.position_wise import Kept, PositionWise
from elastic_mbs.escalation.tile import TiledModules
from elastic_mbs.memory.budget import on_host
from elastic_mbs.options import RUNGS
from elastic_mbs.planning.lines import Trace
from elastic_mbs.planning.report import PlannedWay
from elastic_mbs.planning.timeline import Timeline
from elastic_mbs.rollback.random_streams import RandomStreams
from elastic_mbs.rollback.saved_tensors import Slot

COPIED = 4 * 2**20  # bytes of the copies that are timed
COPIES = 5


NONE = Step("none")

NOTHING = {
    "logits": "the step has no large linear layer whose output goes to a mean or summed "
    "cross-entropy alone",
    "tile": "no module with parameters keeps much and is position-wise",
}
"""The reasons why a way changes nothing."""


def ways_of(modules: Sequence[nn.Module]) -> list[Step]:
    """Return every step of `RecoveryOptions.escalate` that a model could take."""
    blocks = len(checkpointable(modules))
    steps = {rung: list(steps_of(rung, lambda: blocks)) or [Step(rung)] for rung in RUNGS}
    return [step for rung in RUNGS for step in steps[rung]]


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


class _TriedAside(PositionWise):
    """Verdicts on modules of fakes, which are tried with real tensors."""

    def kept(self, module: nn.Module, input: Tensor, streams: RandomStreams) -> Kept | None:
        with _disable_current_modes():
            return super().kept(module, input, streams)


def _unknown() -> None:
    """Return no free memory: chunks and tiles have the size that they have by themselves."""


@contextmanager
def made(way: Step, context: Resources, data: Any, timeline: Timeline) -> Iterator[_Moved | None]:
    """Make a piece inside the block in this way."""
    if way.rung == "offload":
        with _Moved(context, data, timeline) as moved:
            yield moved
        return
    with _rung(way, context):
        yield None


def _rung(way: Step, context: Resources) -> AbstractContextManager[object]:
    model = context.model
    if way.rung in NOTHING and any(map(is_compiled, model.modules)):
        raise NoWayError("the model is compiled")
    if way.rung == "logits":
        return ChunkedLogits(OtherLayers(), _unknown)
    if way.rung == "tile":
        return TiledModules(model.roots, context.streams, _TriedAside(), _unknown, Inputs())
    if way.rung == "checkpoint":
        if not way.of:
            raise NoWayError(
                "the model has no blocks: no gradient_checkpointing_enable(), no nn.ModuleList, "
                "no nn.Sequential"
            )
        return CheckpointedBlocks(model.roots, context.streams, way.blocks)
    return nullcontext()


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
    way: Step,
    *,
    trace: Trace,
    none: Trace,
    samples: int,
    largest: int,
    pieces: int,
    before: int,
    known: Known,
    peak: int | None = None,
) -> PlannedWay:
    """Return the gain and cost of one way compared with none.

    Its largest pieces cut the batch into `pieces`, 0 if none fits; without any way there would be
    `before`. Its smallest piece has this `peak`, in bytes.
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
        pays = max(0.0, samples * (work - 1) / fewer)
    return PlannedWay(str(way), largest, pieces, work, round(moved), seconds, pays, peak=peak)
