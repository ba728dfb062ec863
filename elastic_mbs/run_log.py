"""The run log: one line of JSON per event, for people with `jq`, for `elastic-mbs report` and for `elastic-mbs watch`.

Schema 1. Every line is an object, and fields that a reader does not know are to be left alone. A header opens each run, when its first
call begins:

    kind        "run"
    run         id of the run, 12 hexadecimal digits; each line of the run has it, so that runs may share a file, even at the same time
    schema      1
    time        unix seconds
    monotonic   the host's monotonic clock at that moment, in seconds
    pid, host   the process
    name        the runtime's name
    versions    {"elastic_mbs": …, "torch": …, "python": …, "cuda": … or null}
    device      "cpu", or "cuda:0 (NVIDIA H200)"
    settings    the arguments of `ElasticMBS` that are numbers and strings
    policy      the fields of `Policy`

It is written again whenever the file is opened again; the first one of a run counts. Then one line per event:

    event       class name: "CallDone", "OutOfMemory", "Resized", …
    run         id of its run
    time        unix seconds
    t           seconds since the run's first header, by the monotonic clock. A `CallDone` has the time at which the call ended, which may be earlier
                than that of the line before it
    level       "DEBUG", "INFO" or "WARNING"
    …           the event's own fields, see `elastic_mbs.events`

Numbers that JSON does not have are the strings "NaN", "Infinity" and "-Infinity"; what is not known is null.

A line goes to the system in one write, so that a process that is killed leaves at most one torn line, its last. Whoever adds to the file later begins
a new line, and readers pass over the torn one.
"""

from __future__ import annotations

import json
import logging
import math
import os
import platform
import stat
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import torch

from elastic_mbs import events
from elastic_mbs.errors import UsageError
from elastic_mbs.events import CallDone, ClosingSink, Event, logger
from elastic_mbs.policy import Policy
from elastic_mbs.settings import Settings

SCHEMA = 1
_BEGINNINGS = (b'{"kind":"run"', b'{"event":"')
_NOT_IN_JSON = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
_EVENTS = {kind.__name__: kind for kind in vars(events).values() if isinstance(kind, type) and issubclass(kind, Event)}
_TYPES: dict[str, tuple[type, ...]] = {
    "int": (int,),
    "int | None": (int, type(None)),
    "float": (int, float),
    "float | None": (int, float, type(None)),
    "str": (str,),
}


# ---------------------------------------------------------------------- writing


class RunLog(ClosingSink):
    """A sink that adds each event to a file as one line of JSON.

    Nothing that goes wrong with the file is raised: it is said once in the Python log, and each later event tries again. A forked child writes
    nothing: the run is its parent's.

    Args:
        path: the file; it is made when the first call begins, and added to when it exists.
        describe: gives the header's own fields; asked once, when the first header is written.
        clock: monotonic seconds, the clock of `CallDone.ended`.
        wall: unix seconds.

    Raises:
        UsageError: there is no folder to put the file in, or the path is no file's.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        describe: Callable[[], Mapping[str, object]] = dict,
        *,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self.path = checked_path(path)
        self.run = uuid.uuid4().hex[:12]  # from the system's randomness: the user's streams stay where they are
        self._describe = describe
        self._clock, self._wall = clock, wall
        self._began: tuple[float, float] | None = None  # both clocks, at the first header
        self._header = b""
        self._file: _File | None = None
        self._lock = threading.RLock()  # the monitor's thread has events, too
        self._warned = False
        self._pid = os.getpid()

    def begin(self) -> None:
        """Opens the file and writes the header, where that has not been done."""
        if self._file is None:
            self._guarded(self._open)

    def __call__(self, event: Event) -> None:
        """Writes one event."""
        self._guarded(lambda: self._write(event))

    def close(self) -> None:
        """Closes the file; the next event opens it again, as the same run."""
        if self._pid == os.getpid():
            with self._lock:
                self._close()

    def _guarded(self, work: Callable[[], object]) -> None:
        if self._pid != os.getpid():
            return
        with self._lock:
            try:
                work()
            except Exception as error:  # whatever it is, a step does not end for its log
                self._complain(f"{type(error).__name__}: {error}")
                self._close()

    def _open(self) -> tuple[_File, tuple[float, float]]:
        if self._began is None:
            began = self._clock(), self._wall()
            self._header = header_line(self.run, *began, self._describe())
            self._began = began
        if self._file is not None and self._file.vanished():
            self._complain("the file was deleted and is made anew, without what was in it")
            self._close()
        if self._file is None:
            self._file = _File(self.path)
            self._file.add(self._header)
        return self._file, self._began

    def _close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            file.close()

    def _write(self, event: Event) -> None:
        file, (began, began_wall) = self._open()
        at = (event.ended if isinstance(event, CallDone) else self._clock()) - began
        file.add(event_line(event, self.run, at, began_wall + at))

    def _complain(self, what: str) -> None:
        if not self._warned:
            self._warned = True
            logger.warning("the run log %s misses events, and training goes on: %s", self.path, what)


class _File:
    """A file that lines are added to, each in one write.

    Raises:
        OSError: it cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        torn = _is_torn(path)
        self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | getattr(os, "O_BINARY", 0) | getattr(os, "O_CLOEXEC", 0), 0o666)
        self.close = weakref.finalize(self, os.close, self._fd)
        if torn:
            self.add(b"\n")

    def add(self, line: bytes) -> None:
        """Writes a line.

        Raises:
            OSError: it could not be written, or not the whole of it.
        """
        written = os.write(self._fd, line)
        if written < len(line):
            raise OSError(f"{written} of {len(line)} bytes were written")

    def vanished(self) -> bool:
        """Whether the file has no name any more."""
        return os.fstat(self._fd).st_nlink == 0


def _is_torn(path: Path) -> bool:
    """Whether the file ends within a line."""
    try:
        if path.stat().st_size == 0:
            return False
        with path.open("rb") as file:
            file.seek(-1, os.SEEK_END)
            return file.read(1) != b"\n"
    except FileNotFoundError:
        return False
    except OSError:
        return True  # it cannot be looked into; an empty line does no harm


def checked_path(path: str | os.PathLike[str]) -> Path:
    """The absolute path of a log: the run may change its folder.

    Raises:
        UsageError: there is no folder to put the file in, or the path is no file's.
    """
    if not isinstance(path, str | os.PathLike) or not isinstance(os.fspath(path), str) or not os.fspath(path):
        raise UsageError(f"log={path!r} is no path: give the name of a file, such as 'run.jsonl'")
    found = Path(path)
    if not found.parent.is_dir():
        raise UsageError(f"log={os.fspath(path)!r}: there is no folder {str(found.parent)!r}; make it first")
    if found.exists() and not (stat.S_ISREG(mode := found.stat().st_mode) or stat.S_ISCHR(mode)):
        raise UsageError(f"log={os.fspath(path)!r} is {'a folder' if found.is_dir() else 'no ordinary file'}; name a file, such as 'run.jsonl'")
    return found.absolute()


def describe(settings: Settings, policy: Policy, devices: Callable[[], list[torch.device]]) -> dict[str, object]:
    """What a header tells of a runtime.

    Args:
        settings: those that are numbers and strings are told.
        policy: all of it is told.
        devices: gives the model's devices.
    """
    import elastic_mbs

    told = {item.name: getattr(settings, item.name) for item in fields(settings) if item.name != "name"}
    return {
        "name": settings.name,
        "versions": {
            "elastic_mbs": elastic_mbs.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
            "cuda": torch.version.cuda,
        },
        "device": _device_name(devices()[0]),
        "settings": {name: value for name, value in told.items() if value is None or isinstance(value, bool | int | float | str)},
        "policy": asdict(policy),
    }


def _device_name(device: torch.device) -> str:
    if device.type != "cuda":
        return str(device)
    try:  # cuda-only
        return f"{device} ({torch.cuda.get_device_name(device)})"
    except RuntimeError:  # cuda-only
        return str(device)


def header_line(run: str, monotonic: float, wall: float, about: Mapping[str, object]) -> bytes:
    """The header of a run that began at these two times, with fields of its own."""
    return _line(
        {"kind": "run", "run": run, "schema": SCHEMA, "time": wall, "monotonic": monotonic, "pid": os.getpid(), "host": platform.node(), **about}
    )


def event_line(event: Event, run: str, at: float, wall: float) -> bytes:
    """An event that came `at` seconds after its run's header, and at the unix time `wall`."""
    head = {"event": type(event).__name__, "run": run, "time": wall, "t": at, "level": logging.getLevelName(event.level)}
    return _line(head | {item.name: getattr(event, item.name) for item in fields(event)})


def _line(record: Mapping[str, object]) -> bytes:
    record = {key: _in_json(value) if isinstance(value, float) else value for key, value in record.items()}
    return json.dumps(record, separators=(",", ":"), default=str).encode() + b"\n"


def _in_json(value: float) -> float | str:
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


# ---------------------------------------------------------------------- reading


@dataclass(frozen=True)
class Entry:
    """One event of a run log.

    Attributes:
        event: the event, or None where this version of the package does not know it, or does not know it so.
        t: seconds since its run began.
        record: the line as it stands in the file.
    """

    event: Event | None
    t: float
    record: Mapping[str, Any]


@dataclass
class Run:
    """One run of a run log.

    Attributes:
        id: as each of its lines has it.
        header: its first header; empty where the file has none for it.
        entries: its events, in the file's order.
    """

    id: str
    header: Mapping[str, Any] = field(default_factory=dict)
    entries: list[Entry] = field(default_factory=list)


class Reader:
    """Puts the lines of a run log together to runs; lines may come one by one, as the file grows.

    Attributes:
        runs: by id, in the order in which they began.
        torn: lines that a killed process or a full disk has left unfinished; they are passed over.
    """

    def __init__(self) -> None:
        self.runs: dict[str, Run] = {}
        self.torn = 0
        self._number = 0

    def feed(self, line: bytes) -> Run | None:
        """Takes one line.

        Returns:
            The run that it belongs to, or None for an empty or a torn one.

        Raises:
            UsageError: the line is none of a run log's, or of a schema that this version does not know.
        """
        self._number += 1
        line = line.strip()
        if not line:
            return None
        record = _parse(line)
        if record is None:
            if not any(line.startswith(beginning) or beginning.startswith(line) for beginning in _BEGINNINGS):
                raise UsageError(f"line {self._number} is none of a run log of ElasticMBS(..., log=...): {_excerpt(line)}")
            self.torn += 1
            return None
        run = self.runs.setdefault(record["run"], Run(record["run"]))
        if "event" in record:
            run.entries.append(Entry(_decode(record), float(record["t"]), record))
            return run
        if record["schema"] != SCHEMA:
            raise UsageError(
                f"line {self._number} is of schema {record['schema']!r}, and this elastic_mbs reads schema {SCHEMA}: use the version that wrote it"
            )
        run.header = run.header or record
        return run


def read_runs(lines: Iterable[bytes]) -> list[Run]:
    """The runs of a log.

    Args:
        lines: of the file, such as the file itself, opened in binary mode.

    Raises:
        UsageError: a line is none of a run log's, or there is none at all.
    """
    reader = Reader()
    for line in lines:
        reader.feed(line)
    if not reader.runs:
        raise UsageError("there is no line of a run log in it: it was made by ElasticMBS(..., log=...), or it is empty so far")
    return list(reader.runs.values())


def _parse(line: bytes) -> dict[str, Any] | None:
    """The line's object, or None where it is not whole or lacks what each line has."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(record, dict) or not isinstance(record.get("run"), str) or not _is_number(record.get("time")):
        return None
    if isinstance(record.get("event"), str):
        return record if _is_number(record.get("t")) else None
    return record if record.get("kind") == "run" and "event" not in record and "schema" in record else None


def _decode(record: Mapping[str, Any]) -> Event | None:
    kind = _EVENTS.get(record["event"])
    if kind is None:
        return None
    values: dict[str, Any] = {}
    for item in fields(kind):
        if item.name not in record:
            continue
        value, allowed = record[item.name], _TYPES[str(item.type)]
        if float in allowed and isinstance(value, str):
            value = _NOT_IN_JSON.get(value, value)
        if not isinstance(value, allowed) or isinstance(value, bool) or (isinstance(value, int) and abs(value) >= 2**63):
            return None
        values[item.name] = value
    try:
        return kind(**values)
    except TypeError:  # a field without a default is missing
        return None


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e15


def _excerpt(line: bytes) -> str:
    text = line[:60].decode("utf-8", "replace")
    return repr(text) if len(line) <= 60 else f"{text!r} …"


def open_lines(path: str | os.PathLike[str]) -> Iterator[bytes]:
    """The lines of a file.

    Raises:
        UsageError: it cannot be read; the message is one line.
    """
    try:
        with open(path, "rb") as file:
            yield from file
    except OSError as error:
        raise UsageError(f"{os.fspath(path)}: {error.strerror or error}") from error
