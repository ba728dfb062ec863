"""The gradients of a batch as they stand between two pieces: which tensor each leaf has, and how often it was written to.

Autograd makes a leaf's gradient, or adds to it in place, which moves its version by one. So two looks at all of them tell which leaves a backward has
committed to, for a tenth of what hooks on the leaves cost. The same looks tell whether somebody else has touched a gradient in the middle of a batch.

Versions belong to memory, not to tensors: where gradients are views of one buffer, a commit to one moves them all. There hooks are needed.
Source: torch/csrc/autograd/functions/accumulate_grad.h; shared/reference/autograd.md, "Gradients".
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import repeat
from operator import attrgetter, is_, is_not

import torch

from elastic_mbs.errors import GradientsChangedError

NO_VERSION = -1
"""Stands for the version of a gradient that is not there, or that has none: an inference tensor, which autograd does not write to."""

UNUSUAL = -1
"""Stands for a number of commits that cannot be told."""

_GRAD, _VERSION = attrgetter("grad"), attrgetter("_version")


def _read(leaves: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor | None], list[int]]:
    """The gradients of `leaves` and their versions. Twice for every piece, so without a line of Python for each."""
    grads: list[torch.Tensor | None] = list(map(_GRAD, leaves))
    if grads and grads[0] is None and _none(grads):
        return grads, [NO_VERSION] * len(grads)
    try:
        return grads, list(map(_VERSION, grads))
    except (AttributeError, RuntimeError):  # of None, and of inference tensors
        return grads, [_version(grad) for grad in grads]


def _none(grads: Sequence[torch.Tensor | None]) -> bool:
    return all(map(is_, grads, repeat(None)))


def _version(grad: torch.Tensor | None) -> int:
    return NO_VERSION if grad is None or grad.is_inference() else grad._version


def separate(leaves: Sequence[torch.Tensor]) -> None:
    """Gives the gradients of `leaves` memory of their own, where autograd has made several in one place.

    It takes a gradient that nobody else holds for a leaf's own, without a copy. Where two leaves meet in one addition, each through a view, both are
    given views of one tensor, and what the next piece adds to one is added to the other.
    """
    for leaf in overlapping(leaves):
        assert leaf.grad is not None
        leaf.grad = leaf.grad.clone()


def overlapping(leaves: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Those of `leaves` whose gradient lies where an earlier one's lies."""
    held = [(grad.untyped_storage()._cdata, leaf, grad) for leaf in leaves if (grad := leaf.grad) is not None and grad.layout is torch.strided]
    if len({storage for storage, _, _ in held}) == len(held):
        return []
    found: list[torch.Tensor] = []
    taken: dict[int, list[tuple[int, int]]] = {}
    for storage, leaf, grad in held:
        if grad.numel():
            start = int(grad.storage_offset()) * grad.itemsize
            stop = start + int(1 + sum((n - 1) * step for n, step in zip(grad.shape, grad.stride(), strict=True))) * grad.itemsize
            places = taken.setdefault(storage, [])
            if any(start < end and begin < stop for begin, end in places):
                found.append(leaf)
            places.append((start, stop))
    return found


class GradientNotes:
    """What was noted of the gradients of some leaves. It keeps them alive until the next note."""

    def __init__(self) -> None:
        self._leaves: Sequence[torch.Tensor] = ()
        self._grads: list[torch.Tensor | None] = []
        self._versions: list[int] = []
        self._latest: tuple[list[torch.Tensor | None], list[int]] = [], []

    def note(self, leaves: Sequence[torch.Tensor]) -> None:
        """Notes the gradients of `leaves` as they are now."""
        self._leaves = leaves
        self._grads, self._versions = _read(leaves)
        self._latest = [], []

    def forget(self) -> None:
        """Forgets them: gradients may be changed freely."""
        self._leaves, self._grads, self._versions = (), [], []
        self._latest = [], []

    def filled(self) -> set[int]:
        """The ids of the leaves that had a gradient."""
        if _none(self._grads):
            return set()
        return {id(leaf) for leaf, grad in zip(self._leaves, self._grads, strict=True) if grad is not None}

    def stayed(self) -> bool:
        """Whether all gradients are the tensors that they were, and nothing was written to them."""
        grads, versions = _read(self._leaves)
        return versions == self._versions and all(map(is_, grads, self._grads))

    def moved(self) -> list[torch.Tensor]:
        """The leaves whose gradient was made, replaced or dropped since; and those to whose gradient something was written, as often as it was."""
        found: list[torch.Tensor] = []
        for leaf, before, version in zip(self._leaves, self._grads, self._versions, strict=True):
            grad = leaf.grad
            if grad is not before:
                found.append(leaf)
            elif (now := _version(grad)) != version:
                found += [leaf] * (now - version)
        return found

    def commits(self) -> int:
        """How many `moved`; `UNUSUAL` where one was dropped, or where they have come to share memory."""
        self._latest = grads, versions = _read(self._leaves)
        if all(map(is_, grads, self._grads)):
            return sum(versions) - sum(self._versions)
        if _none(self._grads):
            return UNUSUAL if self.share_memory() else sum(map(is_not, grads, repeat(None)))
        if any(grad is None and noted is not None for grad, noted in zip(grads, self._grads, strict=True)) or self.share_memory():
            return UNUSUAL
        pairs = zip(grads, self._grads, versions, self._versions, strict=True)
        return sum([now - before if grad is noted else 1 for grad, noted, now, before in pairs])

    def advance(self) -> None:
        """Notes what `commits` has seen."""
        self._grads, self._versions = self._latest
        self._latest = [], []

    def share_memory(self) -> bool:
        """Whether two leaves have gradients in one piece of memory, so that their versions move together."""
        storages = [grad.untyped_storage()._cdata for leaf in self._leaves if (grad := leaf.grad) is not None and grad.layout is torch.strided]
        return len(set(storages)) < len(storages)

    def refuse_touched(self) -> None:
        """Refuses what somebody else has done to the gradients since.

        Raises:
            GradientsChangedError: one was cleared, replaced or edited.
        """
        for leaf in self.moved():
            raise GradientsChangedError(
                f"the gradient of a leaf of shape {tuple(leaf.shape)} was {'cleared' if leaf.grad is None else 'changed'} in the middle of a batch: "
                "call zero_grad(), clip or edit gradients after the whole batch, next to optimizer.step(), and leave backward() to the engine"
            )
