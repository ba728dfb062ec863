"""What a panel shows of a run that goes on: sums over all of it, and the last of everything else."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from elastic_mbs.events import CallDone, CallFailed, OptimizerOutOfMemory, OutOfMemory, SizeReader
from elastic_mbs.sinks.run_log_reader import Entry

EVENTS, POINTS = 8, 400  # how many of the last events and figures are kept


@dataclass
class State:
    """One run so far."""

    header: Mapping[str, Any] = field(default_factory=dict)  # empty where the log has none
    calls: int = 0  # that finished
    samples: int = 0  # in them
    ooms: int = 0
    replayed: int = 0  # samples
    seconds: float = 0.0  # of the calls
    lost: float = 0.0  # seconds of it in failed attempts
    last: CallDone | None = None
    losses: deque[float] = field(default_factory=lambda: deque(maxlen=POINTS))
    rates: deque[float] = field(default_factory=lambda: deque(maxlen=POINTS))  # samples per second of training calls
    sizes: dict[str, int] = field(default_factory=dict)  # micro-batch size by track; the track that ran last is the last
    events: deque[tuple[float, str, str]] = field(default_factory=lambda: deque(maxlen=EVENTS))  # but finished calls: time, level, line
    t: float = 0.0  # of the last line, in seconds since the run began
    time: float = 0.0  # the same in unix seconds
    size_reader: SizeReader = field(default_factory=SizeReader)

    def add(self, entry: Entry) -> None:
        """Takes one event."""
        self.t, self.time = max(self.t, entry.t), max(self.time, float(entry.record["time"]))
        event = entry.event
        size = self.size_reader.read(event)
        if size is not None:
            self.sizes.pop(size[0], None)
            self.sizes[size[0]] = size[1]
        if isinstance(event, CallDone | CallFailed):
            self.seconds += event.seconds or 0.0
            self.lost += event.seconds_lost
        if isinstance(event, CallDone):
            self._add_call(event)
        else:
            self.ooms += isinstance(event, OutOfMemory | OptimizerOutOfMemory)
            line = str(entry.record["event"]) if event is None else event.line()
            self.events.append((entry.t, str(entry.record.get("level", "")), line))

    def _add_call(self, call: CallDone) -> None:
        self.calls += 1
        self.samples += call.samples
        self.replayed += call.replayed_samples
        self.last = call
        if call.mode == "train":
            self.losses.extend([] if call.loss is None else [call.loss])
            self.rates.extend([] if call.rate is None else [call.rate])
