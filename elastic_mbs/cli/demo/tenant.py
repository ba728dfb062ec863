"""The co-tenant: somebody else who takes memory while training runs, by a script.

A move happens in the middle of a step, where it hurts: at the n-th micro-batch of its step, in forward or backward. On a CPU the co-tenant is the
limit of a `MemoryBudget`, which it moves; on CUDA it is another process (`elastic_mbs.cli.demo.cuda_tenant`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal, Self

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from elastic_mbs.memory import MemoryBudget


@dataclass(frozen=True)
class Move:
    """One line of the script.

    Attributes:
        step: when, counted from 0.
        micro_batch: at which micro-batch of that step, counted from 1; attempts that fail count too.
        phase: in its forward or in its backward.
        left: bytes that are left to the training.
        what: what happens, in words.
    """

    step: int
    micro_batch: int
    phase: Literal["forward", "backward"]
    left: int
    what: str


def write_script(steps: int, budget: int, floor: int) -> list[Move]:
    """A quarter of the steps alone, a quarter beside a co-tenant that takes half, a spike of a tenth, and alone again.

    Args:
        steps: steps in all, at least 4.
        budget: bytes that there are.
        floor: bytes below which the smallest micro-batch might not fit.
    """
    arrival, spike = steps // 4, steps // 2
    return [
        Move(arrival, 2, "backward", max(floor, budget // 2), "a co-tenant arrives"),
        Move(spike, 2, "forward", max(floor, budget // 5), "it takes more"),
        Move(max(spike + 1, steps * 3 // 5), 1, "forward", budget, "it leaves"),
    ]


class Tenant(ABC):
    """Follows a script. A context manager: inside the block the training is limited to what the script leaves.

    Args:
        budget: bytes that there are for both.
        script: its moves, in order.
        module: its forward passes are what counts as micro-batches: the last block of the model.

    Attributes:
        on_move: called just before each move.
    """

    def __init__(self, budget: int, script: Sequence[Move], module: nn.Module) -> None:
        self.budget = budget
        self.on_move: Callable[[Move], object] = lambda move: None
        self._script = list(script)
        self._module = module
        self._step = -1
        self._seen = 0
        self._hook: RemovableHandle | None = None

    @abstractmethod
    def leave(self, free: int) -> None:
        """Takes or gives back memory until the training can have `free` bytes in all."""

    def begin_step(self, step: int) -> None:
        """Tells it how far training is."""
        self._step, self._seen = step, 0

    def __enter__(self) -> Self:
        """Starts watching the model."""
        self._hook = self._module.register_forward_hook(self._forward)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Stops watching, and gives everything back."""
        assert self._hook is not None
        self._hook.remove()

    def _forward(self, module: nn.Module, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        self._seen += 1
        while self._script and (self._script[0].step, self._script[0].micro_batch) <= (self._step, self._seen):
            move = self._script.pop(0)
            if move.phase == "backward":
                output.register_hook(lambda _, move=move: self._do(move))
            else:
                self._do(move)

    def _do(self, move: Move) -> None:
        self.on_move(move)
        self.leave(move.left)


class BudgetTenant(Tenant):
    """A co-tenant without a device: moves the limit of a `MemoryBudget`."""

    def __init__(self, budget: int, script: Sequence[Move], module: nn.Module) -> None:
        super().__init__(budget, script, module)
        self._budget = MemoryBudget(budget)

    def __enter__(self) -> Self:
        """Puts the limit in force."""
        self._budget.__enter__()
        return super().__enter__()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Lifts the limit."""
        super().__exit__(kind, error, trace)
        self._budget.__exit__(kind, error, trace)

    def leave(self, free: int) -> None:
        """Moves the limit."""
        self._budget.limit = free
