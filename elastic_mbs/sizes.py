"""Micro-batch sizes, as events tell of them one after the other."""

from __future__ import annotations

from elastic_mbs.events import CallDone, Event, OutOfMemory, Resized


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
