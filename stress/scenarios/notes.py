"""Takes notes while training runs under stress: a sink for events, and a line per step."""

from __future__ import annotations

import time
from collections.abc import Callable

from elastic_mbs.events import CallDone, Event, OptimizerOutOfMemory, OutOfMemory, Resized, SensorBack, SensorLost, WaitingForMemory, Warned

from ..record import Mark

_NAMES: dict[type[Event], str] = {
    OutOfMemory: "oom",
    OptimizerOutOfMemory: "optimizer",
    SensorLost: "sensor_lost",
    SensorBack: "sensor_back",
    WaitingForMemory: "waiting",
    Warned: "warned",
}


class Notes:
    """Marks of one run.

    Args:
        clock: seconds, the same for all processes.

    Attributes:
        began: when the run began, by that clock.
        marks: what happened so far.
        step: the step that is running.
        ooms: out-of-memory errors in it.
        lost: seconds that they cost.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.began = clock()
        self.marks: list[Mark] = []
        self.step = 0
        self.ooms = 0
        self.lost = 0.0

    def start(self) -> None:
        """The run begins now."""
        self.began = self._clock()

    def now(self) -> float:
        """Seconds since the run began."""
        return self._clock() - self.began

    def begin(self, step: int) -> None:
        """A step begins."""
        self.step, self.ooms, self.lost = step, 0, 0.0

    def mark(self, what: str, text: str, before: int | None = None, after: int | None = None) -> None:
        """Takes something down."""
        self.marks.append(Mark(self.now(), self.step, what, text, before, after))

    def __call__(self, event: Event) -> None:
        """A sink for events."""
        if isinstance(event, OutOfMemory):
            self.ooms += 1
            self.lost += event.seconds_lost or 0.0
            self.mark("oom", event.line(), event.size_before, event.size_after)
        elif isinstance(event, Resized):
            self.mark("grow" if event.after > event.before else "shrink", event.line(), event.before, event.after)
        elif not isinstance(event, CallDone):
            self.ooms += isinstance(event, OptimizerOutOfMemory)
            self.mark(_NAMES.get(type(event), "error"), event.line())
