"""The sums of gradients over the ranks in one call, of which the first begin before ranks meet.

A rank whose gradient is whole sends buckets at once, as many as have memory of their own, and the
meeting takes place meanwhile. With overlap each bucket has memory of its own, and hooks send it as
soon as all its leaves have committed, while the last backward still runs. Four rules keep that
exact and free of hangs:

1.  Hooks send in the last backward only, and only where it is known that each leaf commits once in
    it: a bucket that is sent is whole.
2.  Every rank sends the same buckets before it meets, once, in one order, also where its call has
    failed: otherwise the others would wait for its part.
3.  Where a batch starts over after a part of it was sent, all ranks make the sums again.
4.  Buckets are sent only for leaves for which all ranks have met: making their memory can fail.

This module sends; `replicas.py` decides whether the sums are the gradient's.
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
from elastic_mbs.distributed.torch_private import Group

Wait = Callable[[dist.Work], None]


class Sums:
    """The sums of one call.

    Attributes:
        sent: how many were begun in this call.
        armed: a backward sends.
    """

    def __init__(self, buckets: Buckets, group: Group) -> None:
        """Put a hook behind each leaf of the buckets that a backward sends.

        Args:
            buckets: the gradients. With overlap a backward sends all but the last one, which is
                whole only when the backward ends, so it needs no hook.
            group: the ranks.
        """
        self._handles: list[RemovableHandle] = []
        self.sent = 0
        self.armed = False
        self._buckets = buckets.all
        self._ahead = buckets.places  # so many are sent before the ranks meet
        self._group = group
        self._factor = 1.0
        self._missing: list[int] = []  # of each bucket: leaves that have not committed
        self._works: deque[dist.Work] = deque()  # that nobody has waited for
        self._lock = Lock()  # the backward of each device has a thread of its own
        # A leaf refers to its node only weakly. On the node and not on the leaf, where hooks of the
        # user's are, which tell the engine something.
        self._nodes: list[Node] = []
        self._by_hooks = self._buckets[:-1] if buckets.overlap else []
        for place, bucket in enumerate(self._by_hooks):
            for leaf in bucket.leaves:
                node = get_gradient_edge(leaf).node
                self._nodes.append(node)
                self._handles.append(node.register_hook(_hook(self, place)))

    def begin(self, wait: Wait) -> None:
        """Begin anew, once the sums that were begun are over. They may be of a failed call."""
        self.disarm()
        while self._works:
            wait(self._works.popleft())
        self.sent = 0

    def arm(self, factor: float) -> None:
        """Send buckets from here on, as their leaves commit: gradients times `factor`."""
        self._factor = factor
        self._missing = [len(bucket.leaves) for bucket in self._by_hooks]
        self.armed = True

    def disarm(self) -> None:
        """Send nothing more from hooks."""
        self.armed = False

    def committed(self, place: int) -> None:
        """Note that a leaf of a bucket has committed, and send the buckets that are whole."""
        if not self.armed:
            return
        missing = self._missing
        with self._lock:
            missing[place] -= 1
            while self.sent < len(missing) and not missing[self.sent]:
                with torch.no_grad():
                    self._buckets[self.sent].fill(self._factor)
                self._send()

    def send_ahead(self, factor: float, retry: Retry) -> None:
        """Send what is sent before the ranks meet: gradients times `factor`."""
        self.disarm()
        if self.sent == self._ahead:
            return
        with torch.no_grad(), torch_private.unseen():
            while self.sent < self._ahead:
                self._send_next(factor, retry)

    def send_anything(self) -> None:
        """Send what is sent before the ranks meet, with what is in its memory: nobody takes it."""
        self.disarm()
        while self.sent < self._ahead:
            self._send()

    def finish(self, before: float, after: float, wait: Wait, retry: Retry) -> None:
        """Put the sums of all gradients in the gradients that are there.

        Args:
            before: the factor of this rank's gradients, where they were not sent yet.
            after: the factor of the sums.
            wait: waits for a sum.
            retry: runs an operation of ours that can run out of memory.
        """
        for number, bucket in enumerate(self._buckets):
            while self.sent < min(number + self._ahead, len(self._buckets)):
                self._send_next(before, retry)
            wait(self._works.popleft())
            retry("take the sums of gradients", partial(bucket.take, after))

    def _send_next(self, factor: float, retry: Retry) -> None:
        fill = partial(self._buckets[self.sent].fill, factor)
        retry("sum the gradients over the ranks", fill)
        self._send()

    def _send(self) -> None:
        with torch_private.unseen():
            flat = self._buckets[self.sent].flat
            self._works.append(torch_private.all_reduce(self._group, flat))
        self.sent += 1

    def __del__(self) -> None:
        """Take the hooks off: nodes live as long as their leaves."""
        for handle in self._handles:
            handle.remove()


def _hook(sums: Sums, place: int) -> Callable[..., None]:
    """Return a hook that keeps nothing alive."""
    to = ref(sums)

    def committed(*gradients: Any) -> None:
        sums = to()
        if sums is not None:
            sums.committed(place)

    return committed
