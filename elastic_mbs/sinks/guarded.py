"""A sink whose own errors are logged once and never raised into a step."""

from __future__ import annotations

import os
import threading
from abc import abstractmethod
from collections.abc import Callable, Iterable

from elastic_mbs.errors import UsageError
from elastic_mbs.events import ClosingSink, Event, Sink, logger


class GuardedSink(ClosingSink):
    """A sink whose failures are logged once in the Python log. A forked child does nothing."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # the monitor's thread has events, too
        self._pid = os.getpid()
        self._warned = False

    def __call__(self, event: Event) -> None:
        """Takes an event; raises nothing."""
        self._guarded(lambda: self._take(event))

    def close(self) -> None:
        """Writes out what is waiting; raises nothing."""
        self._guarded(self._end)

    @abstractmethod
    def _take(self, event: Event) -> None: ...

    @abstractmethod
    def _end(self) -> None: ...

    def _guarded(self, work: Callable[[], object]) -> None:
        if self._pid != os.getpid():
            return
        with self._lock:
            try:
                work()
            except Exception as error:  # of whatever kind: a step does not end for it
                if not self._warned:
                    self._warned = True
                    logger.warning("%s misses events, and training goes on: %s: %s", self, type(error).__name__, error)


def checked_sinks(on_event: Sink | Iterable[Sink]) -> tuple[Sink, ...]:
    """The functions that get each event; a UsageError where one of them cannot be called."""
    sinks = (on_event,) if callable(on_event) or not isinstance(on_event, Iterable) else tuple(on_event)
    if not all(callable(sink) for sink in sinks):
        raise UsageError(f"on_event={on_event!r} is neither a function nor a sequence of functions")
    return sinks
