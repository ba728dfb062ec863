"""What can happen to a call, one frozen dataclass each, and one log line each.

Events hold numbers and strings only, never tensors or exceptions: whoever keeps them keeps no memory of the failed attempt alive.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from typing import ClassVar

logger = logging.getLogger("elastic_mbs")
logger.addHandler(logging.NullHandler())


def format_bytes(count: int | float | None) -> str:
    """A byte count as a person writes it: `1536` → `1.5 KiB`; `None` → `unknown`."""
    if count is None:
        return "unknown"
    size, units = float(count), ["B", "KiB", "MiB", "GiB", "TiB"]
    while abs(size) >= 1024 and len(units) > 1:
        size /= 1024
        units.pop(0)
    return f"{size:.0f} {units[0]}" if units[0] == "B" else f"{size:.1f} {units[0]}"


@dataclass(frozen=True)
class Event:
    """Base of all events. `name` is the runtime's name, so that two runtimes can share one sink."""

    level: ClassVar[int] = logging.INFO
    name: str

    def line(self) -> str:
        """The event as one log line."""
        parts = [f"{f.name}={getattr(self, f.name)}" for f in fields(self) if f.name != "name"]
        return f"{type(self).__name__}: " + " ".join(parts)


@dataclass(frozen=True)
class OutOfMemory(Event):
    """A piece ran out of memory and will be replayed.

    Attributes:
        phase: "load", "forward", "backward" or "commit".
        start: first sample of the failed piece.
        stop: one past its last sample.
        mode: how it is replayed: "piece", "step" or "isolate" (see `elastic_mbs.commits`).
        size_before: micro-batch size that was attempted, in samples.
        size_after: micro-batch size that will be attempted next, in samples.
        committed: leaves that the failed attempt had already committed.
        kind: what sort of error it was (see `elastic_mbs.oom.Kind`).
        message: first line of the error's text.
    """

    level: ClassVar[int] = logging.WARNING
    phase: str
    start: int
    stop: int
    mode: str
    size_before: int
    size_after: int
    committed: int
    kind: str
    message: str

    def line(self) -> str:
        """The event as one log line."""
        return (
            f"out of memory in {self.phase} of samples {self.start}:{self.stop}: micro-batch {self.size_before} → {self.size_after}, "
            f"replaying the {'batch' if self.mode == 'step' else 'piece'} (mode {self.mode}, {self.committed} leaves had committed): {self.message}"
        )


@dataclass(frozen=True)
class OptimizerOutOfMemory(Event):
    """A guarded optimizer step ran out of memory; parameters and state have been put back, and it is tried again.

    Attributes:
        optimizer: its class.
        action: what is different in the next try.
        kind: what sort of error it was (see `elastic_mbs.oom.Kind`).
        message: first line of the error's text.
    """

    level: ClassVar[int] = logging.WARNING
    optimizer: str
    action: str
    kind: str
    message: str

    def line(self) -> str:
        """The event as one log line."""
        return f"out of memory in {self.optimizer}.step(), which has been taken back; trying again {self.action}: {self.message}"


@dataclass(frozen=True)
class WaitingForMemory(Event):
    """The smallest micro-batch does not fit now; waiting, for a bounded time, for others to free memory.

    Attributes:
        seconds: the longest that is waited.
        free: bytes that are free.
        held_by_others: bytes that others hold.
        holders: the biggest of them in words, where they are known.
    """

    level: ClassVar[int] = logging.WARNING
    seconds: float
    free: int | None
    held_by_others: int | None
    holders: str = ""

    def line(self) -> str:
        """The event as one log line."""
        return (
            f"the smallest micro-batch does not fit: waiting up to {self.seconds:.1f} s for memory "
            f"(free {format_bytes(self.free)}, held by others {format_bytes(self.held_by_others)}{f': {self.holders}' if self.holders else ''})"
        )


@dataclass(frozen=True)
class Resized(Event):
    """The micro-batch size changed between two calls.

    Attributes:
        before: size before, in samples.
        after: size after, in samples.
        reason: "grow", "thrash" or "limit".
        key: which track of the controller it belongs to (loss function, train or eval, shape class).
    """

    before: int
    after: int
    reason: str
    key: str

    def line(self) -> str:
        """The event as one log line."""
        return f"micro-batch {self.before} → {self.after} ({self.reason}) for {self.key}"


@dataclass(frozen=True)
class SensorLost(Event):
    """The memory sensor gives no reading, or one in doubt: growth stops, training goes on."""

    level: ClassVar[int] = logging.WARNING
    reason: str

    def line(self) -> str:
        """The event as one log line."""
        return f"no memory reading to rely on, so micro-batches stop growing until there is one: {self.reason}"


@dataclass(frozen=True)
class SensorBack(Event):
    """The memory sensor gives readings to rely on again."""

    source: str

    def line(self) -> str:
        """The event as one log line."""
        return f"memory readings are back (from {self.source})"


@dataclass(frozen=True)
class Warned(Event):
    """Something that is probably a mistake; said once per runtime and topic."""

    level: ClassVar[int] = logging.WARNING
    topic: str
    message: str

    def line(self) -> str:
        """The event as one log line."""
        return self.message


Sink = Callable[[Event], None]


class EventLog:
    """Sends each event to the logger and to the sinks. An error in a sink passes through: nothing is swallowed."""

    def __init__(self, sinks: Iterable[Sink] = ()) -> None:
        self._sinks = tuple(sinks)
        self._warned: set[str] = set()

    def emit(self, event: Event) -> None:
        """Logs the event in one line and hands it to every sink."""
        if logger.isEnabledFor(event.level):
            logger.log(event.level, "[%s] %s", event.name, event.line())
        for sink in self._sinks:
            sink(event)

    def warn_once(self, name: str, topic: str, message: str) -> None:
        """Emits `Warned` the first time that `topic` comes up."""
        if topic not in self._warned:
            self._warned.add(topic)
            self.emit(Warned(name, topic, message))
