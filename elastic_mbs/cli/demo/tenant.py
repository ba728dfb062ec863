"""The co-tenant: another user of the memory, which comes and goes by a script.

It moves in the middle of a step, where that hurts: at the n-th micro-batch, in forward or backward.
The rest of the memory is the training's: as the limit of a `MemoryBudget` on a CPU, and as the
process's memory fraction on CUDA.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from elastic_mbs.memory import MemoryBudget


@dataclass(frozen=True)
class TenantMove:
    """A line of the script."""

    step: int  # counted from 0
    micro_batch: int  # of that step, counted from 1; failed attempts count too
    phase: Literal["forward", "backward"]
    left: int  # bytes left to the training
    what: str  # what happens, in words


def write_script(steps: int, budget: int, floor: int) -> list[TenantMove]:
    """Return a script for `steps` steps.

    The training is alone for a quarter of the steps, then has a co-tenant that takes half for a
    quarter, then one that takes more for a tenth, and is alone again. Below `floor` bytes the
    smallest micro-batch might not fit.
    """
    arrival, spike = steps // 4, steps // 2
    return [
        TenantMove(arrival, 2, "backward", max(floor, budget // 2), "a co-tenant arrives"),
        TenantMove(spike, 2, "forward", max(floor, budget // 5), "it takes more"),
        TenantMove(max(spike + 1, steps * 3 // 5), 1, "forward", budget, "it leaves"),
    ]


class Script:
    """The moves, each made when its time has come.

    `forward` is a forward hook of the model's last block.
    """

    def __init__(
        self,
        moves: Sequence[TenantMove],
        step: Callable[[], int],
        make: Callable[[TenantMove], None],
    ) -> None:
        self._moves = list(moves)
        self._step, self._make = step, make
        self._seen = (-1, 0)  # step and micro-batch

    def forward(self, module: nn.Module, inputs: object, output: torch.Tensor) -> None:
        step, (last, micro_batch) = self._step(), self._seen
        self._seen = (step, micro_batch + 1 if step == last else 1)
        while self._moves and (self._moves[0].step, self._moves[0].micro_batch) <= self._seen:
            move = self._moves.pop(0)
            if move.phase == "backward":
                output.register_hook(lambda _, move=move: self._make(move))
            else:
                self._make(move)


@contextmanager
def limited(budget: int, device: torch.device) -> Iterator[Callable[[int], None]]:
    """Limit the training and its co-tenant to `budget` bytes together, inside the block.

    Yields a function that sets how many of these bytes the training has.
    """
    if device.type != "cuda":
        with MemoryBudget(budget) as limit:
            yield lambda left: setattr(limit, "limit", left)
        return
    total = torch.cuda.mem_get_info(device)[1]

    def leave(left: int) -> None:
        # the fraction counts when the allocator takes more, not for what it has cached
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction(min(1.0, left / total), device)

    leave(budget)
    try:
        yield leave
    finally:
        leave(total)
