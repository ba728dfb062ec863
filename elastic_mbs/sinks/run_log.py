"""The run log, written and read: one line of JSON per event, for people with `jq`, for `elastic-mbs report` and for `elastic-mbs watch`.

Schema 1. Every line is an object; a reader ignores fields that it does not know. A header opens
each run, when its first call begins:

    kind        "run"
    run         id of the run, 12 hexadecimal digits; each line of the run has it, so that runs can
    share a file, even at the same time schema      1
    time        unix seconds
    monotonic   the host's monotonic clock at that moment, in seconds
    pid, host   the process
    name        the runtime's name
    versions    {"elastic_mbs": …, "torch": …, "python": …, "cuda": … or null}
    device      "cpu", or "cuda:0 (NVIDIA H200)"
    settings    the arguments of `ElasticMBS` that are numbers and strings
    policy      the fields of `Policy`

It is written again whenever the file is opened again; the first one of a run counts. Then one line
per event:

    event       class name: "CallDone", "OutOfMemory", "Resized", …
    run         id of its run
    time        unix seconds
    t           seconds since the run's first header, by the monotonic clock. A `CallDone` has the
    time at which the call ended, which can be earlier
                than that of the line before it
    level       "DEBUG", "INFO" or "WARNING"
    …           the event's own fields, see `elastic_mbs.events`

Numbers that JSON does not have are the strings "NaN", "Infinity" and "-Infinity"; unknown values
are null. A line goes to the system in one write, so that a killed process leaves at most one torn
line, its last; the next run begins a new line, and readers pass over the torn one.
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
EMPTY = "there is no line of a run log in it: it was made by ElasticMBS(..., log=...), or it is empty so far"
_EVENTS = {
    kind.__name__: kind
    for kind in vars(events).values()
    if isinstance(kind, type) and issubclass(kind, Event)
}


class RunLog(GuardedSink):
    """A sink that adds each event to a file as one line of JSON.

    After an error each later event tries again.

    Args:
        path: the file; it is made when the first call begins, and added to when it exists.
        describe: gives the header's own fields; called once, when the first header is written.
    """

    _file: FileIO | None = None

    def __init__(
        self, path: str | os.PathLike[str], describe: Callable[[], Mapping[str, object]] = dict
    ) -> None:
        super().__init__()
        self.path = checked_path(path)
        # from the system's randomness: the user's streams stay where they are
        self.run = uuid.uuid4().hex[:12]
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
        if self._began is None:
            began = time.monotonic(), time.time()
            self._header = header_line(self.run, *began, self._describe())
            self._began = began
        if self._file is not None and os.fstat(self._file.fileno()).st_nlink == 0:
            self._end()  # deleted: lines would go nowhere
        if self._file is None:
            self._file = FileIO(self.path, "a+")
            if os.fstat(self._file.fileno()).st_size:
                self._file.seek(-1, os.SEEK_END)
                if self._file.read(1) != b"\n":
                    self._write(b"\n")  # a killed process has left half a line
            self._write(self._header)
        return self._began

    def _write(self, line: bytes) -> None:
        """Writes a line at once; where that fails, the next event opens the file again and begins a line of its own."""
        assert self._file is not None
        try:
            written = self._file.write(line)
            if written < len(line):
                raise OSError(f"{written} of {len(line)} bytes were written")
        except OSError:
            self._end()
            raise


def checked_path(path: str | os.PathLike[str]) -> Path:
    """The absolute path of a log (the run can change its folder); a UsageError where it cannot be one."""
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
        raise UsageError(
            f"log={os.fspath(path)!r} is {'a folder' if found.is_dir() else 'no ordinary file'}; "
            "name a file, such as 'run.jsonl'"
        )
    return found.absolute()


def header_line(run: str, monotonic: float, wall: float, about: Mapping[str, object]) -> bytes:
    """The header of a run that began at these two times, with fields of its own."""
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
    """An event that came `at` seconds after its run's header, and at the unix time `wall`."""
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
    """One event of a run log."""

    # None where this version of the package has no such event, or one with other fields
    event: Event | None
    t: float  # seconds since its run began
    record: Mapping[str, Any]  # the line's object


@dataclass
class Run:
    """One run of a run log."""

    id: str
    # its first one; empty where the file has none for it
    header: Mapping[str, Any] = field(default_factory=dict)
    entries: list[Entry] = field(default_factory=list)  # in the file's order


class Reader:
    """Puts the lines of a run log together to runs; lines can come one by one, as the file grows."""

    def __init__(self) -> None:
        self.runs: dict[str, Run] = {}  # by id, in the order in which they began

    def feed(self, line: bytes) -> Run | None:
        """Takes one line; returns its run, or None where it is not a whole line of a run log.

        A UsageError for an unknown schema.
        """
        try:
            record = json.loads(line)
            entry = (
                Entry(_decode(record), float(record["t"]), record) if "event" in record else None
            )
            name, schema = str(record["run"]), SCHEMA if entry is not None else record["schema"]
            float(record["time"])
        except (KeyError, TypeError, ValueError, RecursionError):
            # a killed process or a full disk has left it unfinished, or it is not ours
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
    """The runs of a log, of whose file these are the lines; a UsageError where there is none."""
    reader = Reader()
    for line in lines:
        reader.feed(line)
    if not reader.runs:
        raise UsageError(EMPTY)
    return list(reader.runs.values())


def read_log(path: Path) -> list[Run]:
    """The runs of a file; a UsageError of one line if it cannot be read."""
    try:
        with path.open("rb") as file:
            return read_runs(file)
    except (OSError, UsageError) as error:
        raise unreadable(path, error) from error


def unreadable(path: Path, error: OSError | UsageError) -> UsageError:
    return UsageError(f"{path}: {getattr(error, 'strerror', None) or error}")


def _decode(record: Mapping[str, Any]) -> Event | None:
    """The event, or None where this version has no such event, or one with other fields."""
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
        # an unknown name, another type, or a field without a default is missing
        return None


def _checked(value: Any, declared: str) -> Any:
    """A value of JSON as a field declared so ("int | None") holds it; a TypeError where it cannot."""
    if "float" in declared and value in ("NaN", "Infinity", "-Infinity"):
        return float(value)
    name = "None" if value is None else type(value).__name__
    if name not in declared.replace("float", "float | int").split(" | "):
        raise TypeError(f"{value!r} is not of type {declared}")
    return value
