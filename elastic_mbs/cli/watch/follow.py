"""The runs of a log that grows: sums over each run, and the latest of all other figures."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from elastic_mbs.errors import UsageError
from elastic_mbs.events import CallDone, CallFailed, OptimizerOutOfMemory, OutOfMemory
from elastic_mbs.sinks.run_log import Entry, Reader, unreadable

EVENTS, POINTS = 8, 400  # how many of the last events and figures are kept


@dataclass
class State:
    """A run so far."""

    header: Mapping[str, Any] = field(default_factory=dict)  # empty where the log has none
    calls: int = 0  # that finished
    samples: int = 0  # in them
    ooms: int = 0
    replayed: int = 0  # samples
    seconds: float = 0.0  # of the calls
    lost: float = 0.0  # seconds of it in failed attempts
    last: CallDone | None = None
    losses: deque[float] = field(default_factory=lambda: deque(maxlen=POINTS))
    # samples per second of training calls
    rates: deque[float] = field(default_factory=lambda: deque(maxlen=POINTS))
    # micro-batch size by track, at the end of its last call; the track that ran last is the last
    sizes: dict[str, int] = field(default_factory=dict)
    # but finished calls: time, level, line
    events: deque[tuple[float, str, str]] = field(default_factory=lambda: deque(maxlen=EVENTS))
    t: float = 0.0  # of the last line, in seconds since the run began
    time: float = 0.0  # the same in unix seconds

    def add(self, entry: Entry) -> None:
        """Take one event."""
        self.t, self.time = max(self.t, entry.t), max(self.time, float(entry.record["time"]))
        event = entry.event
        if isinstance(event, CallDone | CallFailed):
            self.seconds += event.seconds or 0.0
            self.lost += event.seconds_lost
        if isinstance(event, CallDone):
            self.calls += 1
            self.samples += event.samples
            self.replayed += event.replayed_samples
            self.last = event
            self.sizes.pop(event.key, None)
            self.sizes[event.key] = event.micro_batch_size
            if event.mode == "train":
                self.losses.extend([] if event.loss is None else [event.loss])
                self.rates.extend([] if event.rate is None else [event.rate])
        else:
            self.ooms += isinstance(event, OutOfMemory | OptimizerOutOfMemory)
            line = str(entry.record["event"]) if event is None else event.line()
            self.events.append((entry.t, str(entry.record.get("level", "")), line))


class Follower:
    """Reader of the lines that are added to a log.

    A log that was cut or replaced is read from its start.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._begin(0)

    def _begin(self, inode: int) -> None:
        self.current: State | None = None  # the run that has had the last line
        self._states: dict[str, State] = {}
        self._reader = Reader()
        self._inode, self._offset = inode, 0
        self._rest = b""  # a line without its end

    def read(self) -> None:
        """Take the new lines that are whole, without waiting for any.

        Raises:
            UsageError: the log cannot be read; the error has one line.
        """
        try:
            now = self._path.stat()
            if now.st_ino != self._inode or now.st_size < self._offset:
                self._begin(now.st_ino)
            with self._path.open("rb") as file:
                file.seek(self._offset)
                *lines, self._rest = (self._rest + file.read()).split(b"\n")
                self._offset = file.tell()
            for run in filter(None, map(self._reader.feed, lines)):
                self.current = self._states.setdefault(run.id, State())
                self.current.header = run.header
                for entry in run.entries:
                    self.current.add(entry)
                run.entries.clear()
        except (OSError, UsageError) as error:
            raise unreadable(self._path, error) from error
