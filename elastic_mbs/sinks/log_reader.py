"""The run log, read: the runs of a file, with exact sums and a bounded number of events.

A long log is thinned out while it is read: of each kind of event at most `MOST` are kept, evenly
over the run, and all lines count in the sums.
"""

from __future__ import annotations

import contextlib
import functools
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import elastic_mbs.events
from elastic_mbs.error_bases import UsageError
from elastic_mbs.events import CallDone, CallFailed, Event
from elastic_mbs.sinks.finished_calls import CallSums, Line, may_be_call, other, search
from elastic_mbs.sinks.run_log import SCHEMA

# Bytes of lines that are read at once. Larger ones cost a fault for each page: malloc takes them
# from the system and gives them back, each time.
BLOCK = 64 * 1024
MOST = 2048  # events of one kind that are kept of a run, at least half of it
EMPTY = (
    "there is no line of a run log in it: name a file that ElasticMBS(..., log=...) writes, and "
    "wait for its first call"
)
_SHORTEST, _LONGEST = 1e-9, 1e12  # seconds that a call may take; what lies outside is no time
_EVENTS = {
    kind.__name__: kind
    for kind in vars(elastic_mbs.events).values()
    if isinstance(kind, type) and issubclass(kind, Event)
}
_HEAD = re.compile(rb'\{"event":"(\w+)","run":"([ !#-\[\]-~]*)","time":')
# What it raises to read a line that a killed process or a full disk left unfinished, or not ours.
_UNREADABLE = (KeyError, TypeError, ValueError, OverflowError, RecursionError)


@dataclass(frozen=True)
class Entry:
    """An event of a run log."""

    event: Event | None  # None where this version has no such event, or one with other fields
    t: float  # seconds since its run began
    record: Mapping[str, Any]  # object of the line

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> Entry:
        """Return the entry of a line's object."""
        return cls(_decode(record), _time(record["t"]), record)


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

    def note(self, entry: Entry) -> None:
        """Take an event's name and times."""
        name = str(entry.record["event"])
        self.events[name] = self.events.get(name, 0) + 1
        self.t, self.time = max(self.t, entry.t), max(self.time, float(entry.record["time"]))

    def add(self, entry: Entry) -> None:
        """Take an event."""
        self.note(entry)
        event = plausible(entry.event)
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
        """Take finished calls, but for their number."""
        for facts, number in calls.facts.items():
            self.evaluations += number * (facts.mode != "train")
            self.samples += number * facts.samples
            self.replayed += number * facts.replayed
            self.survived += number * facts.ooms
            self._sized(facts.key, facts.mode, facts.size)
        seconds = calls.seconds
        if seconds and not (_is_plausible(min(seconds)) and _is_plausible(max(seconds))):
            seconds = list(filter(_is_plausible, seconds))
        took = sum(seconds)
        self.seconds += took
        self.ended_seconds += took
        self.lost += sum(lost * number for lost, number in calls.lost if _can_be_lost(lost))
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
        run, entry = self._take(line)
        if run is not None and entry is not None:
            run.entries.append(entry)
        return run

    def _take(self, line: bytes) -> tuple[Run | None, Entry | None]:
        """Count one line, and return its run and its event, where it has them."""
        try:
            record = json.loads(line)
            is_event = "event" in record
            entry = Entry.of(record) if is_event else None
            name = str(record["run"])
            schema = SCHEMA if is_event else record["schema"]
            _time(record["time"])
        except _UNREADABLE:
            return None, None
        if schema != SCHEMA:
            raise UsageError(
                f"this log is of schema {schema!r}, and this elastic_mbs reads schema {SCHEMA}: "
                "use the version that wrote it"
            )
        run = self.latest = self.runs.setdefault(name, Run(name))
        if entry is not None:
            run.totals.add(entry)
        else:
            run.header = run.header or record
        return run, entry

    def skim(self, text: bytes) -> None:
        """Take lines: most of those of calls, and many of one event, only count in the sums."""
        for run, lines, others in self._stretches(text):
            run.totals.calls += len(lines) - len(others)
            for at in others:
                if not self._counts(lines[at][0], all_but_one=False):
                    self.feed(lines[at][0])

    def thin(self, text: bytes) -> None:
        """Take lines: parse the ones that are to be kept, and only count the others."""
        for run, lines, others in self._stretches(text):
            begin = 0
            for at in others:
                self._thin_calls(run, lines[begin:at])
                line, begin = lines[at][0], at + 1
                if not self._counts(line, all_but_one=True):
                    self._keep(line)
            self._thin_calls(run, lines[begin:])

    def _thin_calls(self, run: Run, calls: Sequence[Line]) -> None:
        """Keep the calls that are the next ones to be kept, and count all of them."""
        begin = 0
        while begin < len(calls):
            due = min(begin + run.before_next("CallDone"), len(calls))
            if begin < due:
                run.totals.calls += due - begin
                run.left_out["CallDone"] = calls[due - 1][0]
            if due < len(calls):
                record = json.loads(calls[due][0])
                entry = Entry(None, _time(record["t"]), record)  # decoded if it stays to the end
                run.totals.calls += 1
                run.totals.note(entry)
                self._keep_entry(run, entry, calls[due][0])
            begin = due + 1

    def _stretches(self, text: bytes) -> Iterator[tuple[Run, Sequence[Line], Sequence[int]]]:
        """Yield stretches of lines, each with the places of lines that are no calls.

        The calls are of the latest run, and in its sums already. A stretch ends with the next line
        that has to be read before the sums of calls after it.
        """
        begin = 0
        while self.latest is None and begin < len(text):
            end = text.find(b"\n", begin) + 1 or len(text)
            yield Run(""), [other(text[begin:end])], [0]
            begin = end
        if self.latest is None or begin == len(text):
            return
        run, lines = self.latest, search(self.latest.id, text[begin:])
        begin, others = 0, list[int]()
        for at in [i for i, line in enumerate(lines) if not line[1]]:
            others.append(at - begin)
            if may_be_call(lines[at][0]):
                yield _counted(run, lines[begin : at + 1], others)
                begin, others = at + 1, []
        yield _counted(run, lines[begin:], others)

    def _counts(self, line: bytes, *, all_but_one: bool) -> bool:
        """Count a line where its event is one of very many; return whether it was.

        Args:
            line: the line.
            all_but_one: not where it is the next one to be kept.
        """
        head = _HEAD.match(line)
        run = None if head is None else self.runs.get(head[2].decode())
        if head is None or run is None or not line.endswith((b"}", b"}\n")):
            return False  # of another form, or torn
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
        run, entry = self._take(line)
        if run is not None and entry is not None:
            self._keep_entry(run, entry, line)

    def _keep_entry(self, run: Run, entry: Entry, line: bytes) -> None:
        """Keep an event that has been counted where it is the next one to be kept."""
        name = str(entry.record["event"])
        self.latest = run
        run.entries.append(entry)
        if run.thin_out():
            run.left_out.pop(name, None)
        else:
            run.left_out[name] = line


def _counted(
    run: Run, lines: Sequence[Line], others: Sequence[int]
) -> tuple[Run, Sequence[Line], Sequence[int]]:
    """Return a stretch of lines, the calls among which have been added to the run's sums."""
    calls = [line for line in lines if line[1]] if others else lines
    if not calls:
        return run, lines, others
    try:
        run.totals.add_calls(CallSums.of(calls))
    except (ValueError, RecursionError):  # each line is left to JSON
        lines = [other(part) for line in lines for part in line[0].split(b"\n")]
        return run, lines, range(len(lines))
    return run, lines, others


def read_runs(lines: Sequence[bytes]) -> list[Run]:
    """Return the runs of a log from the lines of its file; a UsageError where there is none."""
    return _runs_of([b"\n".join(line.removesuffix(b"\n") for line in lines)])


def read_log(path: Path) -> list[Run]:
    """Return the runs of a file; a UsageError of one line where it cannot be read."""
    try:
        with path.open("rb") as file:
            return _runs_of(iter(lambda: file.read(BLOCK) + file.readline(), b""))
    except (OSError, UsageError) as error:
        raise unreadable(path, error) from error


def _runs_of(blocks: Iterable[bytes]) -> list[Run]:
    reader = Reader()
    for text in blocks:
        reader.thin(text)
    if not reader.runs:
        raise UsageError(EMPTY)
    for run in reader.runs.values():
        run.entries = [
            Entry.of(entry.record) if entry.event is None else entry for entry in run.entries
        ]
        for line in run.left_out.values():  # the last one of each kind is kept, too
            with contextlib.suppress(*_UNREADABLE):  # only counted
                run.entries.append(Entry.of(json.loads(line)))
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
    return event if _can_be_lost(event.seconds_lost) else replace(event, seconds_lost=0.0)


def _is_plausible(seconds: float) -> bool:
    return _SHORTEST < seconds < _LONGEST


def _can_be_lost(seconds: float) -> bool:
    return 0 <= seconds < _LONGEST


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
