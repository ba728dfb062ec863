"""The run log, read: the runs of a file, with exact sums and a bounded number of events.

A long log is thinned out while it is read: of each kind of event at most `MOST` are kept, evenly
over the run, and all lines count in the sums.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from elastic_mbs import events
from elastic_mbs.errors import UsageError
from elastic_mbs.events import CallDone, CallFailed, Event
from elastic_mbs.sinks.finished_calls import CallSums, Line, others, search
from elastic_mbs.sinks.run_log import SCHEMA

BLOCK = 1024**2  # bytes of lines that are read at once
MOST = 2048  # events of one kind that are kept of a run, at least half of it
EMPTY = (
    "there is no line of a run log in it: name a file that ElasticMBS(..., log=...) writes, and "
    "wait for its first call"
)
_SHORTEST, _LONGEST = 1e-9, 1e12  # seconds that a call may take; what lies outside is no time
_EVENTS = {
    kind.__name__: kind
    for kind in vars(events).values()
    if isinstance(kind, type) and issubclass(kind, Event)
}
_HEAD = re.compile(rb'\{"event":"(\w+)","run":"([^"\\]*)","time":')


@dataclass(frozen=True)
class Entry:
    """An event of a run log."""

    event: Event | None  # None where this version has no such event, or one with other fields
    t: float  # seconds since its run began
    record: Mapping[str, Any]  # object of the line


@dataclass
class Totals:
    """Sums over all lines of a run."""

    calls: int = 0  # that finished
    evaluations: int = 0  # of them
    samples: int = 0  # in them
    replayed: int = 0  # samples
    survived: int = 0  # failures in calls that finished
    seconds: float = 0.0  # of the calls that finished
    ended_seconds: float = 0.0  # of those that ended by an error, too
    lost: float = 0.0  # seconds of it in failed attempts
    peak: int | None = None  # most bytes of ours
    # micro-batch size by track, at the end of its last call; the track that ran last is the last
    sizes: dict[str, int] = field(default_factory=dict)
    modes: dict[str, str] = field(default_factory=dict)  # by track
    least: dict[str, int] = field(default_factory=dict)  # micro-batch size, by mode
    most: dict[str, int] = field(default_factory=dict)
    events: dict[str, int] = field(default_factory=dict)  # how many were parsed or counted, by name
    t: float = 0.0  # of the last line that was parsed, in seconds since the run began
    time: float = 0.0  # the same in unix seconds

    def add(self, entry: Entry) -> None:
        """Take an event."""
        event = plausible(entry.event)
        name = str(entry.record["event"])
        self.events[name] = self.events.get(name, 0) + 1
        self.t, self.time = max(self.t, entry.t), max(self.time, float(entry.record["time"]))
        if isinstance(event, CallDone):
            self.calls += 1
            self.evaluations += event.mode != "train"
            self.samples += event.samples
            self.replayed += event.replayed_samples
            self.survived += event.ooms
            self._sized(event.key, event.mode, event.micro_batch_size)
            self.seconds += event.seconds or 0.0
            self._memory_of(event.reserved, event.peak_allocated, event.peak_reserved)
        if isinstance(event, CallDone | CallFailed):
            self.ended_seconds += event.seconds or 0.0
            self.lost += event.seconds_lost

    def add_calls(self, calls: CallSums) -> None:
        """Take calls without failures."""
        self.calls += calls.number
        for (key, mode, samples, size), number in calls.facts.items():
            self.evaluations += number * (mode != "train")
            self.samples += number * samples
            self._sized(key, mode, size)
        seconds = calls.seconds
        if seconds and not (_is_plausible(min(seconds)) and _is_plausible(max(seconds))):
            seconds = list(filter(_is_plausible, seconds))
        took = sum(seconds)
        self.seconds += took
        self.ended_seconds += took
        self._memory_of(calls.peak)

    def _sized(self, key: str, mode: str, size: int) -> None:
        self.sizes.pop(key, None)
        self.sizes[key] = size
        self.modes[key] = mode
        self.least[mode] = min(size, self.least.get(mode, size))
        self.most[mode] = max(size, self.most.get(mode, size))

    def _memory_of(self, *figures: int | None) -> None:
        known = [each for each in (self.peak, *figures) if each is not None]
        self.peak = max(known, default=None)


@dataclass
class Run:
    """A run of a run log."""

    id: str
    header: Mapping[str, Any] = field(default_factory=dict)  # the first one; empty where none is
    entries: list[Entry] = field(default_factory=list)  # in the order of the file, thinned out
    totals: Totals = field(default_factory=Totals)
    # of each kind of event: one of so many is kept, and the line of the last one left out
    every: dict[str, int] = field(default_factory=dict)
    left_out: dict[str, bytes] = field(default_factory=dict)

    def count(self, name: str) -> int:
        """Return how many events of this name there were."""
        return self.totals.calls if name == "CallDone" else self.totals.events.get(name, 0)

    def before_next(self, name: str) -> int:
        """Return how many more events of this name come before the next one to be kept."""
        every = self.every.get(name, 1)
        return every - 1 - self.count(name) % every

    def thin_out(self) -> bool:
        """Keep the latest event or drop it; where many are kept, every other one is dropped.

        Returns:
            Whether it is kept.
        """
        name = str(self.entries[-1].record["event"])
        count, every = self.count(name), self.every.setdefault(name, 1)
        if count % every:
            self.entries.pop()
            return False
        if count // every >= MOST:
            self.every[name] = 2 * every
            self._drop_every_other(name)
        return True

    def _drop_every_other(self, name: str) -> None:
        kept, odd = list[Entry](), False
        for entry in self.entries:
            if entry.record["event"] == name:
                odd = not odd
                if not odd:
                    continue
            kept.append(entry)
        self.entries = kept


class Reader:
    """The runs of a log, put together from its lines as they come."""

    def __init__(self) -> None:
        self.runs: dict[str, Run] = {}  # by id, in the order in which they began
        self.latest: Run | None = None  # the one that has had the last line

    def feed(self, line: bytes) -> Run | None:
        """Take one line, and return its run; None where it is not a whole line of a run log.

        Raises:
            UsageError: the line is a header of an unknown schema.
        """
        try:
            record = json.loads(line)
            is_event = "event" in record
            entry = Entry(_decode(record), _time(record["t"]), record) if is_event else None
            name = str(record["run"])
            schema = SCHEMA if is_event else record["schema"]
            _time(record["time"])
        except (KeyError, TypeError, ValueError, RecursionError):
            # left unfinished by a killed process or a full disk, or not ours
            return None
        if schema != SCHEMA:
            raise UsageError(
                f"this log is of schema {schema!r}, and this elastic_mbs reads schema {SCHEMA}: "
                "use the version that wrote it"
            )
        run = self.latest = self.runs.setdefault(name, Run(name))
        if entry is not None:
            run.totals.add(entry)
            run.entries.append(entry)
        else:
            run.header = run.header or record
        return run

    def skim(self, lines: Sequence[bytes]) -> None:
        """Take lines: most of those of calls, and many of one event, only count in the sums."""
        for run, calls, _, line in self._parts(lines):
            if calls:
                run.totals.add_calls(CallSums.of(calls))
            if line and not self._counts(line, all_but_one=False):
                self.feed(line)

    def thin(self, lines: Sequence[bytes]) -> None:
        """Take lines: parse the ones that are to be kept, and only count the others."""
        for run, calls, theirs, line in self._parts(lines):
            begin = 0
            while begin < len(calls):
                due = begin + run.before_next("CallDone")
                if begin < due:
                    run.totals.add_calls(CallSums.of(calls[begin:due]))
                    run.left_out["CallDone"] = theirs[begin:due][-1]
                if due < len(calls):
                    self._keep(theirs[due])
                begin = due + 1
            if line and not self._counts(line, all_but_one=True):
                self._keep(line)

    def _parts(
        self, lines: Sequence[bytes]
    ) -> Iterator[tuple[Run, Sequence[Line], Sequence[bytes], bytes]]:
        """Yield lines of calls without failures in the latest run, and the other line after them.

        Each time it is the run, what was found in the lines, the lines, and the line after them,
        empty at the end.
        """
        begin = 0
        while self.latest is None and begin < len(lines):
            yield Run(""), (), (), lines[begin]
            begin += 1
        if self.latest is None or begin == len(lines):
            return
        run, lines = self.latest, lines[begin:]
        found, begin = search(run.id, lines), 0
        for at in others(found):
            yield run, found[begin:at], lines[begin:at], lines[at]
            begin = at + 1
        yield run, found[begin:], lines[begin:], b""

    def _counts(self, line: bytes, *, all_but_one: bool) -> bool:
        """Count a line where its event is one of very many; return whether it was.

        Args:
            line: the line.
            all_but_one: not where it is the next one to be kept.
        """
        head = _HEAD.match(line)
        run = None if head is None else self.runs.get(head[2].decode())
        if head is None or run is None:
            return False
        name = head[1].decode()
        if name in ("CallDone", "CallFailed") or run.totals.events.get(name, 0) < MOST:
            return False
        if all_but_one and not run.before_next(name):
            return False
        run.totals.events[name] += 1
        run.left_out[name] = line
        self.latest = run
        return True

    def _keep(self, line: bytes) -> None:
        """Parse a line, and keep its event where it is the next one to be kept."""
        run = self.feed(line)
        if run is not None and b'"event":' in line:
            name = str(run.entries[-1].record["event"])
            if run.thin_out():
                run.left_out.pop(name, None)
            else:
                run.left_out[name] = line


def read_runs(lines: Sequence[bytes]) -> list[Run]:
    """Return the runs of a log from the lines of its file; a UsageError where there is none."""
    return _runs_of([lines])


def read_log(path: Path) -> list[Run]:
    """Return the runs of a file; a UsageError of one line where it cannot be read."""
    try:
        with path.open("rb") as file:
            return _runs_of(iter(lambda: file.readlines(BLOCK), []))
    except (OSError, UsageError) as error:
        raise unreadable(path, error) from error


def _runs_of(blocks: Iterable[Sequence[bytes]]) -> list[Run]:
    reader = Reader()
    for lines in blocks:
        reader.thin(lines)
    if not reader.runs:
        raise UsageError(EMPTY)
    for run in reader.runs.values():  # the last one of each kind is kept, too
        for record in map(json.loads, run.left_out.values()):
            run.entries.append(Entry(_decode(record), _time(record["t"]), record))
            run.totals.t = max(run.totals.t, run.entries[-1].t)
    return list(reader.runs.values())


def files_of(path: Path) -> list[Path]:
    """Return the files of a log: itself where it is there, and those of the ranks of a job."""
    name = re.compile(rf"{re.escape(path.stem)}\.rank(\d+){re.escape(path.suffix)}")
    folder = path.parent.iterdir() if path.parent.is_dir() else ()
    ranks = {int(match[1]): each for each in folder if (match := name.fullmatch(each.name))}
    own = [path] if path.exists() else []
    return [*own, *(ranks[rank] for rank in sorted(ranks))] or [path]


def unreadable(path: Path, error: OSError | UsageError) -> UsageError:
    """Return the error, in one line, of a file that cannot be read."""
    return UsageError(f"{path}: {getattr(error, 'strerror', None) or error}")


def _time(value: Any) -> float:
    """Return a time in seconds; ValueError where it can be none."""
    seconds = float(value)
    if not -_LONGEST < seconds < _LONGEST:
        raise ValueError(f"{value!r} is no time")
    return seconds


def _decode(record: Mapping[str, Any]) -> Event | None:
    """Return the event; None where this version has no such event, or one with other fields."""
    try:
        kind: Any = _EVENTS[record["event"]]  # mypy takes a class for one without a hash
        values = {
            name: _checked(record[name], kinds)
            for name, kinds in _fields_of(kind)
            if name in record
        }
        event: Event = kind(**values)
    except (KeyError, TypeError):
        return None  # unknown name, other type, or a field without a default is missing
    return event


@functools.cache
def _fields_of(event: type[Event]) -> list[tuple[str, frozenset[str]]]:
    """Return the fields of a kind of event, with the names of the types that each can have."""
    return [
        (each.name, frozenset(str(each.type).replace("float", "float | int").split(" | ")))
        for each in fields(event)
    ]


def plausible(event: Event | None) -> Event | None:
    """Return the event without times of calls that cannot be right."""
    if not isinstance(event, CallDone | CallFailed):
        return event
    if event.seconds is not None and not _is_plausible(event.seconds):
        event = replace(event, seconds=0.0)
    return event if 0 <= event.seconds_lost < _LONGEST else replace(event, seconds_lost=0.0)


def _is_plausible(seconds: float) -> bool:
    return _SHORTEST < seconds < _LONGEST


def _checked(value: Any, kinds: frozenset[str]) -> Any:
    """Return a JSON value for a field that can have types of these names.

    Raises:
        TypeError: the field cannot hold it.
    """
    name = "None" if value is None else type(value).__name__
    if name == "str" and "float" in kinds and value in ("NaN", "Infinity", "-Infinity"):
        return float(value)
    if name not in kinds:
        raise TypeError(f"{value!r} is of another type than {sorted(kinds)}")
    if name == "int" and abs(value) >= 2**63:
        raise TypeError(f"{value!r} is out of range")
    return value
