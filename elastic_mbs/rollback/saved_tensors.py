"""The tensors that autograd saves, and a table of them for the loop that the user writes out.

The frame of such a loop still holds the failed attempt's `loss`, and so the graph with every
activation, while the piece is replayed. Inside the block of the table, which is the engine's,
autograd saves its tensors in slots that can be emptied from here.
`torch.func` transforms refuse to run under such hooks: `micro_batches(..., own_graph=False)` leaves
the table out.
"""

from __future__ import annotations

import weakref
from operator import methodcaller
from types import TracebackType
from typing import Any, Self

import torch


def detached(tensor: torch.Tensor) -> torch.Tensor:
    """Return a saved tensor in a form that a hook may keep.

    An operation's own output points back at its node, which then lives for good if its backward
    does not run. The garbage collector does not see such a cycle.
    """
    return tensor.detach()


def saved_plainly() -> torch.autograd.graph.saved_tensors_hooks:
    """Return a block in which autograd keeps saved tensors as they are, whatever is around it."""
    return torch.autograd.graph.saved_tensors_hooks(detached, _unchanged)


def _unchanged(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


class Slot:
    """A saved tensor, until it is taken away."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor: torch.Tensor | None = detached(tensor)
        self.version = -1 if tensor.is_inference() else tensor._version

    @property
    def edited(self) -> bool:
        """True if the tensor was edited in place since it was saved."""
        tensor = self.tensor
        return tensor is not None and self.version >= 0 and tensor._version != self.version

    def get(self) -> torch.Tensor:
        """Return the tensor, for backward."""
        tensor = self.tensor
        if tensor is None:
            raise RuntimeError(
                "elastic_mbs: this graph belongs to an attempt that ran out of memory, and its "
                "saved tensors are gone. "
                "Call micro.backward(loss) with the loss of the running attempt, inside its own "
                "`with micro:` block."
            )
        # autograd's own check is off under hooks
        if self.edited:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an "
                "inplace operation: "
                f"[{tensor.type()} {list(tensor.shape)}] is at version {tensor._version}; "
                f"expected version {self.version} instead."
            )
        return tensor


class SavedTensorTable:
    """A context manager: tensors that autograd saves inside it can be released by `empty`."""

    def __init__(self) -> None:
        self._slots: list[weakref.ref[Slot]] = []
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, methodcaller("get"))

    def _pack(self, tensor: torch.Tensor) -> Slot:
        slot = self._slot(tensor)
        # weak: backward frees saved tensors one by one, as it does without hooks
        self._slots.append(weakref.ref(slot))
        return slot

    def _slot(self, tensor: torch.Tensor) -> Slot:
        return Slot(tensor)

    def __enter__(self) -> Self:
        self._slots.clear()  # of the attempt before: its graph is gone, or its slots are empty
        self._hooks.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # By what is in place, and not by a flag: an interrupt can strike inside torch's own lines.
        while self._in_place():
            self._hooks.__exit__(kind, error, trace)

    def _in_place(self) -> bool:
        top = torch._C._autograd._top_saved_tensors_default_hooks(True)
        return top is not None and top[0] is self._hooks.pack_hook

    def edited(self) -> torch.Tensor | None:
        """Return a saved tensor that was edited in place since; None where there is none."""
        slots = (reference() for reference in self._slots)
        return next((slot.tensor for slot in slots if slot is not None and slot.edited), None)

    def empty(self) -> None:
        """Releases every tensor saved so far."""
        for reference in self._slots:
            if (slot := reference()) is not None:
                slot.tensor = None
        self._slots.clear()


def close_checkpoints(error: BaseException) -> None:
    """Take the hooks of torch's checkpoints that an error has gone through off the stack.

    Before torch 2.13 such a checkpoint is a generator that nothing closes. It would pop a hook when
    it is collected: perhaps after the call, or in another thread.
    """
    trace, generators = error.__traceback__, list[Any]()
    while trace is not None:
        frame, trace = trace.tb_frame, trace.tb_next
        torchs = frame.f_globals.get("__name__") == "torch.utils.checkpoint"
        if torchs and frame.f_code.co_name == "checkpoint":
            there = frame.f_locals
            if "gen" in there:
                generators.append(there["gen"])
            if type(there) is dict:
                there.clear()  # a copy, which the frame keeps alive before Python 3.13
    for generator in reversed(generators):  # the inner ones first
        generator.close()
