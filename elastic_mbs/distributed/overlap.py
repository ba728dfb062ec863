"""Overlap: sums of buckets that begin while the last piece's backward still runs.

A bucket is sent as soon as all its leaves have committed, before the ranks have met. Four rules
keep that exact and free of hangs:

1.  Hooks send in the last backward only, and only where it is known that each leaf commits once in
    it: a bucket that is sent is whole.
2.  Every rank sends all buckets of a call once, in one order, also where its call has failed:
    otherwise the others would wait for its part.
3.  Where a batch starts over after a part of it was sent, all ranks make the sums again.
4.  Buckets are sent only for leaves for which all ranks have met: making their memory can fail.

This module sends; `replicas.py` decides what of it is good.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from threading import Lock
from typing import Any
from weakref import ref

import torch
import torch.distributed as dist
from torch.autograd.graph import Node, get_gradient_edge
from torch.utils.hooks import RemovableHandle

from elastic_mbs.distributed import torch_private
from elastic_mbs.distributed.buckets import Buckets
from elastic_mbs.distributed.control import Retry


class Overlap:
    """The sums of one call, some of which begin in its last backward.

    Attributes:
        sent: how many sums were begun in this call.
    """

    def __init__(self, buckets: Buckets, group: dist.ProcessGroup) -> None:
        """Put a hook behind each leaf.

        Args:
            buckets: each has memory of its own.
            group: the ranks.
        """
        self._handles: list[RemovableHandle] = []
        self.sent = 0
        self._buckets = buckets.all
        self._group = group
        self._armed = False
        self._factor = 1.0
        self._missing: list[int] = []  # of each bucket: leaves that have not committed
        self._works: deque[dist.Work] = deque()  # that nobody has waited for
        self._lock = Lock()  # the backward of each device has a thread of its own
        # A leaf refers to its node only weakly. On the node and not on the leaf, where hooks of the
        # user's are, which tell the engine something.
        self._nodes: list[Node] = []
        for place, bucket in enumerate(self._buckets):
            for leaf in bucket.leaves:
                node = get_gradient_edge(leaf).node
                self._nodes.append(node)
                self._handles.append(node.register_hook(_hook(self, place)))

    def begin(self, wait: Callable[[dist.Work], None]) -> None:
        """Begin a call, once the sums of the one before are over, which may have failed."""
        self.disarm()
        while self._works:
            wait(self._works.popleft())
        self.sent = 0

    def arm(self, factor: float) -> None:
        """Send buckets from here on, as their leaves commit: gradients times `factor`."""
        self._factor = factor
        self._missing = [len(bucket.leaves) for bucket in self._buckets]
        self._armed = True

    def disarm(self) -> None:
        """Send nothing more from hooks."""
        self._armed = False

    def committed(self, place: int) -> None:
        """Note that a leaf of a bucket has committed, and send the buckets that are whole."""
        if not self._armed:
            return
        with self._lock:
            self._missing[place] -= 1
            while self.sent < len(self._buckets) and not self._missing[self.sent]:
                with torch.no_grad():
                    self._buckets[self.sent].fill(self._factor)
                self._send()

    def send_rest(self, factor: float, retry: Retry) -> None:
        """Send all buckets that were not sent, gradients times `factor`."""
        self.disarm()
        with torch.no_grad(), torch_private.unseen():
            for bucket in self._buckets[self.sent :]:
                retry("sum the gradients over the ranks", partial(bucket.fill, factor))
                self._send()

    def send_anything(self) -> None:
        """Send all that was not sent, with what is in its memory: nobody takes it."""
        self.disarm()
        while self.sent < len(self._buckets):
            self._send()

    def _send(self) -> None:
        with torch_private.unseen():
            flat = self._buckets[self.sent].flat
            work = dist.all_reduce(flat, group=self._group, async_op=True)
        assert work is not None
        self._works.append(work)
        self.sent += 1

    def take(self, factor: float, wait: Callable[[dist.Work], None], retry: Retry) -> None:
        """Put the sums, times `factor`, in the gradients that are there."""
        for bucket in self._buckets:
            wait(self._works.popleft())
            retry("take the sums of gradients", partial(bucket.take, factor))

    def __del__(self) -> None:
        """Take the hooks off: nodes live as long as their leaves."""
        for handle in self._handles:
            handle.remove()


def _hook(overlap: Overlap, place: int) -> Callable[..., None]:
    """Return a hook that keeps nothing alive."""
    to = ref(overlap)

    def committed(*gradients: Any) -> None:
        overlap = to()
        if overlap is not None:
            overlap.committed(place)

    return committed
