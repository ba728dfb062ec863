"""The events of a runtime, frozen dataclasses with one log line each, and the sinks they go to.

Events hold numbers and strings only, never tensors or exceptions. So a sink that keeps them keeps
no memory of a failed attempt alive.

Every warning of the package is a line of the logger `elastic_mbs`. Those of a runtime are `Warned`
events as well (`EventLog.emit_warning`), so that its sinks get them.
"""

from __future__ import annotations

import logging
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import ClassVar

# It has no handler of its own: where the user has set up no logging, Python prints warnings.
logger = logging.getLogger("elastic_mbs")


def format_bytes(count: int | float | None) -> str:
    """Return a byte count as a person writes it: `1536` → `1.5 KiB`; `None` → `unknown`."""
    if count is None:
        return "unknown"
    size = float(count)
    units = ["B", "KiB", "MiB", "GiB", "TiB"]
    while abs(size) >= 1024 and len(units) > 1:
        size /= 1024
        units.pop(0)
    return f"{size:.{units[0] != 'B':d}f} {units[0]}"


# --8<-- [start:events]: this part is a page of the documentation
@dataclass(frozen=True)
class Event:
    """The base of all events."""

    level: ClassVar[int] = logging.INFO
    text: ClassVar[str] = ""  # of the log line, with the fields in braces
    name: str  # of the runtime, so that two runtimes can share one sink

    def line(self) -> str:
        """Return the event as one log line."""
        return self.text.format_map(vars(self))


@dataclass(frozen=True)
class OutOfMemory(Event):
    """A piece ran out of memory and will be replayed."""

    level: ClassVar[int] = logging.WARNING
    text: ClassVar[str] = (
        "out of memory in {phase} of samples {start}:{stop}: micro-batch {size}, {again}: {message}"
    )
    phase: str  # "load", "forward", "backward" or "commit"
    start: int  # first sample of the failed piece
    stop: int  # one past its last sample
    mode: str  # how it is replayed: "piece", "step" (the whole batch) or "isolate"
    size_before: int  # micro-batch size that was attempted, in samples
    size_after: int  # micro-batch size that will be attempted next, in samples
    committed: int  # leaves that the failed attempt had already committed
    kind: str  # sort of error (see `elastic_mbs.memory.oom.Kind`)
    message: str  # first line of the error's text
    key: str = ""  # kind of call (loss function, train or eval, shape class)
    requested: int | None = None  # bytes, where the error says so
    # bytes that this process could still get, by the latest reading; None without one
    free: int | None = None
    held_by_others: int | None = None  # bytes, by the same reading
    holders: str = ""  # the biggest of the others in words, where they are known
    reading_age: float | None = None  # seconds since that reading was taken
    # seconds of the work that was undone, by the host's clock (mode "step": since the call began);
    # None without sinks
    seconds_lost: float | None = None

    def line(self) -> str:
        """Return the event as one log line."""
        again = "the batch starts over" if self.mode == "step" else "its samples run again"
        size = f"{self.size_before} → {self.size_after}"
        if self.size_after == self.size_before:  # it cannot be cut, or another rank failed
            size = f"{self.size_before} as before, with memory released"
        return self.text.format_map({**vars(self), "size": size, "again": again})


@dataclass(frozen=True)
class OptimizerOutOfMemory(Event):
    """A guarded optimizer step ran out of memory, and is tried again.

    Parameters and state are as they were before the step.
    """

    level: ClassVar[int] = logging.WARNING
    text: ClassVar[str] = (
        "out of memory in {optimizer}.step(), which has been taken back; trying again {action}: "
        "{message}"
    )
    optimizer: str  # its class
    action: str  # the difference of the next try
    kind: str  # sort of error (see `elastic_mbs.memory.oom.Kind`)
    message: str  # first line of the error's text


@dataclass(frozen=True)
class CallDone(Event):
    """A call has finished. Made only where there is a sink, or a run log.

    On CUDA it comes one or two calls later, or when the runtime is closed, because nothing waits
    for the device.
    """

    level: ClassVar[int] = logging.DEBUG
    key: str  # kind of call (loss function, train or eval, shape class)
    mode: str  # "train" or "eval"
    samples: int  # of the batch
    pieces: int  # micro-batches that committed
    size_before: int  # micro-batch size in force when the call began, in samples
    micro_batch_size: int  # the size in force when it ended, in samples
    ooms: int  # out-of-memory errors survived in it
    replayed_samples: int  # samples that were run again
    # of the call, by the device's clock where it has one, else by the host's; None where the device
    # was lost
    seconds: float | None
    seconds_lost: float  # part of it in attempts that failed, by the host's clock
    # of the whole batch; None for an eval, or where it could not be read without waiting
    loss: float | None
    allocated: int | None  # bytes in live tensors when it ended; None where not known
    # bytes that the allocator held then; without a meter: capacity less free, by the latest reading
    reserved: int | None
    # most bytes allocated since the peaks were reset, at this call's start or earlier
    peak_allocated: int | None
    peak_reserved: int | None  # most bytes reserved since then
    free: int | None  # bytes that this process could still get, by the latest reading
    held_by_others: int | None  # bytes, by the same reading
    total: int | None  # bytes of the device, by the same reading
    ended: float  # when it ended, in seconds of `time.monotonic`
    graphs: int = 0  # made by torch.compile while it ran

    @property
    def rate(self) -> float | None:
        """Samples per second; None where the time is not known."""
        if self.seconds is None or not self.seconds > 0:
            return None
        return self.samples / self.seconds

    def line(self) -> str:
        took = "an unknown time" if self.seconds is None else f"{self.seconds:.3g} s"
        loss = "" if self.loss is None else f", loss {self.loss:.6g}"
        return (
            f"{self.samples} samples in {self.pieces} pieces of up to {self.micro_batch_size} in "
            f"{took}{loss}, {self.ooms} out-of-memory errors, "
            f"{self.seconds_lost:.3g} s lost to them, {format_bytes(self.allocated)} allocated "
            f"for {self.key}"
        )


@dataclass(frozen=True)
class CallFailed(Event):
    """A call has ended by an exception, which is passed on. Made only where there is a sink."""

    text: ClassVar[str] = (
        "a call has ended by {error} after {seconds:.3g} s and {ooms} out-of-memory errors, for "
        "{key}: {message}"
    )
    key: str  # kind of call (loss function, train or eval, shape class)
    error: str  # class of the exception
    message: str  # its first line
    ooms: int  # out-of-memory errors survived before it
    seconds: float  # since the call began
    seconds_lost: float  # part of them in failed attempts


@dataclass(frozen=True)
class WaitingForMemory(Event):
    """The smallest micro-batch does not fit now; the call waits until others free memory."""

    level: ClassVar[int] = logging.WARNING
    seconds: float  # the longest wait
    free: int | None  # bytes
    held_by_others: int | None  # bytes
    holders: str = ""  # the biggest of the others in words, where they are known

    def line(self) -> str:
        holders = f": {self.holders}" if self.holders else ""
        return (
            f"the smallest micro-batch does not fit: waiting up to {self.seconds:.1f} s for memory "
            f"(free {format_bytes(self.free)}, held by others "
            f"{format_bytes(self.held_by_others)}{holders})"
        )


@dataclass(frozen=True)
class Escalated(Event):
    """A step up the ladder: the loss function runs with less memory and other work from now on.

    The smallest micro-batch does not fit, or a plan or its autotuning has found that a batch takes
    less time so. See `RecoveryOptions.escalate`.
    """

    level: ClassVar[int] = logging.WARNING
    text: ClassVar[str] = (
        "samples {start}:{stop} do not fit{need} and cannot be cut: from now on with {way}, the "
        "next way of escalate=, for {key}"
    )
    planned: ClassVar[str] = "from now on with {way} for {key}, as planned: {why}"
    start: int  # first sample of the piece that does not fit; of the batch, where it is planned
    stop: int  # one past its last sample
    by: str  # the rung of `RecoveryOptions.escalate`
    key: str  # kind of call (loss function, train or eval, shape class)
    part: str = ""  # of that rung: "2 of 8 blocks", "one tensor ahead"; empty for all of it
    needed: int | None = None  # bytes that this process needs without it, at least
    why: str = ""  # the reason of a plan; empty where a piece does not fit

    def line(self) -> str:
        """Return the event as one log line."""
        need = "" if self.needed is None else f" in less than {format_bytes(self.needed)}"
        words = {**vars(self), "way": _way(self.by, self.part), "need": need}
        return (self.planned if self.why else self.text).format_map(words)


@dataclass(frozen=True)
class Deescalated(Event):
    """There is more memory again: this loss function runs without its last escalation."""

    text: ClassVar[str] = "there is more memory: from now on without {way} for {key}"
    by: str  # the rung of `RecoveryOptions.escalate`
    key: str  # kind of call (loss function, train or eval, shape class)
    part: str = ""  # the part of the model, as in `Escalated`
    capacity: int | None = None  # bytes that this process could hold in all at the decision

    def line(self) -> str:
        """Return the event as one log line."""
        return self.text.format_map({**vars(self), "way": _way(self.by, self.part)})


def _way(rung: str, part: str) -> str:
    return f"{rung} ({part})" if part else rung


@dataclass(frozen=True)
class Resized(Event):
    """The micro-batch size has changed between two calls."""

    text: ClassVar[str] = "micro-batch {before} → {after} ({reason}) for {key}"
    before: int  # in samples
    after: int  # in samples
    reason: str  # "grow", "thrash" or "limit"
    key: str  # kind of call (loss function, train or eval, shape class)
    # bytes that this process could hold in all at the decision; None without a reading
    capacity: int | None = None


@dataclass(frozen=True)
class SensorLost(Event):
    """The memory sensor gives no reliable reading: growth stops, training goes on."""

    level: ClassVar[int] = logging.WARNING
    text: ClassVar[str] = (
        "no memory reading to rely on, so micro-batches stop growing until there is one: {reason}"
    )
    reason: str


@dataclass(frozen=True)
class SensorBack(Event):
    """The memory sensor gives reliable readings again."""

    text: ClassVar[str] = "memory readings are back (from {source})"
    source: str


@dataclass(frozen=True)
class Warned(Event):
    """A probable mistake in the training loop, or a limit of this machine."""

    level: ClassVar[int] = logging.WARNING
    text: ClassVar[str] = "{message}"
    topic: str  # a topic is warned of once per runtime, as a rule
    message: str


# --8<-- [end:events]
Sink = Callable[[Event], None]


class GuardedSink(ABC):
    """A sink of this package: its errors are never raised into a step.

    The first error is a line of the logger. In a forked child the sink does nothing.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()  # the monitor's thread emits events, too
        self._pid = os.getpid()
        self._warned = False

    def __call__(self, event: Event) -> None:
        """Take an event."""
        self._guarded(lambda: self._take(event))

    def begin(self) -> None:
        """Prepare for the events of a call."""
        self._guarded(self._begin)

    def close(self) -> None:
        """Write out pending events and close open files; a later call opens them again."""
        self._guarded(self._end)

    @abstractmethod
    def _take(self, event: Event) -> None: ...

    def _begin(self) -> object:
        return None

    @abstractmethod
    def _end(self) -> None: ...

    def _guarded(self, work: Callable[[], object]) -> None:
        if self._pid != os.getpid():
            return
        with self._lock:
            try:
                work()
            except Exception as error:  # of any kind: no step ends because of it
                if not self._warned:
                    self._warned = True
                    logger.warning(
                        "%s misses events, and training goes on: %s: %s",
                        self,
                        type(error).__name__,
                        error,
                    )


class EventLog:
    """The way of a runtime's events: to the logger, then to the sinks, in order.

    An error in a user's sink is passed on: nothing is swallowed.
    """

    def __init__(self, sinks: Iterable[Sink] = ()) -> None:
        self._sinks = tuple(sinks)
        self.listened = bool(self._sinks)  # there is a sink
        self._ours = tuple(sink for sink in self._sinks if isinstance(sink, GuardedSink))
        self._warned: set[str] = set()  # topics
        self._emitting: list[int] = []  # threads that are inside a sink

    def begin(self) -> None:
        """Prepare the sinks of this package for a call."""
        for sink in self._ours:
            sink.begin()

    def emit(self, event: Event) -> None:
        """Log the event in one line, and hand it to every sink."""
        if logger.isEnabledFor(event.level):
            logger.log(event.level, "[%s] %s", event.name, event.line())
        self._emitting.append(threading.get_ident())
        try:
            for sink in self._sinks:
                sink(event)
        finally:
            self._emitting.remove(threading.get_ident())

    @property
    def emitting(self) -> bool:
        """True while this thread is inside a sink."""
        return threading.get_ident() in self._emitting

    def close(self) -> None:
        """Close the sinks of this package."""
        for sink in self._ours:
            sink.close()

    def emit_warning(self, name: str, topic: str, message: str, *, once: bool = True) -> None:
        """Emit `Warned`; with `once`, only the first time that the topic comes up."""
        if once and topic in self._warned:
            return
        self._warned.add(topic)
        self.emit(Warned(name, topic, message))
