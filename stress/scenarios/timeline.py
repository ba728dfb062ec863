"""Puts a script into force: moves limit and co-tenant between steps, or in the middle of one."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves

from elastic_mbs.events import format_bytes

from ..limits import MemoryLimit
from .scripts import Room, Supply


class Timeline:
    """Follows a script; `note` is called with each move, in words. Nothing `moves` where two share a device, whose size is set once for both."""

    def __init__(
        self, memory: MemoryLimit, room: Room, script: Callable[[int], Supply], note: Callable[[str], object], *, moves: bool = True
    ) -> None:
        self._memory, self._room, self._script, self._note, self._moves = memory, room, script, note, moves
        self._pending: Supply | None = None
        self._now: tuple[int, int] | None = None
        self.lowest: int | None = None  # what was left at the lowest in this step, where it moved in its middle

    @property
    def capacity(self) -> int | None:
        """Bytes for all, now."""
        return None if self._now is None else self._now[0]

    @property
    def others(self) -> int:
        """Bytes that the co-tenant was made to hold; where it is one of us, what it holds now."""
        if not self._moves:
            return self._memory.others()
        return 0 if self._now is None else self._now[1]

    def begin(self, step: int) -> None:
        """Applies the step's supply, or keeps it for the step's middle."""
        self.lowest = None
        supply = self._script(step)
        if supply.when == "before" or self._now is None:
            self._apply(supply)
        else:
            self._pending = supply

    def finish(self) -> None:
        """Applies what did not come in the step's middle."""
        self._move()

    def wrap(self, loss_fn: Callable[[Any], Any], inside: Callable[[], None] | None = None) -> Callable[[Any], Any]:
        """The loss function, with the moves that are due in its forward or in the backward after it; `inside` is called in each backward."""

        @functools.wraps(loss_fn)  # sizes are learned by name
        def watched(piece: Any) -> Any:
            supply = self._pending
            if supply is not None and supply.when == "forward":
                self._move()
            loss = loss_fn(piece)
            hooks = [self._move] if supply is not None and supply.when == "backward" else []
            hooks += [] if inside is None else [inside]
            leaf = next((each for each in tree_leaves(loss) if isinstance(each, Tensor) and each.requires_grad), None)
            if leaf is not None:
                for hook in hooks:
                    leaf.register_hook(lambda gradient, hook=hook: hook())
            return loss

        return watched

    def _move(self) -> None:
        supply, self._pending = self._pending, None
        if supply is not None:  # a piece that ran again has its hook, too
            before = self._left()
            self._apply(supply)
            self.lowest = min(self._left(), before)

    def _left(self) -> int:
        assert self._now is not None, "a supply is kept for the middle of a step only after the first"
        return self._now[0] - self._now[1]

    def _apply(self, supply: Supply) -> None:
        wanted = self._room.capacity(supply), self._room.others(supply)
        if wanted == self._now:
            return
        before, self._now = self._now or (None, None), wanted
        if not self._moves:
            return
        if before[0] != wanted[0]:
            self._memory.resize(wanted[0])
        if before[1] != wanted[1]:
            self._memory.occupy(wanted[1])
        who = f"a co-tenant holds {format_bytes(wanted[1])} of" if wanted[1] else "there are"
        self._note(f"{who} {format_bytes(wanted[0])}")
