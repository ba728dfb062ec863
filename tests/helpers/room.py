"""A limit on the memory of a test, on GPU and CPU alike, and a neighbour that takes memory."""

import gc
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional

from elastic_mbs import MemoryBudget
from stress.limits import neighbour
from tests.helpers.steps import grads

ROOT = Path(__file__).resolve().parents[2]
MEBI = 2**20
PLENTY = 2**50

Pair = tuple[Tensor, Tensor]


class Room(ExitStack):
    """The memory of a device, as a limit that a test can move.

    On CUDA it is a memory fraction. On the CPU it is a `MemoryBudget`, which counts `modules` from
    the start.
    """

    def __init__(self, device: torch.device, *modules: nn.Module) -> None:
        super().__init__()
        self.device = device
        self._budget = None if device.type == "cuda" else MemoryBudget(PLENTY, modules)

    def __enter__(self) -> Self:
        if self._budget is not None:
            self.enter_context(self._budget)
        else:
            self.callback(torch.cuda.empty_cache)
            self.callback(torch.cuda.set_per_process_memory_fraction, 1.0, self.device)
        return self

    def track(self, *objects: Any) -> None:
        """Count these objects, which are on the device already."""
        if self._budget is not None:
            self._budget.track(*objects)

    def taken(self) -> int:
        """Return the bytes of live tensors."""
        gc.collect()
        return (
            self._budget.live
            if self._budget is not None
            else torch.cuda.memory_allocated(self.device)
        )

    def allow(self, more: int) -> None:
        """Set the limit to `more` bytes above the bytes held now."""
        if self._budget is not None:
            self._budget.limit = self._budget.live + more
            return
        torch.cuda.synchronize(self.device)
        torch.cuda.empty_cache()
        total = torch.cuda.mem_get_info(self.device)[1]
        torch.cuda.set_per_process_memory_fraction(
            min(1.0, (torch.cuda.memory_reserved(self.device) + more) / total), self.device
        )

    def need(self, run: Callable[[], object]) -> int:
        """Return the peak of `run`, in bytes above the bytes held before it."""
        before = self.taken()
        if self._budget is not None:
            self._budget.reset_peak()
            run()
            return self._budget.peak - before
        torch.cuda.reset_peak_memory_stats(self.device)
        run()
        return torch.cuda.max_memory_allocated(self.device) - before


class Neighbour(ExitStack):
    """Another user of the device.

    On CUDA it is a process that holds memory, the stress tool's neighbour. On the CPU it is a lower
    limit of the room.
    """

    def __init__(self, room: Room) -> None:
        super().__init__()
        self._room = room
        self._process = neighbour.Neighbour(room.device) if room.device.type == "cuda" else None

    def __enter__(self) -> Self:
        if self._process is not None:
            self.enter_context(self._process)
        return self

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def come(self, left: int) -> None:
        """Take all free memory except `left` bytes."""
        if self._process is None:
            self._room.allow(left)
        else:
            torch.cuda.empty_cache()
            self._process.hold(torch.cuda.mem_get_info(self._room.device)[0] - left)

    def go(self) -> None:
        """Give all memory back."""
        if self._process is None:
            self._room.allow(PLENTY)
        else:
            self._process.hold(0)


class Wide(nn.Module):
    """A model with few weights and large activations: the micro-batch decides about memory.

    Its backward needs more than its forward.
    """

    def __init__(self, width: int, middle: nn.Module | None = None) -> None:
        super().__init__()
        self.first = nn.Linear(8, width)
        self.middle = nn.Identity() if middle is None else middle
        self.last = nn.Linear(width, 4)

    def forward(self, x: torch.Tensor) -> Any:
        return self.last(torch.tanh(torch.sin(self.middle(torch.tanh(self.first(x))))))


def scale(device: torch.device) -> tuple[int, int]:
    """Return the number of samples and the width.

    On CUDA an activation of the whole batch has 128 MiB in float64. Beside it the blocks of the
    allocator and the workspaces of libraries do not matter.
    """
    return (1024, 16384) if device.type == "cuda" else (64, 2048)


def wide(device: torch.device, middle: nn.Module | None = None) -> Wide:
    torch.manual_seed(0)
    return Wide(scale(device)[1], middle).double().to(device)


def batch_on(
    device: torch.device, samples: int, seed: int = 1, dtype: torch.dtype = torch.float64
) -> Pair:
    generator = torch.Generator().manual_seed(seed)
    x, y = (
        torch.randn(samples, 8, dtype=dtype, generator=generator),
        torch.randint(0, 4, (samples,), generator=generator),
    )
    return x.to(device), y.to(device)


def loss_of(model: nn.Module, batch: Pair) -> Tensor:
    return functional.cross_entropy(model(batch[0]), batch[1])


def by_hand(
    model: nn.Module, batch: Pair, partition: tuple[tuple[int, int], ...]
) -> list[Tensor | None]:
    """Return the gradient of a hand-written accumulation over a partition."""
    model.zero_grad()
    total = len(batch[1])
    for start, stop in partition:
        piece = (batch[0][start:stop], batch[1][start:stop])
        (loss_of(model, piece) * ((stop - start) / total)).backward()
    found = grads(model)
    model.zero_grad()
    return found


def needs(room: Room, model: nn.Module, batch: Pair) -> tuple[int, int]:
    """Return the bytes of the forward, and of the whole step.

    A first step has made gradients, and has had libraries allocate their workspaces.
    """
    loss_of(model, batch).backward()
    found = (
        room.need(lambda: loss_of(model, batch)),
        room.need(lambda: loss_of(model, batch).backward()),
    )
    model.zero_grad()
    return found
