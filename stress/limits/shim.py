"""The limit of the preloaded shim: torch's own allocator fails."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Self

from elastic_mbs.errors import UsageError

from .fence import UNLIMITED, VARIABLE, Fence
from .limit import HostLimit, switch_onednn_off


class ShimLimit(HostLimit):
    """The device that `fence.c` makes, in a process that was started under it by `run_child`.

    Counts tensors of 8 KiB and more: at rest that is model, gradients and optimizer, as on a GPU. Where it is `shared`, others train on the device,
    too: its capacity stays as it is when this one leaves.
    """

    kind = "shim"

    def __init__(self, *, shared: bool = False) -> None:
        super().__init__()
        path = os.environ.get(VARIABLE)
        if path is None:
            raise UsageError("the limit 'shim' works in a process that was started under it only: run the job by run_child('shim', …)")
        self.fence = Fence(Path(path))
        self._pid = os.getpid()
        self._shared = shared

    def __enter__(self) -> Self:
        self._undo.callback(switch_onednn_off())
        return self

    def lift(self) -> None:
        if not self._shared:
            self.fragment(None)
            super().lift()

    def fragment(self, largest: int | None) -> None:
        self.fence.largest = UNLIMITED if largest is None else largest  # for all processes on the device

    def total(self) -> int | None:
        return None if self.fence.budget == UNLIMITED else self.fence.budget + self._held

    def others(self) -> int:
        return self._held + sum(slot.live for slot in self.fence.slots() if slot.pid != self._pid)

    def live(self) -> int:
        return self.fence.of(self._pid).live

    def failures(self) -> int:
        return self.fence.of(self._pid).failures

    def apply(self) -> None:
        self.fence.budget = UNLIMITED if self.capacity is None else max(0, self.capacity - self._held)

    def peak_of_interval(self) -> int:
        return self.fence.of(self._pid).peak

    def begin_interval(self) -> None:
        self.fence.reset_peak(self._pid)
