"""What a report shows of a run: lines over time, marks, and the figures at its head. Nothing of how it looks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

from elastic_mbs.cli.report.decimate import Point
from elastic_mbs.cli.report.scale import duration, number
from elastic_mbs.events import (
    CallDone,
    CallFailed,
    Event,
    OptimizerOutOfMemory,
    OutOfMemory,
    Resized,
    SensorBack,
    SensorLost,
    SizeReader,
    WaitingForMemory,
    format_bytes,
)
from elastic_mbs.sinks.run_log_reader import Entry, Run

_SHORTEST, _LONGEST = 1e-9, 1e12  # seconds that a call may take
_REASONS = {
    "grow": "it is predicted to fit and to be faster",
    "thrash": "the allocator had to empty its cache in several calls in a row",
    "limit": "back to the size before a growth that failed",
}


@dataclass(frozen=True)
class Mark:
    """Something that happened at one moment.

    Attributes:
        t: seconds since the run began.
        kind: "oom", "grow", "shrink", "thrash" or "note"; how it looks.
        title: what happened, in a few words.
        facts: what is known of it, as pairs of a name and a value.
        line: the event's own log line.
        key: the track whose line it lies on, or "".
        size: the micro-batch size after it, or None.
    """

    t: float
    kind: str
    title: str
    facts: tuple[tuple[str, str], ...]
    line: str
    key: str = ""
    size: int | None = None


@dataclass(frozen=True)
class Memory:
    """Bytes over time.

    Attributes:
        total: what the device has at most.
        allocated: in our live tensors, at the end of each call.
        reserved: held by our allocator, at the end of each call.
        peak: the highest that is known of each call.
        capacity: what we could hold in all: the total without what others have.
        margin: how far the controller would go: the capacity without its margin.
    """

    total: float
    allocated: Sequence[Point]
    reserved: Sequence[Point]
    peak: Sequence[Point]
    capacity: Sequence[Point]
    margin: Sequence[Point]


@dataclass(frozen=True)
class RunData:
    """One run, as a report shows it.

    Attributes:
        title: its name.
        about: who ran it, where and when, as pairs of a name and a value.
        tiles: the figures at its head: name, value, and a remark.
        seconds: from its beginning to its last event.
        memory: bytes over time.
        sizes: micro-batch size over time, by track.
        rates: samples per second of each call, by mode.
        lost: share of each call's time that went into failed attempts, from 0 to 1.
        loss: of each training call.
        marks: all events but finished calls, in order.
    """

    title: str
    about: tuple[tuple[str, str], ...]
    tiles: tuple[tuple[str, str, str], ...]
    seconds: float
    memory: Memory
    sizes: Mapping[str, Sequence[Point]]
    rates: Mapping[str, Sequence[Point]]
    lost: Sequence[Point]
    loss: Sequence[Point]
    marks: Sequence[Mark]


def read_run(run: Run) -> RunData:
    """The run, put in order."""
    entries = [_finite(entry) for entry in sorted(run.entries, key=lambda entry: entry.t)]
    calls = [(entry.t, entry.event) for entry in entries if isinstance(entry.event, CallDone)]
    marks = [_mark(entry) for entry in entries if not isinstance(entry.event, CallDone)]
    margin = _number(_part(run.header, "policy").get("margin"), 0.0)
    return RunData(
        title=str(run.header.get("name", "elastic_mbs")),
        about=_about(run),
        tiles=tiles(calls, marks, [entry.event for entry in entries if isinstance(entry.event, CallFailed)], entries[-1].event if entries else None),
        seconds=max((entry.t for entry in entries), default=0.0),
        memory=_memory(entries, margin),
        sizes=_sizes(entries),
        rates={mode: _per_call([(t, call) for t, call in calls if call.mode == mode], "rate") for mode in sorted({call.mode for _, call in calls})},
        lost=_lost(calls),
        loss=[(t, call.loss) for t, call in calls if call.mode == "train"],
        marks=marks,
    )


def _finite(entry: Entry) -> Entry:
    """A call without times that are no times."""
    call = entry.event
    if isinstance(call, CallFailed):
        return replace(entry, event=replace(call, seconds=_seconds(call.seconds), seconds_lost=_seconds(call.seconds_lost)))
    if not isinstance(call, CallDone):
        return entry
    seconds = call.seconds if call.seconds is not None and _SHORTEST < call.seconds < _LONGEST else None
    return replace(entry, event=replace(call, seconds=seconds, seconds_lost=_seconds(call.seconds_lost)))


def _seconds(value: float) -> float:
    return value if 0 <= value < _LONGEST else 0.0


# ---------------------------------------------------------------------- lines


def _memory(entries: Sequence[Entry], margin: float) -> Memory:
    calls = [(entry.t, entry.event) for entry in entries if isinstance(entry.event, CallDone)]
    total = max((call.total for _, call in calls if call.total is not None), default=0)
    capacity: list[Point] = []
    for entry in entries:
        event = entry.event
        if isinstance(event, CallDone):
            others = None if event.total is None or event.held_by_others is None else total - event.total + event.held_by_others
        elif isinstance(event, OutOfMemory) and event.held_by_others is not None and total:
            others = event.held_by_others
        elif isinstance(event, SensorLost):
            others = None
        else:
            continue
        capacity.append((entry.t, None if others is None else float(total - others)))
    if capacity and capacity[0][1] is not None:
        capacity.insert(0, (min(0.0, capacity[0][0]), capacity[0][1]))  # what was read first held before it, too
    peaks = [(t, max((peak for peak in (call.peak_reserved, call.peak_allocated) if peak is not None), default=None)) for t, call in calls]
    allocated, reserved = _per_call(calls, "allocated"), _per_call(calls, "reserved")
    highest = max((value for line in (peaks, allocated, reserved, capacity) for _, value in line if value is not None), default=0)
    return Memory(
        total=max(total, highest),
        allocated=allocated,
        reserved=reserved,
        peak=_with_start(calls, peaks),
        capacity=capacity,
        margin=[(t, None if value is None else value * (1 - margin)) for t, value in capacity],
    )


def _sizes(entries: Sequence[Entry]) -> dict[str, list[Point]]:
    found: dict[str, list[Point]] = {}
    reader = SizeReader()
    for entry in entries:
        event = entry.event
        if isinstance(event, CallDone):
            line = found.setdefault(event.key, [])
            began = entry.t - (event.seconds or 0.0)
            if not line or line[-1][0] <= began:  # else a failure within the call has said more
                line.append((began, event.size_before))
        told = reader.read(event)
        if told is not None:
            found.setdefault(told[0], []).append((entry.t, told[1]))
    return found


def _per_call(calls: Sequence[tuple[float, CallDone]], name: str) -> list[Point]:
    return _with_start(calls, [(t, getattr(call, name)) for t, call in calls])


def _lost(calls: Sequence[tuple[float, CallDone]]) -> list[Point]:
    return _with_start(calls, [(t, min(1.0, call.seconds_lost / call.seconds) if call.seconds else None) for t, call in calls])


def _with_start(calls: Sequence[tuple[float, CallDone]], points: Sequence[Point]) -> list[Point]:
    """A figure of a call holds from the call before it; that of the first one from its own beginning."""
    if not points:
        return []
    t, first = calls[0]
    return [(max(0.0, t - (first.seconds or 0.0)), points[0][1]), *points]


# ---------------------------------------------------------------------- figures


def tiles(
    calls: Sequence[tuple[float, CallDone]], marks: Sequence[Mark], failed: Sequence[CallFailed] = (), last: Event | None = None
) -> tuple[tuple[str, str, str], ...]:
    """The figures at the head of a run: name, value, remark.

    Args:
        calls: those that finished, with their times.
        marks: everything else that happened.
        failed: those that ended by an exception.
        last: the last event.
    """
    done = [call for _, call in calls]
    train = [call for call in done if call.mode == "train"]
    samples, replayed = sum(call.samples for call in done), sum(call.replayed_samples for call in done)
    spent = sum(call.seconds or 0.0 for call in done)
    rate = f"{samples / spent:,.1f} per second" if spent > 0 else ""
    spent += sum(call.seconds for call in failed)
    lost = sum(call.seconds_lost for call in done) + sum(call.seconds_lost for call in failed)
    ooms = sum(call.ooms for call in done)
    unfinished = sum(mark.kind == "oom" and mark.size is not None for mark in marks) - ooms
    sizes = [call.micro_batch_size for call in train] or [call.micro_batch_size for call in done]
    resized = [mark.size for mark in marks if mark.size is not None and calls and mark.t >= calls[-1][0]]
    peak = max((peak for call in done for peak in (call.peak_allocated, call.peak_reserved, call.reserved) if peak is not None), default=None)
    total = max((call.total for call in done if call.total is not None), default=None)
    evals = len(done) - len(train)
    ended = (("ended by", last.error, last.message[:80]),) if isinstance(last, CallFailed) else ()
    return (
        *ended,
        ("calls", f"{len(done):,}", f"{evals:,} of them eval" if evals else ""),
        ("samples", f"{samples:,}", rate),
        ("OOMs survived", f"{ooms:,}", f"and {unfinished:,} in a call that did not finish" if unfinished > 0 else ""),
        ("samples replayed", f"{replayed:,}", f"{replayed / samples:.2%} of all" if samples else ""),
        ("time lost", f"{lost / spent:.2%}" if spent > 0 else "0 %", f"{duration(lost)} of {duration(spent)}" if spent > 0 else ""),
        (
            "final micro-batch",
            f"{resized[-1] if resized else sizes[-1]:,}" if sizes else "none",
            f"between {min(sizes):,} and {max(sizes):,}" if sizes and min(sizes) < max(sizes) else "",
        ),
        ("peak memory", format_bytes(peak), f"of {format_bytes(total)}" if total is not None else ""),
    )


def _about(run: Run) -> tuple[tuple[str, str], ...]:
    header = run.header
    versions, settings = _part(header, "versions"), _part(header, "settings")
    size = settings.get("micro_batch_size")
    told = {
        "began": _moment(header.get("time")),
        "device": header.get("device"),
        "host": header.get("host"),
        "process": header.get("pid"),
        "versions": ", ".join(f"{name} {version}" for name, version in versions.items() if version is not None),
        "micro_batch_size": size,
        "run": run.id,
    }
    return tuple((name, str(value)) for name, value in told.items() if value not in (None, ""))


def _moment(value: object) -> str | None:
    if not isinstance(value, int | float):
        return None
    try:
        return datetime.fromtimestamp(value, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    except (ValueError, OverflowError, OSError):
        return None


def _part(header: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = header.get(name)
    return found if isinstance(found, Mapping) else {}


def _number(value: object, default: float) -> float:
    return float(value) if isinstance(value, int | float) else default


# ---------------------------------------------------------------------- marks


def _mark(entry: Entry) -> Mark:
    event, t = entry.event, entry.t
    if event is None:
        known = {"event", "run", "time", "t", "level", "name"}
        told = tuple((name, str(value)) for name, value in entry.record.items() if name not in known)
        return Mark(t, "note", str(entry.record["event"]), told, " ".join(f"{name}={value}" for name, value in told))
    if isinstance(event, OutOfMemory):
        return Mark(t, "oom", f"out of memory in {event.phase}", facts_of_failure(event), event.line(), event.key, event.size_after)
    if isinstance(event, OptimizerOutOfMemory):
        told = (("cause", f"{event.kind}: {event.message}"), ("action", f"taken back, and tried again {event.action}"))
        return Mark(t, "oom", f"out of memory in {event.optimizer}.step()", told, event.line())
    if isinstance(event, Resized):
        kind = "thrash" if event.reason == "thrash" else "grow" if event.after > event.before else "shrink"
        facts = [("track", event.key), ("cause", _REASONS.get(event.reason, event.reason))]
        if event.capacity is not None:
            facts.append(("capacity", format_bytes(event.capacity)))
        facts.append(("action", f"micro-batch {event.before} → {event.after}"))
        return Mark(t, kind, {"grow": "grown", "shrink": "shrunk", "thrash": "thrashing"}[kind], tuple(facts), event.line(), event.key, event.after)
    title, facts = _note(event)
    return Mark(t, "note", title, tuple(facts), event.line())


def facts_of_failure(event: OutOfMemory) -> tuple[tuple[str, str], ...]:
    """Cause, asked, free, who has the rest, track, action and cost, as far as they are known."""
    facts = [("cause", f"{event.kind}, samples {event.start}:{event.stop}: {event.message}")]
    if event.requested is not None:
        facts.append(("asked", format_bytes(event.requested)))
    if event.free is not None:
        age = "" if event.reading_age is None else f" (read {duration(max(0.0, event.reading_age))} before)"
        facts.append(("free", f"{format_bytes(event.free)}{age}"))
    if event.held_by_others is not None:
        facts.append(("who", f"others hold {format_bytes(event.held_by_others)}{_named(event.holders)}"))
    if event.key:
        facts.append(("track", event.key))
    what = "batch" if event.mode == "step" else "piece"
    facts.append(("action", f"micro-batch {event.size_before} → {event.size_after}, the {what} is replayed (mode {event.mode})"))
    if event.seconds_lost is not None:
        facts.append(("lost", f"{number(round(event.seconds_lost, 4))} s"))
    return tuple(facts)


def _named(holders: str) -> str:
    return f": {holders}" if holders else ""


def _note(event: Event) -> tuple[str, list[tuple[str, str]]]:
    if isinstance(event, WaitingForMemory):
        facts = [("free", format_bytes(event.free)), ("who", f"others hold {format_bytes(event.held_by_others)}{_named(event.holders)}")]
        return "waiting for memory", [*facts, ("action", f"up to {event.seconds:.1f} s, then try again")]
    if isinstance(event, CallFailed):
        return f"a call has ended by {event.error}", [("cause", event.message), ("track", event.key)]
    if isinstance(event, SensorLost):
        return "no memory reading to rely on", [("cause", event.reason), ("action", "micro-batches stop growing until there is one")]
    if isinstance(event, SensorBack):
        return "memory readings are back", [("from", event.source)]
    return "warning", [("cause", event.line())]
