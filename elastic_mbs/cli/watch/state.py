"""What a panel shows of a run that goes on: sums over all of it, and the last of everything else."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from elastic_mbs.events import CallDone, CallFailed, Event, OptimizerOutOfMemory, OutOfMemory, SizeReader
from elastic_mbs.sinks.run_log_reader import Entry, Reader

EVENTS, POINTS = 8, 400
"""How many of the last events and figures are kept."""


@dataclass
class State:
    """One run so far.

    Attributes:
        header: of the run; empty where the log has none.
        calls: calls that finished.
        samples: samples in them.
        ooms: out-of-memory errors.
        replayed: samples that were run again.
        seconds: time of the calls.
        lost: seconds of it in attempts that failed.
        last: the last call, of any kind.
        losses: the last losses.
        rates: samples per second of the last training calls.
        sizes: micro-batch size by track; the track that ran last is the last.
        events: the last events that are no finished calls, with their times.
        t: time of the last line, in seconds since the run began.
        time: the same in unix seconds.
    """

    header: Mapping[str, Any] = field(default_factory=dict)
    calls: int = 0
    samples: int = 0
    ooms: int = 0
    replayed: int = 0
    seconds: float = 0.0
    lost: float = 0.0
    last: CallDone | None = None
    losses: deque[float] = field(default_factory=lambda: deque(maxlen=POINTS))
    rates: deque[float] = field(default_factory=lambda: deque(maxlen=POINTS))
    sizes: dict[str, int] = field(default_factory=dict)
    events: deque[tuple[float, str, str]] = field(default_factory=lambda: deque(maxlen=EVENTS))
    t: float = 0.0
    time: float = 0.0
    _size_reader: SizeReader = field(default_factory=SizeReader)

    def add(self, entry: Entry) -> None:
        """Takes one event."""
        self.t, self.time = max(self.t, entry.t), max(self.time, float(entry.record["time"]))
        event = entry.event
        told = self._size_reader.read(event)
        if told is not None:
            self.sizes.pop(told[0], None)
            self.sizes[told[0]] = told[1]
        if isinstance(event, CallDone):
            self._add_call(event)
            return
        if isinstance(event, CallFailed):
            self.seconds += event.seconds
            self.lost += event.seconds_lost
        self.ooms += isinstance(event, OutOfMemory | OptimizerOutOfMemory)
        self.events.append((entry.t, str(entry.record.get("level", "")), _line(event, entry)))

    def _add_call(self, call: CallDone) -> None:
        self.calls += 1
        self.samples += call.samples
        self.replayed += call.replayed_samples
        self.seconds += call.seconds or 0.0
        self.lost += call.seconds_lost
        self.last = call
        if call.mode == "train":
            if call.loss is not None:
                self.losses.append(call.loss)
            if call.rate is not None:
                self.rates.append(call.rate)


class Watched:
    """The runs of a log as its lines come; keeps no lines.

    Attributes:
        current: the run that has had the last line, or None before the first.
    """

    def __init__(self) -> None:
        self.current: State | None = None
        self._reader = Reader()
        self._states: dict[str, State] = {}

    def feed(self, line: bytes) -> None:
        """Takes a line.

        Raises:
            UsageError: it is none of a run log's.
        """
        run = self._reader.feed(line)
        if run is None:
            return
        state = self.current = self._states.setdefault(run.id, State())
        state.header = run.header
        for entry in run.entries:
            state.add(entry)
        run.entries.clear()


def _line(event: Event | None, entry: Entry) -> str:
    return str(entry.record["event"]) if event is None else event.line()
