"""The run log, read: the runs of a file, with exact sums and a bounded number of events.

A long log is thinned out while it is read: of each kind of event at most `MOST` are kept, evenly
over the run, and all lines count in the sums.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from elastic_mbs import events
from elastic_mbs.errors import UsageError
from elastic_mbs.events import CallDone, CallFailed, Event
from elastic_mbs.sinks.run_log import SCHEMA

MOST = 4096  # events of one kind that are kept of a run, at least half of it
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
# The facts of a call without failures, as this version writes them.
_FACTS = re.compile(
    rb',"key":("(?:[^"\\]|\\.)*"),"mode":"(\w+)","samples":(\d+),"pieces":\d+,"size_before":\d+,'
    rb'"micro_batch_size":(\d+),"ooms":0,"replayed_samples":0'
)
_LOST_NONE = b',"seconds_lost":0.0,"loss":'


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
    # of the last call that was skimmed
    _facts: bytes = b""
    _memory: bytes = b""
    _samples: int = 0
    _is_evaluation: bool = False

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
            self._facts = b""  # a call that is skimmed after this one sets its size anew
            self._sized(event.key, event.mode, event.micro_batch_size)
            self.seconds += event.seconds or 0.0
            self._memory_of(event.reserved, event.peak_allocated, event.peak_reserved)
        if isinstance(event, CallDone | CallFailed):
            self.ended_seconds += event.seconds or 0.0
            self.lost += event.seconds_lost

    def skim(self, line: bytes) -> bool:
        """Take the line of a call without failures; return False where it has to be parsed.

        Nothing is parsed but what differs from the call before: that would take ten times longer.
        """
        key = line.find(b',"key":')
        seconds = line.find(b',"seconds":', key)
        lost = line.find(b",", seconds + 1)
        if min(key, seconds, lost) < 0 or not line.startswith(_LOST_NONE, lost):
            return False
        memory = line.find(b',"reserved":', lost)
        free = line.find(b',"free":', memory)
        if min(memory, free) < 0 or not line.endswith((b"}", b"}\n")):
            return False
        try:
            took = float(line[seconds + 11 : lost])
            if line[key:seconds] != self._facts and not self._turn_to(line[key:seconds]):
                return False
            if line[memory:free] != self._memory:
                self._memory_of(*json.loads(b"{%b}" % line[memory + 1 : free]).values())
                self._memory = line[memory:free]
        except (TypeError, ValueError):
            return False
        self.calls += 1
        self.evaluations += self._is_evaluation
        self.samples += self._samples
        if _SHORTEST < took < _LONGEST:
            self.seconds += took
            self.ended_seconds += took
        return True

    def _turn_to(self, facts: bytes) -> bool:
        """Take the facts of the calls to come; return False where they cannot be read."""
        found = _FACTS.fullmatch(facts)
        if found is None:
            return False
        key, mode, samples, size = found.groups()
        self._facts, self._samples, self._is_evaluation = facts, int(samples), mode != b"train"
        self._sized(json.loads(key), mode.decode(), int(size))
        return True

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
        self._latest: tuple[bytes, Run] = b"\n", Run("")  # how lines of its calls begin

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
        run = self.runs.setdefault(name, Run(name))
        if entry is not None:
            run.totals.add(entry)
            run.entries.append(entry)
        else:
            run.header = run.header or record
        return run

    def skim(self, line: bytes) -> Run | None:
        """Count a line in the sums alone, and return its run; None where it has to be fed."""
        begins, run = self._latest
        if line.startswith(begins):
            return run if run.totals.skim(line) else None
        head = _HEAD.match(line)
        found = None if head is None else self.runs.get(head[2].decode())
        if head is None or found is None:
            return None
        if head[1] == b"CallDone":
            self._latest = head[0], found
            return found if found.totals.skim(line) else None
        name = head[1].decode()
        if name == "CallFailed" or found.totals.events.get(name, 0) < MOST:
            return None  # they are few, and worth a look
        found.totals.events[name] += 1
        return found

    def thin(self, line: bytes) -> None:
        """Take one line: parse it where it is to be kept, and only count it where it is not."""
        run = self._due(line)
        if run is not None and self.skim(line) is run:
            run.left_out[_kind(line)] = line
            return
        run = self.feed(line)
        if run is not None and b'"event":' in line and run.thin_out():
            run.left_out.pop(_kind(line), None)

    def _due(self, line: bytes) -> Run | None:
        """Return the run of a line that is not to be kept; None where it is."""
        begins, run = self._latest
        kind = "CallDone"
        if not line.startswith(begins):
            head = _HEAD.match(line)
            found = None if head is None else self.runs.get(head[2].decode())
            if head is None or found is None:
                return None
            run, kind = found, head[1].decode()
        return run if (run.count(kind) + 1) % run.every.get(kind, 1) else None


def _kind(line: bytes) -> str:
    """Return the name of the event in a line that this version has written."""
    head = _HEAD.match(line)
    return "" if head is None else head[1].decode()


def read_runs(lines: Iterable[bytes]) -> list[Run]:
    """Return the runs of a log from the lines of its file; a UsageError where there is none."""
    reader = Reader()
    for line in lines:
        reader.thin(line)
    if not reader.runs:
        raise UsageError(EMPTY)
    for run in reader.runs.values():  # the last one of each kind is kept, too
        for record in map(json.loads, run.left_out.values()):
            run.entries.append(Entry(_decode(record), _time(record["t"]), record))
            run.totals.t = max(run.totals.t, run.entries[-1].t)
    return list(reader.runs.values())


def read_log(path: Path) -> list[Run]:
    """Return the runs of a file; a UsageError of one line where it cannot be read."""
    try:
        with path.open("rb") as file:
            return read_runs(file)
    except (OSError, UsageError) as error:
        raise unreadable(path, error) from error


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
        kind = _EVENTS[record["event"]]
        return kind(
            **{
                item.name: _checked(record[item.name], str(item.type))
                for item in fields(kind)
                if item.name in record
            }
        )
    except (KeyError, TypeError):
        return None  # unknown name, other type, or a field without a default is missing


def plausible(event: Event | None) -> Event | None:
    """Return the event without times of calls that cannot be right."""
    if not isinstance(event, CallDone | CallFailed):
        return event
    if event.seconds is not None and not _SHORTEST < event.seconds < _LONGEST:
        event = replace(event, seconds=0.0)
    return event if 0 <= event.seconds_lost < _LONGEST else replace(event, seconds_lost=0.0)


def _checked(value: Any, declared: str) -> Any:
    """Return a JSON value for a field of a declared type, such as "int | None".

    Raises:
        TypeError: the field cannot hold it.
    """
    if "float" in declared and value in ("NaN", "Infinity", "-Infinity"):
        return float(value)
    name = "None" if value is None else type(value).__name__
    if name not in declared.replace("float", "float | int").split(" | "):
        raise TypeError(f"{value!r} is not of type {declared}")
    if name == "int" and abs(value) >= 2**63:
        raise TypeError(f"{value!r} is out of range")
    return value
