"""Reading a run log: its lines, put together to runs. See `elastic_mbs.sinks.run_log` for the schema."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from elastic_mbs import events
from elastic_mbs.errors import UsageError
from elastic_mbs.events import Event
from elastic_mbs.sinks.run_log import SCHEMA

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
EMPTY = "there is no line of a run log in it: it was made by ElasticMBS(..., log=...), or it is empty so far"


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
        raise UsageError(EMPTY)
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
