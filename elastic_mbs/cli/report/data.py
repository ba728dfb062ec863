"""The content of a report: the points of its lines, marks, and the figures at its head.

`svg.py` puts lines into lanes and says how they look.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

from elastic_mbs.cli.report.scale import Point, duration
from elastic_mbs.events import (
    CallDone,
    CallFailed,
    Event,
    OptimizerOutOfMemory,
    OutOfMemory,
    Resized,
    SensorLost,
    format_bytes,
)
from elastic_mbs.sinks.log_reader import Entry, Run, Totals, plausible

MARKS = 1000  # events that a page shows; more would make it larger than 2 MiB
LINE = 400  # characters that it shows of an event's line, and of each fact


@dataclass(frozen=True)
class Mark:
    """Something that happened at one moment."""

    t: float  # seconds since the run began
    kind: str  # "oom", "grow", "shrink", "thrash" or "note"; how it looks
    title: str  # what happened, in a few words
    facts: tuple[tuple[str, str], ...]  # what is known of it: names and values
    line: str  # the event's own log line
    key: str = ""  # the track whose line it lies on
    size: int | None = None  # the micro-batch size after it


@dataclass(frozen=True)
class Memory:
    """Bytes over time."""

    total: float  # what the device has at most
    allocated: Sequence[Point]  # in our live tensors, at the end of each call
    reserved: Sequence[Point]  # held by our allocator, at the end of each call
    peak: Sequence[Point]  # the highest that is known of each call
    capacity: Sequence[Point]  # what we could hold in all: the total without what others have
    margin: Sequence[Point]  # how far the controller would go: the capacity without its margin


@dataclass(frozen=True)
class RunData:
    """A run, as a report shows it."""

    title: str
    about: tuple[tuple[str, str], ...]  # who ran it, where and when: names and values
    tiles: tuple[tuple[str, str, str], ...]  # the figures at its head: name, value, and a remark
    seconds: float  # from its beginning to its last event
    memory: Memory
    sizes: Mapping[str, Sequence[Point]]  # micro-batch size by track
    rates: Mapping[str, Sequence[Point]]  # samples per second of each call, by mode
    lost: Sequence[Point]  # share of each call's time that went into failed attempts, from 0 to 1
    loss: Sequence[Point]  # of each training call
    marks: Sequence[Mark]  # events but finished calls, in order
    events: int  # how many of them there were: not all are marks in a long run
    reference: Sequence[Point] = ()  # the loss of a run to compare with
    # of a job of several ranks: each rank's run by its name, on the same time axis
    ranks: Mapping[str, RunData] = field(default_factory=dict)


Calls = Sequence[tuple[float, CallDone]]


def read_run(run: Run) -> RunData:
    """Return a run, put in order."""
    entries = [
        replace(entry, event=plausible(entry.event))
        for entry in sorted(run.entries, key=lambda entry: entry.t)
    ]
    calls = [(entry.t, entry.event) for entry in entries if isinstance(entry.event, CallDone)]
    modes = sorted({call.mode for _, call in calls})
    sizes = _sizes(entries)
    return RunData(
        title=str(run.header.get("name", "elastic_mbs")),
        about=_about(run),
        tiles=tiles_of(run.totals, [entry.event for entry in entries], sizes),
        seconds=run.totals.t,
        memory=_memory(entries, calls, _part(run.header, "policy").get("margin")),
        sizes=sizes,
        rates={
            mode: _per_call([(t, call) for t, call in calls if call.mode == mode], "rate")
            for mode in modes
        },
        lost=_from_start(
            calls,
            [
                (t, min(1.0, call.seconds_lost / call.seconds) if call.seconds else None)
                for t, call in calls
            ],
        ),
        loss=[(t, call.loss) for t, call in calls if call.mode == "train"],
        marks=_some([_mark(entry) for entry in entries if not isinstance(entry.event, CallDone)]),
        events=sum(count for name, count in run.totals.events.items() if name != "CallDone"),
    )


def _some(marks: Sequence[Mark]) -> list[Mark]:
    """Return at most `MARKS` of them, evenly over the run."""
    every = -(-len(marks) // MARKS) or 1
    return [*marks[:-1:every], *marks[-1:]]


def _memory(entries: Sequence[Entry], calls: Calls, margin: object) -> Memory:
    total = max((call.total for _, call in calls if call.total is not None), default=0)
    capacity = _capacity(entries, total)
    peaks = [
        (
            t,
            max(
                (peak for peak in (call.peak_reserved, call.peak_allocated) if peak is not None),
                default=None,
            ),
        )
        for t, call in calls
    ]
    allocated, reserved = _per_call(calls, "allocated"), _per_call(calls, "reserved")
    highest = max(
        (
            value
            for line in (peaks, allocated, reserved, capacity)
            for _, value in line
            if value is not None
        ),
        default=0,
    )
    part = 1 - float(margin) if isinstance(margin, int | float) else 1.0
    return Memory(
        total=max(total, highest),
        allocated=allocated,
        reserved=reserved,
        peak=_from_start(calls, peaks),
        capacity=capacity,
        margin=[(t, None if value is None else value * part) for t, value in capacity],
    )


def _capacity(entries: Sequence[Entry], total: int) -> list[Point]:
    """Return the bytes that we could hold in all, at each reading; None where one is missing."""
    found: list[Point] = []
    for entry in entries:
        event = entry.event
        if (
            isinstance(event, CallDone)
            and event.total is not None
            and event.held_by_others is not None
        ):
            found.append((entry.t, float(event.total - event.held_by_others)))
        elif isinstance(event, OutOfMemory) and event.held_by_others is not None and total:
            found.append((entry.t, float(total - event.held_by_others)))
        elif isinstance(event, CallDone | SensorLost):
            found.append((entry.t, None))
    if found:
        # the first reading holds for the time before it, too
        found.insert(0, (min(0.0, found[0][0]), found[0][1]))
    return found


def _sizes(entries: Sequence[Entry]) -> dict[str, list[Point]]:
    found: dict[str, list[Point]] = {}
    for entry in entries:
        event = entry.event
        if isinstance(event, CallDone):
            line = found.setdefault(event.key, [])
            began = entry.t - (event.seconds or 0.0)
            # else what changed since it began has an event, and is there already
            if not line or (line[-1][0] <= began and not event.ooms):
                line += [(began, event.size_before), (entry.t, event.micro_batch_size)]
        elif isinstance(event, OutOfMemory | Resized):
            found.setdefault(event.key, []).append(
                (entry.t, event.size_after if isinstance(event, OutOfMemory) else event.after)
            )
    return found


def _per_call(calls: Calls, name: str) -> list[Point]:
    return _from_start(calls, [(t, getattr(call, name)) for t, call in calls])


def _from_start(calls: Calls, points: Sequence[Point]) -> list[Point]:
    """Return points that hold from the call before; the first one holds from its own start."""
    if not points:
        return []
    t, first = calls[0]
    return [(max(0.0, t - (first.seconds or 0.0)), points[0][1]), *points]


Tile = tuple[str, str, str]  # name, value, and a remark


def tiles_of(
    totals: Totals, events: Sequence[Event | None], tracks: Mapping[str, Sequence[Point]]
) -> tuple[Tile, ...]:
    """Return the figures at the head of a run."""
    last = events[-1] if events else None
    return (
        *([("ended by", last.error, last.message[:80])] if isinstance(last, CallFailed) else []),
        *_work(totals),
        _time_lost(totals),
        _final_size(totals, tracks),
        _peak(totals, events),
    )


def _work(totals: Totals) -> Iterator[Tile]:
    """Yield calls, samples and failures; those of unfinished calls apart."""
    samples, replayed, survived = totals.samples, totals.replayed, totals.survived
    unfinished = totals.events.get("OutOfMemory", 0) - survived
    evals = totals.evaluations
    yield "calls", f"{totals.calls:,}", f"{evals:,} of them eval" if evals else ""
    rate = f"{samples / totals.seconds:,.1f} per second" if totals.seconds > 0 else ""
    yield "samples", f"{samples:,}", rate
    rest = f"and {unfinished:,} in a call that did not finish" if unfinished > 0 else ""
    yield "OOMs survived", f"{survived:,}", rest
    share = f"{replayed / samples:.2%} of all" if samples else ""
    yield "samples replayed", f"{replayed:,}", share


def _time_lost(totals: Totals) -> Tile:
    spent, lost = totals.ended_seconds, totals.lost
    if spent <= 0:
        return "time lost", "0 %", ""
    return "time lost", f"{lost / spent:.2%}", f"{duration(lost)} of {duration(spent)}"


def _final_size(totals: Totals, tracks: Mapping[str, Sequence[Point]]) -> Tile:
    mode = "train" if "train" in totals.least else next(iter(totals.least), None)
    if mode is None:
        return "final micro-batch", "none", ""
    own = (key for key in totals.sizes if totals.modes[key] == mode)
    _, final = max((tracks[key][-1] for key in own if key in tracks), default=(0.0, None))
    least, most = totals.least[mode], totals.most[mode]
    between = f"between {least:,} and {most:,}" if most > least else ""
    return "final micro-batch", "none" if final is None else f"{final:,.0f}", between


def _peak(totals: Totals, events: Sequence[Event | None]) -> Tile:
    done = (event for event in events if isinstance(event, CallDone))
    total = max((call.total for call in done if call.total is not None), default=None)
    of = f"of {format_bytes(total)}" if total is not None else ""
    return "peak memory", format_bytes(totals.peak), of


def _about(run: Run) -> tuple[tuple[str, str], ...]:
    header = run.header
    known = {
        "began": _moment(header.get("time")),
        "device": header.get("device"),
        "host": header.get("host"),
        "process": header.get("pid"),
        "versions": ", ".join(
            f"{name} {version}"
            for name, version in _part(header, "versions").items()
            if version is not None
        ),
        "micro_batch_size": _part(header, "settings").get("micro_batch_size"),
        "run": run.id,
    }
    return tuple((name, str(value)) for name, value in known.items() if value not in (None, ""))


def _moment(value: object) -> str | None:
    try:
        return datetime.fromtimestamp(value, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")  # type: ignore[arg-type]  # what is not a number is caught
    except (TypeError, ValueError, OverflowError, OSError):
        return None


def _part(header: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = header.get(name)
    return found if isinstance(found, Mapping) else {}


_NAMES = {
    "message": "cause",
    "requested": "asked",
    "held_by_others": "others hold",
    "holders": "who",
    "key": "track",
    "mode": "replay",
}
_BYTES = frozenset({"requested", "free", "held_by_others", "capacity"})
_HIDDEN = frozenset({"event", "run", "time", "t", "level", "name"})


def _mark(entry: Entry) -> Mark:
    event, facts = entry.event, _facts(entry.record)
    # OutOfMemory: out of memory
    title = re.sub("(?<!^)(?=[A-Z])", " ", str(entry.record["event"])).lower()
    line = " ".join(f"{name}={value}" for name, value in facts) if event is None else event.line()
    line = _short(line)
    if isinstance(event, OutOfMemory):
        return Mark(
            entry.t, "oom", f"{title} in {event.phase}", facts, line, event.key, event.size_after
        )
    if isinstance(event, Resized):
        kind = (
            "thrash"
            if event.reason == "thrash"
            else "grow"
            if event.after > event.before
            else "shrink"
        )
        return Mark(
            entry.t,
            kind,
            f"{title} {event.before} → {event.after}",
            facts,
            line,
            event.key,
            event.after,
        )
    return Mark(
        entry.t, "oom" if isinstance(event, OptimizerOutOfMemory) else "note", title, facts, line
    )


def _facts(record: Mapping[str, object]) -> tuple[tuple[str, str], ...]:
    """Return the known fields of an event, as names and values for a person."""
    return tuple(
        (
            _NAMES.get(name, name.replace("_", " ")),
            _short(
                format_bytes(value) if name in _BYTES and isinstance(value, int) else str(value)
            ),
        )
        for name, value in record.items()
        if name not in _HIDDEN and value is not None and value != ""
    )


def _short(text: str) -> str:
    return text if len(text) <= LINE else f"{text[:LINE]} …"
