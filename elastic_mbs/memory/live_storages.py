"""Live storages of tensors, each counted once, and the sum of their bytes.

A storage can die in any thread and at any byte code, also inside a section that holds a lock. So
its finaliser is `deque.append`, one atomic call into C, and the dead are taken out of the sum when
someone asks for it.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from typing import cast

import torch


class _Storage(weakref.ref[torch.UntypedStorage]):
    """A weak reference to a storage, with the bytes that were counted for it."""

    __slots__ = ("key", "nbytes")
    key: int
    nbytes: int


class LiveStorages:
    """A count of storages. Where several threads add to it, the caller holds a lock.

    Attributes:
        upper: an upper bound of `settled`, and the same where nothing has died since.
    """

    __slots__ = ("_gone", "_known", "_on_death", "upper")

    def __init__(self) -> None:
        self.upper = 0
        self._known: dict[int, _Storage] = {}
        self._gone: deque[_Storage] = deque()
        self._on_death = cast(
            Callable[[weakref.ref[torch.UntypedStorage]], None], self._gone.append
        )

    def settled(self) -> int:
        """Return the bytes of the storages that are alive now."""
        while self._gone:
            gone = self._gone[0]
            # no call between these two lines: neither Ctrl-C nor the collector can come between,
            # and everything that is interrupted later can be repeated
            self.upper -= gone.nbytes
            gone.nbytes = 0
            # a new storage may live at the address by now, and be in the table under it
            if self._known.get(gone.key) is gone:
                self._known.pop(gone.key, None)
            if self._gone and self._gone[0] is gone:
                self._gone.popleft()
        return self.upper

    def counted(self, storage: torch.UntypedStorage) -> int | None:
        """Return the bytes counted for a storage; None where it is new. Needs no lock."""
        known = self._known.get(id(storage))
        return None if known is None or known() is not storage else known.nbytes

    def count(self, storage: torch.UntypedStorage, nbytes: int) -> int:
        """Count `nbytes` for a storage; return the bytes that this adds, 0 where it shrinks."""
        self.settled()
        known = self._known.get(id(storage))
        if known is None or known() is not storage:
            known = _Storage(storage, self._on_death)
            known.key, known.nbytes = id(storage), nbytes
            self._known[known.key] = known
            self.upper += nbytes
            return nbytes
        grown, known.nbytes = nbytes - known.nbytes, nbytes
        self.upper += grown
        return max(0, grown)
