"""The limit of the preloaded shim: torch's own allocator fails, and the co-tenant is another process on the same device."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Self

from elastic_mbs.errors import UsageError

from .fence import UNLIMITED, VARIABLE, Fence, under
from .limit import HostLimit, switch_onednn_off
from .neighbour import Neighbour


class ShimLimit(HostLimit):
    """The device that `fence.c` makes, in a process that was started under it by `run_child`.

    Counts tensors of 8 KiB and more: at rest that is model, gradients and optimizer, as on a GPU. The co-tenant competes for memory: what it cannot
    have at once it takes when we free it, which depends on timing.
    Where it is `shared`, others train on the device, too: its capacity stays as it is when this one leaves.
    """

    kind = "shim"

    def __init__(self, *, shared: bool = False) -> None:
        super().__init__()
        path = os.environ.get(VARIABLE)
        if path is None or not under(Path(path)):
            raise UsageError("the limit 'shim' works in a process that was started under it only: run the job by run_child('shim', …)")
        self.fence = Fence(Path(path))
        self._pid = os.getpid()
        self._shared = shared
        self._neighbour: Neighbour | None = None

    def __enter__(self) -> Self:
        self._undo.callback(switch_onednn_off())
        return self

    def lift(self) -> None:
        self._neighbour = None
        if not self._shared:
            self.fragment(None)
            super().lift()

    def fragment(self, largest: int | None) -> None:
        self.fence.largest = UNLIMITED if largest is None else largest  # for all processes on the device

    def occupy(self, held: int) -> None:
        if self._neighbour is None and held:
            self._neighbour = self._undo.enter_context(Neighbour())
        if self._neighbour is not None:
            self._neighbour.hold(held)

    def total(self) -> int | None:
        return None if self.fence.budget == UNLIMITED else self.fence.budget

    def others(self) -> int:
        return sum(slot.live for slot in self.fence.slots() if slot.pid != self._pid)

    def live(self) -> int:
        return self.fence.of(self._pid).live

    def failures(self) -> int:
        return self.fence.of(self._pid).failures

    def apply(self) -> None:
        self.fence.budget = UNLIMITED if self.capacity is None else self.capacity

    def peak_of_interval(self) -> int:
        return self.fence.of(self._pid).peak

    def begin_interval(self) -> None:
        self.fence.reset_peak()
