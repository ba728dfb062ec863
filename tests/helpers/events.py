"""Events for tests of sinks, reports and logs."""

from dataclasses import fields, replace
from typing import Any

from hypothesis import strategies as st

from elastic_mbs import events
from elastic_mbs.events import CallDone, Event, GuardedSink, OutOfMemory, Resized
from elastic_mbs.sinks.run_log import event_line, header_line

KINDS: list[type[Event]] = sorted(
    (kind for kind in vars(events).values() if isinstance(kind, type) and issubclass(kind, Event)),
    key=lambda kind: kind.__name__,
)
MIB = 2**20
KEY = "loss_fn (train, 2^7 elements per sample)"

_TEXT = st.text(max_size=20)
_WHOLE = st.integers(-(2**62), 2**62)
_FIELDS: dict[str, st.SearchStrategy[Any]] = {
    "int": _WHOLE,
    "int | None": st.none() | _WHOLE,
    "float": st.floats(),
    "float | None": st.none() | st.floats(),
    "str": _TEXT,
}


def any_event(kind: type[Event]) -> st.SearchStrategy[Event]:
    """Return a strategy for all events of a class."""
    return st.builds(kind, **{item.name: _FIELDS[str(item.type)] for item in fields(kind)})


ANY_EVENT = st.one_of(*(any_event(kind) for kind in KINDS))


def done(ended: float = 1.0, **changes: Any) -> CallDone:
    """Return the event of a call that finished at `ended`."""
    sizes = {
        "samples": 64,
        "pieces": 4,
        "size_before": 16,
        "micro_batch_size": 16,
        "ooms": 0,
        "replayed_samples": 0,
    }
    memory = {
        "allocated": 10,
        "reserved": 12,
        "peak_allocated": 30,
        "peak_reserved": 40,
        "free": 52,
        "held_by_others": 36,
        "total": 100,
    }
    figures = {
        **sizes,
        "seconds": 0.5,
        "seconds_lost": 0.0,
        "loss": 2.5,
        **{name: count * MIB for name, count in memory.items()},
    }
    return CallDone(
        **{"name": "run", "key": KEY, "mode": "train", "ended": ended, **figures, **changes}
    )


def failure(**changes: Any) -> OutOfMemory:
    """Return the event of an out-of-memory error that was survived."""
    event = OutOfMemory(
        "run",
        "backward",
        16,
        32,
        "piece",
        16,
        8,
        3,
        "allocator",
        "CUDA out of memory. Tried to allocate 2.00 GiB.",
        KEY,
    )
    seen = {
        "requested": 2048 * MIB,
        "free": 5 * MIB,
        "held_by_others": 36 * MIB,
        "holders": "python (pid 4711) 30.0 MiB",
        "reading_age": 0.25,
    }
    return replace(event, **{**seen, "seconds_lost": 0.125, **changes})


GROWN = Resized("run", 8, 16, "grow", KEY, 64 * MIB)
ONE_OF_EACH: list[Event] = [
    done(),
    failure(),
    GROWN,
    events.WaitingForMemory("run", 2.5, 5 * MIB, 36 * MIB),
    events.Escalated("run", 0, 1, "checkpoint", KEY, "2 of 8 blocks", 3 * MIB),
    events.Deescalated("run", "checkpoint", KEY, "2 of 8 blocks", 4 * MIB),
    events.SensorLost("run", "NVML: driver not loaded"),
    events.SensorBack("run", "nvml"),
    events.Warned("run", "count", "labels of -100 and no count="),
    events.CallFailed(
        "run", KEY, "MicroBatchFloorError", "a micro-batch of 1 does not fit", 10, 1.25, 1.125
    ),
    events.OptimizerOutOfMemory(
        "run", "AdamW", "one parameter at a time", "allocator", "CUDA out of memory."
    ),
]

RUN: list[tuple[float, Event]] = [
    (1.0, done(seconds=1.0, loss=4.0)),
    (1.5, failure()),
    (
        2.0,
        done(
            2.0,
            seconds=1.0,
            loss=3.0,
            micro_batch_size=8,
            ooms=1,
            replayed_samples=16,
            seconds_lost=0.25,
        ),
    ),
    (2.9, GROWN),
    (3.0, done(3.0, seconds=1.0, loss=2.5, micro_batch_size=8)),
    (3.5, done(3.5, mode="eval", key="eval", loss=None, micro_batch_size=32)),
    *((4.0 + i, event) for i, event in enumerate(ONE_OF_EACH[3:])),
]


def log_of(*runs: list[tuple[float, Event]], name: str = "run", **header: Any) -> bytes:
    """Return the text of a run log; each run is a list of events with their times."""
    lines = []
    for number, entries in enumerate(runs):
        run = f"{number:012x}"
        about = {
            "name": name,
            "device": "cpu",
            "versions": {"torch": "2.13.0"},
            "settings": {},
            "policy": {"margin": 0.1},
            **header,
        }
        lines.append(header_line(run, 0.0, 1.7e9, about))
        lines += [event_line(event, run, at, 1.7e9 + at) for at, event in entries]
    return b"".join(lines)


class Heard(GuardedSink):
    """A sink that notes all that it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[Event] = []
        self.begun = self.closed = 0

    def _begin(self) -> None:
        self.begun += 1

    def _take(self, event: Event) -> None:
        self.events.append(event)

    def _end(self) -> None:
        self.closed += 1

    @property
    def calls(self) -> list[CallDone]:
        return [event for event in self.events if isinstance(event, CallDone)]
