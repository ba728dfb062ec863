"""What a call gives back: the loss of the whole batch, the outputs of its pieces, and how it was split."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from elastic_mbs.batch.containers import Path
from elastic_mbs.batch.join import join
from elastic_mbs.engine.everywhere import map_everywhere
from elastic_mbs.memory.budget import MemoryBudget, on_host
from elastic_mbs.options import OutputPlace

MUCH = 2**30
"""Bytes of a batch's outputs that are worth a warning: few want the logits of a whole batch, and nobody a decoder's cache of keys and values."""


@dataclass(eq=False)
class StepResult:
    """The outcome of one call.

    Attributes:
        partition: the committed pieces as (start, stop) ranges of samples, in the batch's order.
        micro_batch_size: the size in force when the call ended, in samples.
        ooms: out-of-memory errors survived in this call.
        replayed_samples: samples that were run again.
        skipped: ranges that were not run because all their counts are zero; they have no outputs.
    """

    partition: tuple[tuple[int, int], ...]
    micro_batch_size: int
    ooms: int = 0
    replayed_samples: int = 0
    skipped: tuple[tuple[int, int], ...] = ()
    _losses: tuple[torch.Tensor, ...] = field(default=(), repr=False)  # of the pieces, weighed
    _outputs: list[StoredOutput | None] = field(default_factory=list, repr=False)
    _apart: set[Path] | None = field(default=None, repr=False)  # see `join`
    _joined: Any = field(default=None, repr=False)

    @property
    def loss(self) -> torch.Tensor:
        """The loss of the whole batch: detached, unscaled, a scalar on the model's device. Reading its value is what synchronises."""
        if not self._losses:
            return torch.zeros(())
        if len(self._losses) > 1:
            last = self._losses[-1]
            self._losses = (torch.stack([loss.to(last.dtype) for loss in self._losses]).sum(),)
        return self._losses[0]

    def __float__(self) -> float:
        """The loss as a number; waits for the device."""
        return float(self.loss)

    def __format__(self, spec: str) -> str:
        """The loss in an f-string: `f"{result:.4f}"`; waits for the device. Without a format, the whole result."""
        return format(float(self), spec) if spec else str(self)

    def kept(self) -> int:
        """Bytes that the outputs take, until they are read for the first time."""
        return sum([stored.nbytes for stored in self._outputs if stored is not None])

    @property
    def outputs(self) -> Any:
        """What `loss_fn` returned besides the loss, joined over the committed pieces in the batch's order, or None."""
        if self._outputs:
            lengths = [stop - start for start, stop in self.partition]
            with on_host(all(stored is None or stored.on_host for stored in self._outputs)):
                self._joined = join([None if stored is None else stored.get() for stored in self._outputs], lengths, self._apart)
            self._outputs = []
        return self._joined


class StoredOutput:
    """One piece's outputs, detached, and moved to the host where that was asked for.

    The copy to the host goes to pinned memory in the stream's order, so that storing waits for nothing; `get` waits for it.

    Attributes:
        on_host: whether they were moved.
        nbytes: what their dense tensors take.
    """

    def __init__(self, value: Any, place: OutputPlace) -> None:
        self.on_host = place == "cpu"
        self.nbytes = 0
        self._event: torch.cuda.Event | None = None
        self._value = map_everywhere(value, self._to_host if place == "cpu" else self._detached)

    def _detached(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.layout is torch.strided and not tensor.is_nested:  # of others nobody says
            self.nbytes += tensor.nbytes
        return tensor.detach()

    def _to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        own = tensor.grad_fn is not None
        tensor = self._detached(tensor)
        if tensor.is_cuda:  # cuda-only
            if self._event is None:
                self._event = torch.cuda.Event()
            pinned = torch.empty_like(tensor, device="cpu", pin_memory=True)
            pinned.copy_(tensor, non_blocking=True)
            self._event.record(torch.cuda.current_stream(tensor.device))
            return pinned
        virtual = (budget := MemoryBudget.current()) is not None and budget.covers(tensor.device)
        with on_host(virtual):
            return tensor.to("cpu", copy=virtual or not own)  # what the step did not compute (a buffer, say) may change under us

    def get(self) -> Any:
        """The outputs, once they are there."""
        if self._event is not None:  # cuda-only
            self._event.synchronize()
        return self._value
