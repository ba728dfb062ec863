"""The smallest micro-batch does not fit: try once more, wait if somebody else holds the memory, or give up and say what was found."""

from __future__ import annotations

from elastic_mbs.batch.schedule import Range
from elastic_mbs.engine.context import Parts
from elastic_mbs.engine.history import History
from elastic_mbs.errors import MicroBatchFloorError
from elastic_mbs.events import WaitingForMemory, format_bytes
from elastic_mbs.memory import Headroom
from elastic_mbs.memory.oom import Verdict
from elastic_mbs.memory.processes import describe

TRIES = 2
"""The first failure at the floor is tried again after letting go of everything, the second one after a wait."""

NAP = 0.25
"""Longest time between two looks at the memory while waiting, in seconds."""

OTHERS = 16
"""Waiting is worth it when others hold at least this fraction (1/16) of the device: the driver and our own context are "others", too."""


def hold(parts: Parts, history: History, piece: Range, verdict: Verdict) -> None:
    """Returns when the piece may be tried again.

    Raises:
        MicroBatchFloorError: it will not fit; the text tells what was asked for, what is free, who holds the rest, and the ways out.
    """
    tries = history.stuck_at(piece.start)
    seen = last_headroom(parts)
    hopeless = seen is not None and verdict.requested is not None and verdict.requested > seen.total
    if not hopeless:
        if tries < TRIES:
            return
        if seen is not None and seen.held_by_others >= max(1, verdict.requested or 0, seen.total // OTHERS) and _wait(parts, history, seen):
            return
    settings = parts.settings
    smallest = settings.limits.minimum
    raise MicroBatchFloorError(
        f"a micro-batch of {len(piece)} (samples {piece.start}:{piece.stop}), the smallest allowed, does not fit. "
        f"It asked for {format_bytes(verdict.requested)}; {facts_of(seen)}{'. The request is larger than the whole device' if hopeless else ''}. "
        f"Ways out: {'free what others hold; ' if seen is None or seen.held_by_others else ''}"
        f"{f'a lower min_micro_batch_size (now {smallest}, align {settings.limits.align}); ' if max(smallest, settings.limits.align) > 1 else ''}"
        f"smaller samples; activation checkpointing; a smaller optimizer state. The error was: {verdict.message}"
    )


def last_headroom(parts: Parts) -> Headroom | None:
    """The latest reading, if it is one."""
    reading = parts.monitor.latest()
    return reading if isinstance(reading, Headroom) else None


def facts_of(seen: Headroom | None) -> str:
    """What a reading says, for an error's text."""
    if seen is None:
        return "there is no memory reading"
    facts = f"{format_bytes(seen.free)} of {format_bytes(seen.total)} were free at the last look, {format_bytes(seen.held_by_others)} held by others"
    if seen.holders:
        facts += f" (processes there: {describe(seen.holders)})"
    if seen.doubt is not None:
        facts += f" (in doubt: {seen.doubt})"
    return facts


def _wait(parts: Parts, history: History, seen: Headroom) -> bool:
    """Waits until there is more capacity than there was; returns whether there is. The waits of a call share one limit."""
    if history.wait_left <= 0:
        return False
    parts.log.emit(WaitingForMemory(parts.settings.name, history.wait_left, seen.free, seen.held_by_others, describe(seen.holders)))
    while history.wait_left > 0:
        nap = min(NAP, history.wait_left)
        parts.sleep(nap)
        history.wait_left -= nap
        now = parts.monitor.latest()
        if isinstance(now, Headroom) and now.capacity > seen.capacity:
            return True
    return False
