"""Buckets: the sum of all gradients over the ranks, in memory that was there before."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import compress, repeat
from operator import attrgetter, is_not

import torch
from torch import Tensor

CAP = 25 * 2**20  # bytes of a bucket, as in DDP
TURNS = 2  # buckets that have memory at a time, without overlap

Kind = tuple[torch.dtype, torch.device]


# In every call, for each leaf: no line of Python runs for one.
GRAD = attrgetter("grad")


def used(grads: Iterable[Tensor | None]) -> bytes:
    """Return for each leaf whether it has a gradient, of these."""
    return bytes(map(is_not, grads, repeat(None)))


def _kind(leaf: Tensor) -> Kind:
    return leaf.dtype, leaf.device


class Bucket:
    """Some leaves of one type, and views of memory that has their shapes.

    Attributes:
        leaves: the leaves.
        flat: the memory that is summed.
    """

    def __init__(self, leaves: list[Tensor], flat: Tensor) -> None:
        self.leaves = leaves
        lengths = [leaf.numel() for leaf in leaves]
        self.flat = flat[: sum(lengths)]
        parts = self.flat.split(lengths)
        self.views = [part.view(leaf.shape) for part, leaf in zip(parts, leaves, strict=True)]

    def fill(self, factor: float) -> None:
        """Copy the gradients, times `factor`; zero where there is none. Can be repeated."""
        views, grads = self._pairs()
        if len(grads) < len(self.leaves):
            self.flat.zero_()
        if grads:
            torch._foreach_copy_(views, grads)
        if factor != 1.0:
            self.flat.mul_(factor)

    def take(self, factor: float = 1.0) -> None:
        """Copy what was summed, times `factor`, to the gradients that are there.

        Can be repeated.
        """
        views, grads = self._pairs()
        if not grads:
            return
        torch._foreach_copy_(grads, views)
        if factor != 1.0:
            torch._foreach_mul_(grads, factor)

    def _pairs(self) -> tuple[list[Tensor], list[Tensor]]:
        """Return the gradients that are there, and before them their views."""
        grads = list(map(GRAD, self.leaves))
        there = used(grads)
        if all(there):
            return self.views, grads
        return list(compress(self.views, there)), list(compress(grads, there))


class Buckets:
    """Buckets, the same on every rank: leaves in reverse order of registration.

    Attributes:
        leaves: the leaves.
        all: the buckets, in the order in which they are summed.
        overlap: a backward sends them.
        places: how many have memory at a time: the first ones, then the next ones in turn.
    """

    def __init__(self, leaves: Sequence[Tensor], *, overlap: bool = False) -> None:
        """Take memory.

        Args:
            leaves: the leaves.
            overlap: a backward sends the buckets, so each has memory of its own.
        """
        self.leaves = leaves
        self.overlap = overlap
        groups = list(_grouped(self.leaves))
        self.places = len(groups) if overlap else min(TURNS, len(groups))
        sizes: dict[tuple[Kind, int], int] = {}
        for turn, group in enumerate(groups):
            key = _kind(group[0]), turn % self.places
            sizes[key] = max(sizes.get(key, 0), sum(leaf.numel() for leaf in group))
        flats = {
            key: torch.empty(size, dtype=key[0][0], device=key[0][1]) for key, size in sizes.items()
        }
        self.all = [
            Bucket(group, flats[_kind(group[0]), turn % self.places])
            for turn, group in enumerate(groups)
        ]

    def used(self) -> bytes:
        """Return for each leaf whether it has a gradient."""
        return used(map(GRAD, self.leaves))


def _grouped(leaves: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Yield the leaves of each bucket."""
    current: list[Tensor] = []
    size = 0
    for leaf in reversed(leaves):
        if current and (size + leaf.nbytes > CAP or _kind(leaf) != _kind(current[0])):
            yield current
            current, size = [], 0
        current.append(leaf)
        size += leaf.nbytes
    if current:
        yield current
