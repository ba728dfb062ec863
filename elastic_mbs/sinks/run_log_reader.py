"""Reads a run log: its lines, put together to runs. See `elastic_mbs.sinks.run_log` for the schema."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from elastic_mbs import events
from elastic_mbs.errors import UsageError
from elastic_mbs.events import Event
from elastic_mbs.sinks.run_log import SCHEMA

_BEGINNINGS = (b'{"kind":"run"', b'{"event":"')
_EVENTS = {kind.__name__: kind for kind in vars(events).values() if isinstance(kind, type) and issubclass(kind, Event)}
EMPTY = "there is no line of a run log in it: it was made by ElasticMBS(..., log=...), or it is empty so far"


@dataclass(frozen=True)
class Entry:
    """One event of a run log."""

    event: Event | None  # None where this version of the package has no such event, or one with other fields
    t: float  # seconds since its run began
    record: Mapping[str, Any]  # the line's object


@dataclass
class Run:
    """One run of a run log."""

    id: str
    header: Mapping[str, Any] = field(default_factory=dict)  # its first one; empty where the file has none for it
    entries: list[Entry] = field(default_factory=list)  # in the file's order


class Reader:
    """Puts the lines of a run log together to runs; lines can come one by one, as the file grows."""

    def __init__(self) -> None:
        self.runs: dict[str, Run] = {}  # by id, in the order in which they began
        self._number = 0

    def feed(self, line: bytes) -> Run | None:
        """Takes one line; returns its run, or None for an empty one, or one that a killed process or a full disk has left unfinished.

        Raises:
            UsageError: it is not of a run log, or of an unknown schema.
        """
        self._number += 1
        line = line.strip()
        record = _parse(line)
        if record is None:
            if not any(line.startswith(beginning) or beginning.startswith(line) for beginning in _BEGINNINGS):
                text = line[:60].decode("utf-8", "replace")
                raise UsageError(f"line {self._number} is none of a run log of ElasticMBS(..., log=...): {text!r}")
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


def _parse(line: bytes) -> dict[str, Any] | None:
    """The line's object, or None where it is not whole or lacks what each line has."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(record, dict) or not isinstance(record.get("run"), str):
        return None
    header = "event" not in record and record.get("kind") == "run" and "schema" in record
    times: list[Any] = [record.get("time"), 0 if header else record.get("t")]
    whole = header or isinstance(record.get("event"), str)
    return record if whole and all(type(at) in {int, float} and abs(at) < 1e15 for at in times) else None


def _decode(record: Mapping[str, Any]) -> Event | None:
    """The event, or None where this version has no such event, or one with other fields."""
    try:
        kind = _EVENTS[record["event"]]
        return kind(**{item.name: _checked(record[item.name], str(item.type)) for item in fields(kind) if item.name in record})
    except (KeyError, TypeError):  # an unknown name, another type, or a field without a default is missing
        return None


def _checked(value: Any, declared: str) -> Any:
    """A value of JSON as a field declared so ("int | None") holds it; a TypeError where it cannot."""
    if "float" in declared and value in ("NaN", "Infinity", "-Infinity"):
        return float(value)
    name = "None" if value is None else type(value).__name__
    if name not in declared.replace("float", "float | int").split(" | ") or (name == "int" and abs(value) >= 2**63):
        raise TypeError(f"{value!r} is not of type {declared}")
    return value
