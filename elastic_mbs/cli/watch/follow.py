"""The runs of a log that grows: sums over each run, and the latest of all other figures."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from pathlib import Path

from elastic_mbs.error_bases import UsageError
from elastic_mbs.events import CallDone
from elastic_mbs.sinks.log_reader import Entry, Reader, Run, files_of, plausible, unreadable

EVENTS, POINTS = 8, 400  # how many of the last events and figures are kept
CHUNK = 1024**2  # bytes; of more than that only the last part is shown line by line


@dataclass
class State:
    """A run so far."""

    run: Run
    last: CallDone | None = None
    losses: deque[float] = field(default_factory=lambda: deque(maxlen=POINTS))
    # samples per second of training calls
    rates: deque[float] = field(default_factory=lambda: deque(maxlen=POINTS))
    # but finished calls: time, level, line
    events: deque[tuple[float, str, str]] = field(default_factory=lambda: deque(maxlen=EVENTS))

    @property
    def ooms(self) -> int:
        """The number of failures, in calls and in steps of optimizers."""
        events = self.run.totals.events
        return events.get("OutOfMemory", 0) + events.get("OptimizerOutOfMemory", 0)

    def add(self, entry: Entry) -> None:
        """Take one event."""
        event = plausible(entry.event)
        if isinstance(event, CallDone):
            self.last = event
            if event.mode == "train":
                self.losses.extend([] if event.loss is None else [event.loss])
                self.rates.extend([] if event.rate is None else [event.rate])
        else:
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
                while chunk := file.read(CHUNK):
                    text = self._rest + chunk
                    end = text.rfind(b"\n") + 1
                    self._rest, self._offset = text[end:], file.tell()
                    last = self._offset >= now.st_size - CHUNK
                    self._take(text[:end], skim=not last)
        except (OSError, UsageError) as error:
            raise unreadable(self._path, error) from error

    def _take(self, lines: bytes, *, skim: bool) -> None:
        """Take whole lines; where many follow, most are only counted (`skim`)."""
        if skim:
            self._reader.skim(lines)
        else:
            for line in lines.split(b"\n"):
                self._reader.feed(line)
        for run in self._reader.runs.values():
            state = self._states.setdefault(run.id, State(run))
            for entry in run.entries:
                state.add(entry)
            run.entries.clear()
        if self._reader.latest is not None:
            self.current = self._states[self._reader.latest.id]


class Followers:
    """Readers of the files of a log: one, or those of the ranks of a job."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._followers: dict[Path, Follower] = {}

    def read(self) -> list[State]:
        """Take the new lines; return the run that has written last, with the ranks of its job.

        Raises:
            UsageError: a file cannot be read; the error has one line.
        """
        for path in files_of(self._path):  # a rank can begin its file later
            self._followers.setdefault(path, Follower(path)).read()
        states = [each.current for each in self._followers.values() if each.current is not None]
        if not states:
            return []
        latest = max(states, key=lambda state: state.run.totals.time)
        job = latest.run.header.get("job", latest.run.id)
        found = [state for state in states if state.run.header.get("job", state.run.id) == job]
        return sorted(found, key=lambda state: str(state.run.header.get("rank", "")).zfill(9))
