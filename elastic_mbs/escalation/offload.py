"""Offloading: the tensors that forward saves for backward wait on the host until they are needed.

`torch.autograd.graph.save_on_cpu` does the same, with three differences. Small tensors and those
that the model or the batch holds anyway stay where they are. The slots can be emptied, so that the
graph of a failed attempt holds nothing: autograd asks one pair of hooks only. And on an accelerator
with a second stream the next tensor can be on its way back while backward computes with this one:

    stream that computes   ─── backward of layer 8 ─── backward of layer 7 ─── backward of layer 6
    stream that copies     ── tensor of layer 7 ──── tensor of layer 6 ────
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import NamedTuple, Self

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from elastic_mbs.device import Accelerator, accelerator_of
from elastic_mbs.memory.budget import on_host
from elastic_mbs.rollback.saved_tensors import SavedTensorTable, Slot

SMALL = 4096  # bytes; a copy of less costs more than it saves


class HostSlot(Slot):
    """A copy in host memory, pinned where the device copies from there beside the host.

    The copy is complete when `__init__` returns, so any stream may bring it back.

    Args:
        tensor: the tensor.
        way: the way back, where copies are made ahead.
    """

    def __init__(self, tensor: torch.Tensor, way: WayBack | None = None) -> None:
        source = tensor.detach()
        self.device, self.version, self.taken = source.device, -1, False
        with on_host():
            found = accelerator_of(source.device)
            pinned = found is not None and found.copies_ahead
            self.tensor = torch.empty_like(source, device="cpu", pin_memory=pinned).copy_(source)
        self._way = way
        self._place = 0 if way is None else way.add(self)

    def get(self) -> torch.Tensor:
        """Return a copy on the device."""
        self.taken = True
        super().get()  # raises where the slot was emptied
        found = None if self._way is None else self._way.arrived(self)
        if found is None:
            found = self.room()
            self.copy_to(found)
        if self._way is not None:
            self._way.go_on(self._place)
        return found

    def room(self) -> torch.Tensor:
        """Return memory on the device for the tensor."""
        host = super().get()
        return torch.empty_strided(host.size(), host.stride(), dtype=host.dtype, device=self.device)

    def copy_to(self, room: torch.Tensor) -> None:
        """Queue the copy in the current stream."""
        with on_host():
            room.copy_(super().get(), non_blocking=True)


class _Ahead(NamedTuple):
    """A tensor on its way back."""

    slot: weakref.ref[HostSlot]
    tensor: torch.Tensor
    stream: torch.Stream  # that computes, and that the tensor's memory belongs to


class WayBack:
    """The way of one device's tensors back from the host, one of them ahead of backward.

    Backward takes tensors about in the reverse of the order in which they were saved. What it takes
    out of turn is copied when it is asked for. Copies run in a stream of their own, into memory of
    the stream that computes: they wait for the work that the latter had queued when the memory was
    taken, and it waits for them before it reads the memory or gives it back.
    """

    def __init__(self, accelerator: Accelerator, copying: torch.Stream) -> None:
        self._accelerator, self._copying = accelerator, copying
        self._slots = list[weakref.ref[HostSlot]]()  # in the order in which they were saved
        self._ahead: _Ahead | None = None

    def add(self, slot: HostSlot) -> int:
        """Take note of a tensor that was saved; return its place among all."""
        self._slots.append(weakref.ref(slot))
        return len(self._slots) - 1

    def arrived(self, slot: HostSlot) -> torch.Tensor | None:
        """Return a slot's tensor if it was copied ahead, for the current stream."""
        ahead = self._ahead
        if ahead is None or ahead.slot() is not slot:
            return None
        self.drop()  # `ahead` keeps the tensor
        return ahead.tensor if ahead.stream == self._accelerator.current_stream() else None

    def go_on(self, place: int) -> None:
        """Queue the copy of the next tensor before this place, where none is on its way."""
        if self._ahead is not None:
            if self._ahead.slot() is not None:
                return
            self.drop()  # its graph is gone
        following = self._before(place)
        if following is None:
            return
        stream = self._accelerator.current_stream()
        # Kept from the beginning: whatever strikes in the middle, its memory is not used again
        # before the copy is done.
        self._ahead = _Ahead(weakref.ref(following), following.room(), stream)
        self._copying.wait_stream(stream)
        with self._copying:
            following.copy_to(self._ahead.tensor)

    def _before(self, place: int) -> HostSlot | None:
        for at in range(min(place, len(self._slots)) - 1, -1, -1):
            slot = self._slots[at]()
            if slot is not None and not slot.taken:
                return slot
        return None

    def drop(self) -> None:
        """Let the stream that computes read the tensor ahead, or use its memory again."""
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            ahead.stream.wait_stream(self._copying)

    def clear(self) -> None:
        """Forget all tensors."""
        self._slots.clear()
        self.drop()


class OffloadedTensors(SavedTensorTable):
    """A context manager: tensors that autograd saves inside it wait on the host.

    Args:
        resident: returns tensors that stay on the device.
        ahead: on an accelerator the next tensor is copied back while backward computes, for the
            memory of one more tensor.
    """

    def __init__(
        self, resident: Callable[[], Iterable[torch.Tensor]], *, ahead: bool = False
    ) -> None:
        super().__init__()
        self._resident = resident
        self._copies_ahead = ahead
        self._stay: set[int] = set()
        self._ways: dict[torch.device, WayBack | None] = {}

    def __enter__(self) -> Self:
        self._stay = {
            tensor.untyped_storage()._cdata for tensor in self._resident() if _is_plain(tensor)
        }
        super().__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        super().__exit__(kind, error, trace)
        self._clear_ways()

    def empty(self) -> None:
        """Releases every tensor saved so far."""
        super().empty()
        self._clear_ways()

    def _clear_ways(self) -> None:
        for way in self._ways.values():
            if way is not None:
                way.clear()

    def _slot(self, tensor: torch.Tensor) -> Slot:
        stays = (
            not _is_plain(tensor)
            or tensor.nbytes < SMALL
            or tensor.untyped_storage()._cdata in self._stay
        )
        return Slot(tensor) if stays else HostSlot(tensor, self._way(tensor.device))

    def _way(self, device: torch.device) -> WayBack | None:
        """Return the way back to a device; None where no copy is made ahead."""
        if not self._copies_ahead:
            return None
        if device not in self._ways:
            accelerator = accelerator_of(device)
            copying = None if accelerator is None else accelerator.second_stream()
            self._ways[device] = (
                None if accelerator is None or copying is None else WayBack(accelerator, copying)
            )
        return self._ways[device]


def _is_plain(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is dense and of no subclass but the fake one.

    Where other subclasses keep their data is not known.
    """
    return (
        type(tensor) in (torch.Tensor, nn.Parameter, nn.Buffer, FakeTensor)
        and tensor.layout is torch.strided
    )
