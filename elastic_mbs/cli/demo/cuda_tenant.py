"""The co-tenant on CUDA: another process that really takes the memory, until `cudaMalloc` fails in ours."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Self

import torch
from torch import nn

from elastic_mbs.cli.demo.neighbour import Neighbour
from elastic_mbs.cli.demo.tenant import Move, Tenant
from elastic_mbs.errors import UsageError
from elastic_mbs.events import format_bytes

MOSTLY_FREE = 0.75
"""Share of the device that must be free before the demo starts: it fills the rest but for the budget, and nobody else may starve of it."""


class CudaTenant(Tenant):
    """A ballast process beside us on the device.

    The budget itself is a memory fraction: with the co-tenant gone, the device seems as large as the budget.

    Args:
        budget: bytes that there are for both.
        script: its moves, in order.
        module: see `Tenant`.
        device: the CUDA device, with its index.
    """

    def __init__(self, budget: int, script: Sequence[Move], module: nn.Module, device: torch.device) -> None:
        super().__init__(budget, script, module)
        self._device = device
        self._wanted = 0
        self._neighbour = Neighbour.on_cuda(device.index)

    def __enter__(self) -> Self:
        """Starts the process and caps ours.

        Raises:
            UsageError: others use the device, so that the co-tenant could starve them; or the budget is larger than it.
        """
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(self._device)
        if free < MOSTLY_FREE * total:
            raise UsageError(
                f"{format_bytes(total - free)} of {self._device} are in use, and the demo's co-tenant fills a device to the brim: "
                "run it on an idle one, or with --device cpu"
            )
        if self.budget > free:
            raise UsageError(f"--budget {format_bytes(self.budget)} is more than {self._device} has free ({format_bytes(free)})")
        self._neighbour.__enter__()
        torch.cuda.set_per_process_memory_fraction(self.budget / total, self._device)
        return super().__enter__()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Ends the process and lifts the cap."""
        super().__exit__(kind, error, trace)
        torch.cuda.set_per_process_memory_fraction(1.0, self._device)
        self._neighbour.__exit__(kind, error, trace)

    def leave(self, free: int) -> None:
        """Has the ballast take what is too much for `free` bytes to be left to us.

        What our allocator keeps in reserve nobody can take from us, so it is given back first: an allocator that keeps all it ever had would never
        notice a neighbour. What it still holds then, the ballast gets as soon as we let go of it.
        """
        torch.cuda.empty_cache()
        held = self._neighbour.hold(self._wanted)  # it may have got more since it was last asked
        ours = torch.cuda.memory_reserved(self._device)
        on_device = torch.cuda.mem_get_info(self._device)[0]
        alone = free >= self.budget  # the memory fraction is limit enough then
        self._wanted = 0 if alone else max(0, held + on_device + ours - free)
        self._neighbour.hold(self._wanted)
