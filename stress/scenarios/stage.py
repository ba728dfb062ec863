"""Puts a script into force: moves limit and co-tenant of a world between steps, or in the middle of one."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor

from elastic_mbs.events import format_bytes

from ..limits import MemoryLimit
from .weather import Room, Weather


class Stage:
    """Follows a script in a world.

    Args:
        world: whose memory it moves.
        room: what shares are in bytes.
        script: the step's weather.
        tell: told of each move, in words.
        moves: whether the limit is ours to move; False where two processes share a device, and it was made as large as it is to be.
    """

    def __init__(
        self, world: MemoryLimit, room: Room, script: Callable[[int], Weather], tell: Callable[[str], object], *, moves: bool = True
    ) -> None:
        self._world = world
        self._room = room
        self._script = script
        self._tell = tell
        self._moves = moves
        self._pending: Weather | None = None
        self._now: tuple[int, int] | None = None
        self.lowest: int | None = None

    @property
    def capacity(self) -> int | None:
        """Bytes for all, now."""
        return None if self._now is None else self._now[0]

    @property
    def others(self) -> int:
        """Bytes that the co-tenant was told to hold; where it is one of us, what it holds now."""
        if not self._moves:
            return self._world.others()
        return 0 if self._now is None else self._now[1]

    def begin(self, step: int) -> None:
        """A step begins: its weather comes now, or is kept for its middle."""
        self.lowest = None
        weather = self._script(step)
        if weather.when == "before" or self._now is None:
            self._apply(weather)
        else:
            self._pending = weather

    def finish(self) -> None:
        """The step is over: what did not come in its middle comes now."""
        if self._pending is not None:
            self._move()

    def wrap(self, loss_fn: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """The loss function, with the moves that are due in its forward or in the backward after it."""

        @functools.wraps(loss_fn)
        def watched(piece: Any) -> Any:
            weather = self._pending
            if weather is not None and weather.when == "forward":
                self._move()
            loss = loss_fn(piece)
            if weather is not None and weather.when == "backward" and isinstance(loss, Tensor) and loss.requires_grad:
                loss.register_hook(lambda _: self._move())
            return loss

        return watched

    def _move(self) -> None:
        weather, self._pending = self._pending, None
        if weather is not None:  # a piece that ran again has its hook, too
            before = None if self._now is None else self._now[0] - self._now[1]
            self._apply(weather)
            assert self._now is not None
            after = self._now[0] - self._now[1]
            self.lowest = after if before is None else min(before, after)

    def _apply(self, weather: Weather) -> None:
        wanted = self._room.capacity(weather), self._room.others(weather)
        if wanted == self._now:
            return
        before, self._now = self._now, wanted
        if not self._moves:
            return
        if before is None or before[0] != wanted[0]:
            self._world.resize(wanted[0])
        if before is None or before[1] != wanted[1]:
            self._world.occupy(wanted[1])
        who = f"a co-tenant holds {format_bytes(wanted[1])} of" if wanted[1] else "there are"
        self._tell(f"{who} {format_bytes(wanted[0])}")
