"""The world of the preloaded shim: torch's own allocator fails, and the co-tenant is another process on the same device."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from types import TracebackType
from typing import Self

from elastic_mbs.cli.demo.neighbour import Neighbour
from elastic_mbs.errors import UsageError
from elastic_mbs.memory.size import parse_bytes

from .fence import UNLIMITED, VARIABLE, Fence, under
from .host_limit import HostLimit, switch_onednn_off


class ShimLimit(HostLimit):
    """The device that `fence.c` makes, as this process sees it. It has to be started under the fence, see `run_child`.

    What counts is tensors, in blocks of `Fence.minimum` bytes and more: so the rest of a training run is its model, gradients and optimizer, as on a
    GPU. The co-tenant competes for memory: what it cannot have at once it takes when we let go of it, which depends on timing.

    Args:
        shared: other processes train on the device, too: its capacity stays as it is when this one leaves.
        onednn: leave oneDNN on, whose own buffers count as well. It crashes where it does not get them.
    """

    kind = "shim"
    exact = False

    def __init__(self, *, shared: bool = False, onednn: bool = False) -> None:
        super().__init__()
        path = os.environ.get(VARIABLE)
        if path is None or not under(Path(path)):
            raise UsageError("the world 'shim' works in a process that was started under it only: run the job by run_child('shim', …)")
        self.fence = Fence(Path(path))
        self._pid = os.getpid()
        self._shared = shared
        self._onednn = onednn
        self._undo = contextlib.ExitStack()
        self._neighbour: Neighbour | None = None

    def __enter__(self) -> Self:
        """Opens it, without a limit yet."""
        if not self._onednn:
            self._undo.callback(switch_onednn_off())
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Ends the co-tenant and lifts the limit."""
        if self._neighbour is not None:
            self._neighbour.__exit__(kind, error, trace)
            self._neighbour = None
        self._undo.close()
        if not self._shared:
            self.resize(None)
            self.fragment(None)

    def fragment(self, largest: int | None) -> None:
        """Lets single allocations above `largest` bytes fail, on the whole device; None ends that."""
        self.fence.largest = UNLIMITED if largest is None else parse_bytes(largest)

    def occupy(self, held: int) -> None:
        """Tells the co-tenant, whose process is started when it is first needed."""
        held = parse_bytes(held)
        if self._neighbour is None:
            if not held:
                return
            self._neighbour = Neighbour.on_heap()
            self._neighbour.__enter__()
        self._neighbour.hold(held)

    def total(self) -> int | None:
        """The device's budget, whoever has set it."""
        return None if self.fence.budget == UNLIMITED else self.fence.budget

    def others(self) -> int:
        """What all other processes on the device hold now."""
        return sum(slot.live for slot in self.fence.slots() if slot.pid != self._pid)

    def live(self) -> int:
        """Bytes of tensors that this process holds."""
        return self.fence.of(self._pid).live

    def failures(self) -> int:
        """Allocations that were refused this process."""
        return self.fence.of(self._pid).failures

    def apply(self) -> None:
        """Sets the device's budget."""
        self.fence.budget = UNLIMITED if self.capacity is None else self.capacity

    def peak_of_interval(self) -> int:
        """The shim's own peak."""
        return self.fence.of(self._pid).peak

    def begin_interval(self) -> None:
        """Resets the shim's own peak."""
        self.fence.reset_peak()
