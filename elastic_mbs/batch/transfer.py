"""Pieces on their way to the device.

Each is moved when its turn comes, or, from pinned memory, while the piece before it computes
(Micro-Batch Streaming). Copies that are made ahead run in a stream of their own, into memory of the
stream that computes: they wait for the work that the latter had queued when the memory was taken,
and it waits for them before it reads the memory or gives it back. So the memory can be used again
in the order of that one stream. `record_stream` would keep it until an event has passed: a host
that runs ahead of the device would hold several pieces, and not one.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from elastic_mbs.batch.containers import map_tensors, tensors_in
from elastic_mbs.batch.schedule import Range, Schedule
from elastic_mbs.batch.view import BatchView
from elastic_mbs.device import Accelerator, accelerator_of, with_index
from elastic_mbs.errors import UsageError
from elastic_mbs.memory import oom

_LOOKED_AT = 8  # tensors of a batch: a loader pins all of them or none
SMALL = 2**20  # bytes of a piece: to queue the copies takes the host longer than they take


@dataclass(slots=True, eq=False)
class _Ahead:
    """A piece on the host, and copies of its tensors, by their ids."""

    piece: Range
    data: Any
    stream: torch.Stream  # that computes, and that the copies' memory belongs to
    # with the tensor on the host, so that no other one gets its id
    copies: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)


class Loader:
    """The way of one batch's pieces to the device.

    After a piece of more than `longer_than` samples the copies of the next one are queued at once,
    where the batch is in pinned memory (`prefetch=True`), or where each piece is to be pinned for
    it (`"pin"`). Not after a small piece, whose step can be shorter than the host's work for that.
    """

    __slots__ = ("_accelerator", "_ahead", "_copying", "_device", "_longer_than", "_pin", "_view")

    def __init__(
        self,
        view: BatchView,
        device: torch.device | None,
        prefetch: bool | str,
        *,
        longer_than: int = 0,
    ) -> None:
        self._view, self._device, self._longer_than = view, device, longer_than
        self._pin = prefetch == "pin"
        self._ahead: _Ahead | None = None
        self._accelerator: Accelerator | None = None
        self._copying: torch.Stream | None = None  # None where nothing is copied ahead
        if prefetch and device is not None:
            self._accelerator = accelerator_of(device)
        if self._accelerator is not None:
            some = islice(filter(_is_plain, view.tensors), _LOOKED_AT)
            small = (SMALL * view.length - 1) // max(1, view.nbytes)  # in samples
            self._longer_than = max(longer_than, small)
            if view.length > self._longer_than and any(
                self._pin or tensor.is_pinned() for tensor in some
            ):
                self._copying = self._accelerator.second_stream()

    def load(self, piece: Range, schedule: Schedule, *, cloned: bool) -> Any:
        """Return the piece with its tensors on the device; the host does not wait.

        It is `cloned` where `loss_fn` edits its batch.
        """
        ahead = None if self._ahead is None else self._taken_for(piece, self._ahead)
        data = self._view.piece(piece.start, piece.stop) if ahead is None else ahead.data
        if cloned:
            data = map_tensors(data, self._copied)
        if self._device is None:
            return data
        data = to_device(data, self._device, None if ahead is None else ahead.copies)
        if (
            self._copying is not None
            and not cloned
            and len(piece) > self._longer_than
            and not self._copied_ahead(schedule.upcoming)
        ):
            self.stop()
        return data

    def _copied(self, tensor: Tensor) -> Tensor:
        """Return a copy of a tensor that the step may edit, unless its way to the device is one."""
        moves = self._device is not None and tensor.device != self._device
        return tensor if moves or _is_expanded(tensor) else tensor.clone()

    def stop(self) -> None:
        """Drop the copies made ahead, and make no more: memory is short."""
        self._take()
        self._copying = None

    def _taken_for(self, piece: Range, ahead: _Ahead) -> _Ahead | None:
        """Return the copies made ahead, if they are this piece's and the current stream's."""
        self._take()
        if ahead.piece is not piece or ahead.stream != self._current_stream():
            return None
        return ahead

    def _take(self) -> None:
        """Let the stream that computes read the copies, or use their memory for something else."""
        ahead = self._ahead
        if ahead is not None and self._copying is not None:
            ahead.stream.wait_stream(self._copying)
            self._ahead = None

    def _copied_ahead(self, piece: Range | None) -> bool:
        """Queue the copies of a piece; return False where there is no room for them."""
        try:
            if piece is not None:
                self._queue(piece)
        except Exception as error:
            verdict = oom.classify(error)
            if verdict is None or not verdict.synchronous:  # it can belong to an earlier operation
                raise
            return False
        return True

    def _queue(self, piece: Range) -> None:
        assert self._copying is not None
        # Kept here from the beginning: whatever strikes in the middle, the memory is not used again
        # before the copies are done.
        ahead = self._ahead = _Ahead(
            piece, self._view.piece(piece.start, piece.stop), self._current_stream()
        )
        for tensor in filter(_is_plain, tensors_in(ahead.data)):
            if self._pin or tensor.is_pinned():
                copy = torch.empty_like(tensor, device=self._device)
                # else torch would copy it on the host first, and wait
                if copy.stride() == tensor.stride():
                    ahead.copies[id(tensor)] = tensor, copy
        self._copying.wait_stream(ahead.stream)
        with self._copying:
            for tensor, copy in ahead.copies.values():
                copy.copy_(tensor.pin_memory() if self._pin else tensor, non_blocking=True)

    def _current_stream(self) -> torch.Stream:
        assert self._accelerator is not None
        return self._accelerator.current_stream()


def _is_plain(tensor: Tensor) -> bool:
    """Return whether a copy by hand is the same as `tensor.to(device)`."""
    return (
        type(tensor) is Tensor
        and tensor.device.type == "cpu"
        and tensor.layout is torch.strided
        and not tensor.requires_grad
    )


def _is_expanded(tensor: Tensor) -> bool:
    """Return whether entries share memory, so that nothing can be written in place."""
    return tensor.layout is torch.strided and not tensor.is_nested and 0 in tensor.stride()


def to_device(
    piece: Any, device: torch.device | None, copies: dict[int, tuple[Tensor, Tensor]] | None = None
) -> Any:
    """Return the piece with its tensors on the device, or where they are without one.

    The copies are made in the order of the current stream: the host does not wait. `copies` are
    there already, each for one use, by the ids of the tensors on the host.
    """
    if device is None:
        return piece

    def move(tensor: Tensor) -> Tensor:
        if copies and id(tensor) in copies:
            return copies.pop(id(tensor))[1]
        return tensor if tensor.device == device else tensor.to(device, non_blocking=True)

    return map_tensors(piece, move)


def choose_device(
    wanted: torch.device | str | None, model: list[torch.device]
) -> torch.device | None:
    """Return the device that pieces go to; None where they stay where they are.

    "auto" is the model's device when it has exactly one and that is no CPU.

    Raises:
        UsageError: there is no such device.
    """
    if wanted == "auto":
        return model[0] if len(model) == 1 and model[0].type != "cpu" else None
    if wanted is None:
        return None
    try:
        device = torch.device(wanted)
    except (RuntimeError, TypeError) as error:
        raise UsageError(
            f"device={wanted!r} is not a device: use 'auto', None (pieces stay where they are), "
            "or a torch.device"
        ) from error
    try:
        return with_index(device)
    except (RuntimeError, AssertionError) as error:
        raise UsageError(
            f"device={wanted!r} is not there ({error}): use 'auto', or a device of this machine"
        ) from error
