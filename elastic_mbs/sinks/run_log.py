"""The run log, written and read: one line of JSON per event.

It is made for people with `jq`, for `elastic-mbs report` and for `elastic-mbs watch`.

Schema 1. Every line is an object; a reader ignores fields that it does not know. A header opens
each run, when its first call begins:

    kind        "run"
    run         id of the run, 12 hexadecimal digits. Each line of the run has it, so that several
                runs can share a file, even at the same time
    schema      1
    time        unix seconds
    monotonic   the host's monotonic clock at that moment, in seconds
    pid, host   of the process
    name        of the runtime
    versions    {"elastic_mbs": …, "torch": …, "python": …, "cuda": … or null}
    device      "cpu", or "cuda:0 (NVIDIA H200)"
    settings    the arguments of `ElasticMBS` that are numbers and strings
    policy      the fields of `Policy`

The header is written again whenever the file is opened again; the first one of a run counts. Then
comes one line per event:

    event       class name: "CallDone", "OutOfMemory", "Resized", …
    run         id of its run
    time        unix seconds
    t           seconds since the run's first header, by the monotonic clock. For a `CallDone` it is
                the end of the call, which can be earlier than the line before
    level       "DEBUG", "INFO" or "WARNING"
    …           the event's own fields, see `elastic_mbs.events`

Numbers that JSON does not have are the strings "NaN", "Infinity" and "-Infinity"; unknown values
are null. A line goes to the system in one write, so a killed process leaves at most one torn line,
its last. The next run begins a new line, and readers pass over the torn one.
"""

from __future__ import annotations

import json
import logging
import math
import os
import platform
import time
import uuid
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from io import FileIO
from pathlib import Path
from typing import Any

from elastic_mbs import events
from elastic_mbs.errors import UsageError
from elastic_mbs.events import CallDone, Event, GuardedSink

SCHEMA = 1
EMPTY = (
    "there is no line of a run log in it: name a file that ElasticMBS(..., log=...) writes, and "
    "wait for its first call"
)
_EVENTS = {
    kind.__name__: kind
    for kind in vars(events).values()
    if isinstance(kind, type) and issubclass(kind, Event)
}


class RunLog(GuardedSink):
    """A sink that adds each event to a file as one line of JSON.

    After an error, each later event tries to write again.

    Args:
        path: the file. It is made when the first call begins; where it exists, lines are added.
        describe: returns further fields of the header; called once, for the first header.
    """

    _file: FileIO | None = None

    def __init__(
        self, path: str | os.PathLike[str], describe: Callable[[], Mapping[str, object]] = dict
    ) -> None:
        super().__init__()
        self.path = checked_path(path)
        self.run = uuid.uuid4().hex[:12]  # from the system: the user's random streams stay put
        self._describe = describe
        self._began: tuple[float, float] | None = None  # both clocks, at the first header
        self._header = b""

    def __repr__(self) -> str:
        return f"the run log {self.path}"

    def __del__(self) -> None:
        self._end()

    def _take(self, event: Event) -> None:
        began, began_wall = self._begin()
        at = (event.ended if isinstance(event, CallDone) else time.monotonic()) - began
        self._write(event_line(event, self.run, at, began_wall + at))

    def _end(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            file.close()

    def _begin(self) -> tuple[float, float]:
        """Open the file where it is closed; return both clocks at the run's first header."""
        if self._began is None:
            began = time.monotonic(), time.time()
            self._header = header_line(self.run, *began, self._describe())
            self._began = began
        if self._file is not None and os.fstat(self._file.fileno()).st_nlink == 0:
            self._end()  # the file was deleted: lines would go nowhere
        if self._file is None:
            self._open()
        return self._began

    def _open(self) -> None:
        self._file = FileIO(self.path, "a+")
        if os.fstat(self._file.fileno()).st_size:
            self._file.seek(-1, os.SEEK_END)
            if self._file.read(1) != b"\n":
                self._write(b"\n")  # a killed process has left half a line
        self._write(self._header)

    def _write(self, line: bytes) -> None:
        """Write a line at once; after an error the next event opens the file again."""
        assert self._file is not None
        try:
            written = self._file.write(line)
            if written < len(line):
                raise OSError(f"{written} of {len(line)} bytes were written")
        except OSError:
            self._end()
            raise


def checked_path(path: str | os.PathLike[str]) -> Path:
    """Return the absolute path of a log; raise a UsageError where no log can be.

    Absolute, because a run can change its working folder.
    """
    if (
        not isinstance(path, str | os.PathLike)
        or not isinstance(os.fspath(path), str)
        or not os.fspath(path)
    ):
        raise UsageError(f"log={path!r} is no path: give the name of a file, such as 'run.jsonl'")
    found = Path(path)
    if not found.parent.is_dir():
        raise UsageError(
            f"log={os.fspath(path)!r}: there is no folder {str(found.parent)!r}; make it first"
        )
    if found.exists() and not found.is_file() and not found.is_char_device():
        kind = "a folder" if found.is_dir() else "no ordinary file"
        raise UsageError(f"log={os.fspath(path)!r} is {kind}; name a file, such as 'run.jsonl'")
    return found.absolute()


def header_line(run: str, monotonic: float, wall: float, about: Mapping[str, object]) -> bytes:
    """Return the header of a run that began at these two times, with further fields."""
    return _line(
        {
            "kind": "run",
            "run": run,
            "schema": SCHEMA,
            "time": wall,
            "monotonic": monotonic,
            "pid": os.getpid(),
            "host": platform.node(),
            **about,
        }
    )


def event_line(event: Event, run: str, at: float, wall: float) -> bytes:
    """Return the line of an event, `at` seconds after its run's header and at unix time `wall`."""
    head = {
        "event": type(event).__name__,
        "run": run,
        "time": wall,
        "t": at,
        "level": logging.getLevelName(event.level),
    }
    return _line(head | {item.name: getattr(event, item.name) for item in fields(event)})


def _line(record: Mapping[str, object]) -> bytes:
    finite = {
        key: str(json.dumps(value))
        if isinstance(value, float) and not math.isfinite(value)
        else value
        for key, value in record.items()
    }
    return json.dumps(finite, separators=(",", ":")).encode() + b"\n"


# ---------------------------------------------------------------------- reading


@dataclass(frozen=True)
class Entry:
    """An event of a run log."""

    event: Event | None  # None where this version has no such event, or one with other fields
    t: float  # seconds since its run began
    record: Mapping[str, Any]  # object of the line


@dataclass
class Run:
    """A run of a run log."""

    id: str
    header: Mapping[str, Any] = field(default_factory=dict)  # the first one; empty where none is
    entries: list[Entry] = field(default_factory=list)  # in the order of the file


class Reader:
    """The runs of a log, put together from its lines as they come."""

    def __init__(self) -> None:
        self.runs: dict[str, Run] = {}  # by id, in the order in which they began

    def feed(self, line: bytes) -> Run | None:
        """Take one line, and return its run; None where it is not a whole line of a run log.

        Raises:
            UsageError: the line is a header of an unknown schema.
        """
        try:
            record = json.loads(line)
            is_event = "event" in record
            entry = Entry(_decode(record), float(record["t"]), record) if is_event else None
            name = str(record["run"])
            schema = SCHEMA if is_event else record["schema"]
            float(record["time"])
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
            run.entries.append(entry)
        else:
            run.header = run.header or record
        return run


def read_runs(lines: Iterable[bytes]) -> list[Run]:
    """Return the runs of a log from the lines of its file; a UsageError where there is none."""
    reader = Reader()
    for line in lines:
        reader.feed(line)
    if not reader.runs:
        raise UsageError(EMPTY)
    return list(reader.runs.values())


def read_log(path: Path) -> list[Run]:
    """Return the runs of a file; a UsageError of one line where it cannot be read."""
    try:
        with path.open("rb") as file:
            return read_runs(file)
    except (OSError, UsageError) as error:
        raise unreadable(path, error) from error


def unreadable(path: Path, error: OSError | UsageError) -> UsageError:
    """Return the error, in one line, of a file that cannot be read."""
    return UsageError(f"{path}: {getattr(error, 'strerror', None) or error}")


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
    return value
