"""Buckets: the sum of all gradients over the ranks, in memory that was there before."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import compress, repeat
from operator import attrgetter, is_not

import torch
import torch.distributed as dist
from torch import Tensor

from elastic_mbs.distributed.control import Retry

CAP = 25 * 2**20  # bytes of a bucket, as in DDP
FIRST = 2**20  # of the first one, where it is sent while a backward runs
UNDER_WAY = 2  # sums at a time

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

    The buckets take turns in `UNDER_WAY` pieces of memory, or each has its own.

    Attributes:
        leaves: the leaves.
        all: the buckets, in the order in which they are summed.
    """

    def __init__(self, leaves: Sequence[Tensor], *, turns: bool = True) -> None:
        self.leaves = leaves
        groups = list(_grouped(self.leaves, CAP if turns else FIRST))
        places = UNDER_WAY if turns else len(groups)
        sizes: dict[tuple[Kind, int], int] = {}
        for turn, group in enumerate(groups):
            key = _kind(group[0]), turn % places
            sizes[key] = max(sizes.get(key, 0), sum(leaf.numel() for leaf in group))
        flats = {
            key: torch.empty(size, dtype=key[0][0], device=key[0][1]) for key, size in sizes.items()
        }
        self.all = [
            Bucket(group, flats[_kind(group[0]), turn % places])
            for turn, group in enumerate(groups)
        ]

    def used(self) -> bytes:
        """Return for each leaf whether it has a gradient."""
        return used(map(GRAD, self.leaves))

    def sum(
        self,
        factor: float,
        group: dist.ProcessGroup,
        wait: Callable[[dist.Work], None],
        retry: Retry,
    ) -> None:
        """Replace each gradient by the sum over the ranks of gradient * factor.

        Args:
            factor: the share of this rank.
            group: the ranks.
            wait: waits for a sum.
            retry: runs an operation of ours that can run out of memory.
        """
        under_way: deque[tuple[Bucket, dist.Work]] = deque()

        def start(bucket: Bucket) -> None:
            bucket.fill(factor)
            # Last: what was begun cannot be begun again.
            work = dist.all_reduce(bucket.flat, group=group, async_op=True)
            assert work is not None
            under_way.append((bucket, work))

        def end() -> None:
            bucket, work = under_way.popleft()
            wait(work)
            retry("take the sums of gradients", bucket.take)

        for bucket in self.all:
            if len(under_way) == UNDER_WAY:
                end()
            retry("sum the gradients over the ranks", partial(start, bucket))
        while under_way:
            end()


def _grouped(leaves: Sequence[Tensor], cap: int) -> Iterator[list[Tensor]]:
    """Yield the leaves of each bucket, of which the first one has up to `cap` bytes."""
    current: list[Tensor] = []
    size = 0
    for leaf in reversed(leaves):
        if current and (size + leaf.nbytes > cap or _kind(leaf) != _kind(current[0])):
            yield current
            current, size, cap = [], 0, CAP
        current.append(leaf)
        size += leaf.nbytes
    if current:
        yield current
