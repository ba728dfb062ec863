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
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path

from elastic_mbs.errors import UsageError
from elastic_mbs.events import CallDone, ClosingSink, Event, logger

SCHEMA = 1


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
