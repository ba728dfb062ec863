"""Puts a script into force: moves limit and co-tenant between steps, or in the middle of one."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves

from elastic_mbs.events import format_bytes

from ..limits import MemoryLimit
from .catalogue import Order
from .scripts import Room, Supply


class Timeline:
    """Follows an order's script; `note` gets each move in words. Nothing moves where two share a device, whose size is set once for both."""

    def __init__(self, memory: MemoryLimit, room: Room, order: Order, note: Callable[[str], object]) -> None:
        self._memory, self._room, self._order, self._note = memory, room, order, note
        self._pending: Supply | None = None
        self.capacity: int | None = None  # bytes for all, now; None before the first step
        self._held: int | None = None  # bytes that the co-tenant was made to hold
        self.lowest: int | None = None  # what was left at the lowest in this step, where it moved in its middle

    @property
    def others(self) -> int:
        """Bytes that the co-tenant was made to hold; where it is one of us, what it holds now."""
        return self._memory.others() if self._order.together else (self._held or 0)

    def begin(self, step: int) -> None:
        """Applies the step's supply, or keeps it for the step's middle."""
        self.lowest = None
        supply = self._order.entry.script(step, self._order.steps, self._order.seed)
        if supply.when == "before" or self.capacity is None:
            self._apply(supply)
        else:
            self._pending = supply

    def finish(self) -> None:
        """Applies what is due in this step, if it has not come yet: a piece that runs again has its hook, too."""
        supply, self._pending = self._pending, None
        if supply is not None:
            before = self._left()
            self._apply(supply)
            self.lowest = min(self._left(), before)

    def wrap(self, loss_fn: Callable[[Any], Any], inside: Callable[[], None]) -> Callable[[Any], Any]:
        """The loss function, with the moves that are due in its forward or in the backward after it; `inside` is called in each backward."""

        @functools.wraps(loss_fn)  # sizes are learned by name
        def watched(piece: Any) -> Any:
            when = self._pending.when if self._pending is not None else ""
            if when == "forward":
                self.finish()
            loss = loss_fn(piece)
            leaf = next((each for each in tree_leaves(loss) if isinstance(each, Tensor) and each.requires_grad), None)
            if leaf is not None:
                for hook in (self.finish, inside) if when == "backward" else (inside,):
                    leaf.register_hook(lambda gradient, hook=hook: hook())
            return loss

        return watched

    def _left(self) -> int:
        return (self.capacity or 0) - (self._held or 0)

    def _apply(self, supply: Supply) -> None:
        before = self.capacity, self._held
        self.capacity, self._held = capacity, held = self._room.capacity(supply), self._room.others(supply)
        if before == (capacity, held) or self._order.together:
            return
        if before[0] != capacity:
            self._memory.resize(capacity)
        if before[1] != held:
            self._memory.occupy(held)
        who = f"a co-tenant holds {format_bytes(held)} of" if held else "there are"
        self._note(f"{who} {format_bytes(capacity)}")
