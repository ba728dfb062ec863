"""Isolation: a piece accumulates into empty gradients, which join the real ones on success.

A failed piece then leaves nothing behind. It costs one extra copy of the gradients while a piece
runs. So it is used where gradients were not empty when a call began, and for accumulation in a
wider type, which needs the second copy anyway.

    set_aside:   leaf.grad ─▶ held            leaf.grad = None
    backward:    leaf.grad  = the piece's contribution
    fold:        held.add_(leaf.grad)         leaf.grad = held   (the same object, in place)
    discard:                                  leaf.grad = held

Source: docs/internals/autograd.md#isolation.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch.utils.weak import TensorWeakRef


@dataclass(slots=True)
class _Held:
    """The gradient of one leaf while a piece runs.

    Attributes:
        leaf: the leaf, held weakly: a step can make leaves of its own for each piece.
        original: the user's `.grad`, kept as an object because it can be a view into a bucket.
        total: the sum of the pieces: the original itself, or a wider copy.
        wide: the sum is of a wider type than the gradient.
        written: the sum is being written to the leaf, or was.
        finished: the sum was written to the leaf.
    """

    leaf: TensorWeakRef
    original: torch.Tensor | None
    total: torch.Tensor | None
    wide: bool
    written: bool = False
    finished: bool = False


def _type_of(leaf: torch.Tensor, grad: torch.Tensor | None) -> torch.dtype:
    """Return the type of a leaf's gradient, which need not be the leaf's own (`grad_dtype`)."""
    if grad is not None:
        return grad.dtype
    own: torch.dtype | None = getattr(leaf, "grad_dtype", None)  # None: any type
    return own or leaf.dtype


class Isolation:
    """Gradients that are set aside for the length of a call.

    `fold` and `finish` can run out of memory. They work leaf by leaf and can be called again after
    an error: no leaf is done twice.
    """

    def __init__(self, accumulate_dtype: torch.dtype | None = None) -> None:
        self._dtype = accumulate_dtype  # of sums of half-precision gradients; None: their own
        self._held: dict[int, _Held] = {}

    def set_aside(self, leaves: Iterable[torch.Tensor]) -> None:
        """Empty the gradients of `leaves`, and hold them."""
        for leaf in leaves:
            held = self._held.get(id(leaf))
            if held is None or held.leaf() is not leaf:
                half = _type_of(leaf, leaf.grad) in (torch.float16, torch.bfloat16)
                wide = self._dtype is not None and half
                self._held[id(leaf)] = _Held(
                    TensorWeakRef(leaf), leaf.grad, None if wide else leaf.grad, wide
                )
            leaf.grad = None

    def _present(self) -> Iterator[tuple[torch.Tensor, _Held]]:
        """Yield the leaves that are still there, and drop the gradients of all others."""
        for key, held in list(self._held.items()):
            leaf = held.leaf()
            if leaf is None:
                del self._held[key]
            else:
                yield leaf, held

    def fold(self) -> None:
        """Add the piece's contribution to the gradients that were set aside."""
        with torch.no_grad():
            for leaf, held in self._present():
                new = leaf.grad
                if new is not None and new is not held.total:
                    self._add(held, new)
                leaf.grad = None if held.wide else held.total

    def _add(self, held: _Held, new: torch.Tensor) -> None:
        if held.wide:
            new = new.to(self._dtype)
            if held.total is None and held.original is not None:
                held.total = held.original.to(self._dtype)
        if held.total is None:
            held.total = new
        elif held.total.layout is not torch.strided and new.layout is torch.strided:
            # A sparse tensor cannot take a dense one in place. Autograd makes the sum dense, too.
            held.total = new.add_(held.total)
        else:
            held.total.add_(new)

    def discard(self) -> None:
        """Drop the piece's contribution: the gradients are as they were before it."""
        for leaf, held in self._present():
            leaf.grad = None if held.wide else held.total

    def finish(self) -> None:
        """End the call: write each sum to its leaf, in its type and the user's own tensor."""
        with torch.no_grad():
            for leaf, held in self._present():
                if held.finished:
                    continue
                held.written = True
                if not held.wide:
                    leaf.grad = held.total
                elif held.total is None:
                    leaf.grad = held.original
                else:
                    # Coalesced first, or the entries of a sparse total would be rounded one by one.
                    total = (
                        held.total.coalesce()
                        if held.total.layout is torch.sparse_coo
                        else held.total
                    )
                    same = held.original is not None and held.original.layout is total.layout
                    leaf.grad = (
                        held.original.copy_(total)
                        if same and held.original is not None
                        else total.to(_type_of(leaf, held.original))
                    )
                held.finished, held.total = True, None
        self._held.clear()

    def rewind(self) -> None:
        """End the call without its gradients: put the originals back as objects."""
        for leaf, held in self._present():
            leaf.grad = held.original
        self._held.clear()

    def leaf_ids(self) -> set[int]:
        """Return the ids of the leaves whose gradients are set aside."""
        return {id(leaf) for leaf, _ in self._present()}

    def intact(self, leaf: torch.Tensor) -> bool:
        """Return whether the leaf's gradient of the call's start still has its value."""
        held = self._held.get(id(leaf))
        return held is not None and held.wide and not held.written
