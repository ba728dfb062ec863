"""What can happen to a call, one frozen dataclass each, and one log line each.

Events hold numbers and strings only, never tensors or exceptions: whoever keeps them keeps no memory of the failed attempt alive.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
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
        mode: how it is replayed: "piece", "step" or "isolate" (see `elastic_mbs.rollback.graph`).
        size_before: micro-batch size that was attempted, in samples.
        size_after: micro-batch size that will be attempted next, in samples.
        committed: leaves that the failed attempt had already committed.
        kind: what sort of error it was (see `elastic_mbs.memory.oom.Kind`).
        message: first line of the error's text.
        key: which track of the controller it belongs to (loss function, train or eval, shape class).
        requested: bytes that were asked for, where the error tells.
        free: bytes that this process could still get, by the latest reading; None without one.
        held_by_others: bytes that somebody else has, by the same reading.
        holders: the biggest of them in words, where they are known.
        reading_age: seconds since that reading was taken: the others may have moved meanwhile.
        seconds_lost: seconds of the host's clock from the start of what failed until it was undone, in mode "step" from the call's start; None where
            nobody listens.
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
    key: str = ""
    requested: int | None = None
    free: int | None = None
    held_by_others: int | None = None
    holders: str = ""
    reading_age: float | None = None
    seconds_lost: float | None = None

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
        kind: what sort of error it was (see `elastic_mbs.memory.oom.Kind`).
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
class CallDone(Event):
    """A call has finished. Made only where somebody listens: a sink of `on_event`, or a run log.

    It comes once everything in it is known. On CUDA that is one or two calls later, because nothing waits for the device; what is left comes when the
    runtime is closed.

    Attributes:
        key: which track of the controller it belongs to (loss function, train or eval, shape class).
        mode: "train" or "eval".
        samples: samples of the batch.
        pieces: micro-batches that committed.
        size_before: micro-batch size in force when the call began, in samples.
        micro_batch_size: the size in force when it ended, in samples.
        ooms: out-of-memory errors survived in it.
        replayed_samples: samples that were run again.
        seconds: time of the call, in seconds of the device where it keeps time and of the host elsewhere; None where the device was lost.
        seconds_lost: part of it that went into attempts that failed, by the host's clock: see `OutOfMemory`.
        loss: of the whole batch; None for an eval, or where it could not be read without waiting.
        allocated: bytes in live tensors when it ended; None where nobody knows.
        reserved: bytes that the allocator held then; without a meter what the latest reading leaves of the capacity.
        peak_allocated: most bytes allocated since the peaks were reset, which is this call's start while a size is being learned, and earlier else.
        peak_reserved: most bytes reserved since then.
        free: bytes that this process could still get, by the latest reading.
        held_by_others: bytes that somebody else has, by the same reading.
        total: bytes that the device has, by the same reading.
        ended: when it ended, in seconds of `time.monotonic`.
    """

    level: ClassVar[int] = logging.DEBUG
    key: str
    mode: str
    samples: int
    pieces: int
    size_before: int
    micro_batch_size: int
    ooms: int
    replayed_samples: int
    seconds: float | None
    seconds_lost: float
    loss: float | None
    allocated: int | None
    reserved: int | None
    peak_allocated: int | None
    peak_reserved: int | None
    free: int | None
    held_by_others: int | None
    total: int | None
    ended: float

    @property
    def rate(self) -> float | None:
        """Samples per second, or None where the time is not known."""
        return self.samples / self.seconds if self.seconds is not None and self.seconds > 0 else None

    def line(self) -> str:
        """The event as one log line."""
        took = "an unknown time" if self.seconds is None else f"{self.seconds:.3g} s"
        loss = "" if self.loss is None else f", loss {self.loss:.6g}"
        return (
            f"{self.samples} samples in {self.pieces} pieces of up to {self.micro_batch_size} in {took}{loss}, {self.ooms} out-of-memory errors, "
            f"{self.seconds_lost:.3g} s lost to them, {format_bytes(self.allocated)} allocated for {self.key}"
        )


@dataclass(frozen=True)
class CallFailed(Event):
    """A call has ended by an exception, which passes on to the caller. Only where somebody listens.

    Attributes:
        key: which track of the controller it belongs to.
        error: the exception's class.
        message: its first line.
        ooms: out-of-memory errors survived before it.
        seconds: since the call began.
        seconds_lost: of those, what failed attempts had cost.
    """

    key: str
    error: str
    message: str
    ooms: int
    seconds: float
    seconds_lost: float

    def line(self) -> str:
        """The event as one log line."""
        return f"a call has ended by {self.error} after {self.seconds:.3g} s and {self.ooms} out-of-memory errors, for {self.key}: {self.message}"


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
        capacity: bytes that this process could hold in all when that was decided; None without a reading.
    """

    before: int
    after: int
    reason: str
    key: str
    capacity: int | None = None

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


class ClosingSink(ABC):
    """A sink of this package, which has something to end or to write out when its runtime is closed; the next call begins again."""

    def begin(self) -> None:  # noqa: B027  # not abstract: most sinks have nothing to do when a call begins
        """A call begins."""

    @abstractmethod
    def __call__(self, event: Event) -> None:
        """Takes an event; raises nothing."""

    @abstractmethod
    def close(self) -> None:
        """Ends what is open; raises nothing."""


class EventLog:
    """Sends each event to the logger and to the sinks. An error in a sink passes through: nothing is swallowed.

    Args:
        sinks: get each event, in this order. Those that have something to end are `ClosingSink`s.
    """

    def __init__(self, sinks: Iterable[Sink] = ()) -> None:
        self._sinks = tuple(sinks)
        self._closing = tuple(sink for sink in self._sinks if isinstance(sink, ClosingSink))
        self._warned: set[str] = set()

    @property
    def listened(self) -> bool:
        """Whether anybody but the logger gets events."""
        return bool(self._sinks)

    def begin(self) -> None:
        """Tells the sinks of this package that a call begins."""
        for sink in self._closing:
            sink.begin()

    def emit(self, event: Event) -> None:
        """Logs the event in one line and hands it to every sink."""
        if logger.isEnabledFor(event.level):
            logger.log(event.level, "[%s] %s", event.name, event.line())
        for sink in self._sinks:
            sink(event)

    def close(self) -> None:
        """Ends what the sinks of this package have open."""
        for sink in self._closing:
            sink.close()

    def warn_once(self, name: str, topic: str, message: str) -> None:
        """Emits `Warned` the first time that `topic` comes up."""
        if topic not in self._warned:
            self._warned.add(topic)
            self.emit(Warned(name, topic, message))


class SizeReader:
    """Takes the events of one runtime, in the order in which they come, and tells which track has which size.

    A finished call tells the size with which it ended. By then something newer may have been told: the size was changed at the call's end, or the
    next call, which did not wait for this one's figures, has run out of memory.
    """

    def __init__(self) -> None:
        self._newer: set[str] = set()

    def read(self, event: Event | None) -> tuple[str, int] | None:
        """The track and its size, or None where the event tells nothing new of it."""
        if isinstance(event, OutOfMemory | Resized):
            self._newer.add(event.key)
            return event.key, event.size_after if isinstance(event, OutOfMemory) else event.after
        if not isinstance(event, CallDone):
            return None
        if event.key in self._newer:
            self._newer.remove(event.key)
            return None
        return event.key, event.micro_batch_size
