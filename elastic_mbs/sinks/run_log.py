"""The run log: one line of JSON per event.

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
    job         in a job of several ranks, each of which writes a file of its own: the same word on
                all of them
    rank, ranks the number of this rank, and how many there are

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
from collections.abc import Callable, Mapping
from dataclasses import fields
from io import FileIO
from pathlib import Path

from elastic_mbs.error_bases import UsageError
from elastic_mbs.events import CallDone, Event, GuardedSink

SCHEMA = 1


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


def path_of_rank(path: str | os.PathLike[str], rank: object) -> Path:
    """Return the file of one rank: run.rank1.jsonl for run.jsonl."""
    whole = checked_path(path)
    return whole.with_name(f"{whole.stem}.rank{rank}{whole.suffix}")


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
    try:
        if not found.parent.is_dir():
            raise UsageError(
                f"log={os.fspath(path)!r}: there is no folder {str(found.parent)!r}; make it first"
            )
        if found.exists() and not found.is_file() and not found.is_char_device():
            kind = "a folder" if found.is_dir() else "no ordinary file"
            raise UsageError(f"log={os.fspath(path)!r} is {kind}; name a file, such as 'run.jsonl'")
    except OSError as error:  # a name that is too long, a folder that may not be entered
        raise UsageError(f"log={os.fspath(path)!r}: {error.strerror or error}") from error
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
