"""Offloading: the tensors that forward saves for backward wait on the host until they are needed.

`torch.autograd.graph.save_on_cpu` does the same, with two differences. Small tensors and those that
the model or the batch holds anyway stay where they are. And the slots can be emptied, so that the
graph of a failed attempt holds nothing: autograd asks one pair of hooks only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Self

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from elastic_mbs.device import accelerator_of
from elastic_mbs.memory.budget import on_host
from elastic_mbs.rollback.saved_tensors import SavedTensorTable, Slot

SMALL = 4096  # bytes; a copy of less costs more than it saves


class HostSlot(Slot):
    """A copy in host memory, pinned where the device copies from there beside the host.

    The copy is complete when `__init__` returns, so any stream may bring it back.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        source = tensor.detach()
        self.device, self.version = source.device, -1
        with on_host():
            found = accelerator_of(source.device)
            pinned = found is not None and found.copies_ahead
            self.tensor = torch.empty_like(source, device="cpu", pin_memory=pinned).copy_(source)

    def get(self) -> torch.Tensor:
        """Return a copy on the device."""
        host = super().get()
        back = torch.empty_strided(host.size(), host.stride(), dtype=host.dtype, device=self.device)
        with on_host():
            return back.copy_(host, non_blocking=True)


class OffloadedTensors(SavedTensorTable):
    """A context manager: tensors that autograd saves inside it wait on the host.

    Tensors that are `resident` when it begins stay on the device.
    """

    def __init__(self, resident: Callable[[], Iterable[torch.Tensor]]) -> None:
        super().__init__()
        self._resident = resident
        self._stay: set[int] = set()

    def __enter__(self) -> Self:
        self._stay = {
            tensor.untyped_storage()._cdata for tensor in self._resident() if _is_plain(tensor)
        }
        super().__enter__()
        return self

    def _slot(self, tensor: torch.Tensor) -> Slot:
        stays = (
            not _is_plain(tensor)
            or tensor.nbytes < SMALL
            or tensor.untyped_storage()._cdata in self._stay
        )
        return Slot(tensor) if stays else HostSlot(tensor)


def _is_plain(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is dense and of no subclass but the fake one.

    Where other subclasses keep their data is not known.
    """
    return (
        type(tensor) in (torch.Tensor, nn.Parameter, nn.Buffer, FakeTensor)
        and tensor.layout is torch.strided
    )
