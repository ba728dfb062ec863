"""Where the engine's microseconds go: the time of each of its parts in a call without events."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any

from elastic_mbs import ElasticMBS, Policy, runtime
from elastic_mbs.batch.counts import Counts
from elastic_mbs.batch.schedule import Schedule
from elastic_mbs.batch.transfer import Streamer
from elastic_mbs.batch.view import BatchView
from elastic_mbs.controller.controller import Controller
from elastic_mbs.engine import call as engine
from elastic_mbs.engine import steady
from elastic_mbs.engine.context import Parts
from elastic_mbs.engine.model import Inventory
from elastic_mbs.engine.timing import Stopwatch
from elastic_mbs.memory import CudaMeter, HostMeter, Monitor
from elastic_mbs.rollback.buffers import BufferCopies
from elastic_mbs.rollback.gradients import GradientNotes
from elastic_mbs.rollback.graph import CommitLog
from elastic_mbs.rollback.random_streams import RandomStreams
from tools.workloads import Workload, wait, with_pieces

PARTS: Sequence[tuple[str, object, str]] = (
    ("batch: read its shapes", BatchView, "__init__"),
    ("batch: count elements", BatchView, "elements"),
    ("batch: versions", BatchView, "versions"),
    ("batch: cut a piece", BatchView, "piece"),
    ("schedule: next piece", Schedule, "next"),
    ("batch: to the device", Streamer, "load"),
    ("counts: read", Counts, "read"),
    ("counts: weights", Counts, "weights"),
    ("first look", runtime.ElasticMBS, "_look_at"),
    ("capture check", runtime, "refuse_capture"),
    ("inventory: refresh", Inventory, "refresh"),
    ("commits: clear", CommitLog, "clear"),
    ("commits: forget guests", CommitLog, "forget_guests"),
    ("streams: read", RandomStreams, "read"),
    ("buffers: begin_call", BufferCopies, "begin_call"),
    ("buffers: begin_piece", BufferCopies, "begin_piece"),
    ("buffers: end_clean_piece", BufferCopies, "end_clean_piece"),
    ("loss: read", engine, "read_losses"),
    ("loss: weigh", engine, "weighted_sum"),
    ("careful: backward", engine, "backward_with_care"),
    ("careful: commit", engine, "commit_with_care"),
    ("gradients: stayed", GradientNotes, "stayed"),
    ("gradients: advance", GradientNotes, "advance"),
    ("gradients: note", GradientNotes, "note"),
    ("step guard: up", engine, "enter_call"),
    ("step guard: down", engine, "leave_call"),
    ("outputs: store", engine, "StoredOutput"),
    ("outputs: result", engine, "StepResult"),
    ("controller: begin", Controller, "begin"),
    ("controller: end", Controller, "end"),
    ("meter: usage", HostMeter, "usage"),
    ("meter: usage", CudaMeter, "usage"),
    ("meter: reset", HostMeter, "reset_peak"),
    ("meter: reset", CudaMeter, "reset_peak"),
    ("monitor: start", Monitor, "start"),
    ("monitor: latest", Parts, "capacity"),
    ("stopwatch", Stopwatch, "start"),
    ("stopwatch", Stopwatch, "seconds"),
    ("stopwatch", Stopwatch, "later"),
    ("stopwatch", Stopwatch, "finished"),
    ("user: backward", steady, "backward"),
    ("user: backward", engine, "backward"),
)
"""(label, owner, attribute): a function, method or property that is timed without what other parts inside of it take."""


class Clock:
    """Adds up the time of each part, without that of the parts inside it."""

    def __init__(self) -> None:
        self.spent: dict[str, float] = defaultdict(float)
        self.times: dict[str, int] = defaultdict(int)
        self._inner = [0.0]

    def timed(self, label: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function`, timed under `label`."""

        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            self._inner.append(0.0)
            began = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                took = time.perf_counter() - began
                self.spent[label] += took - self._inner.pop()
                self.times[label] += 1
                self._inner[-1] += took

        return call

    def take(self) -> dict[str, tuple[float, int]]:
        """Seconds and number of runs by label since the last `take`."""
        taken = {label: (seconds, self.times[label]) for label, seconds in self.spent.items()}
        self.spent.clear()
        self.times.clear()
        return taken


@contextmanager
def instrumented(clock: Clock) -> Iterator[None]:
    """Times every part while the block runs."""
    with ExitStack() as undo:
        for label, owner, name in PARTS:
            original = vars(owner).get(name)
            if original is None:
                continue  # the engine has changed: what is left can be timed all the same, and the test of this list fails
            undo.callback(setattr, owner, name, original)
            if isinstance(original, property):
                assert original.fget is not None
                setattr(owner, name, property(clock.timed(label, original.fget)))
            elif isinstance(original, classmethod):
                setattr(owner, name, classmethod(clock.timed(label, original.__func__)))
            else:
                setattr(owner, name, clock.timed(label, original))
        yield


@dataclass(frozen=True)
class Row:
    """What one part takes in a call.

    Attributes:
        part: its label.
        micros: microseconds in a call, median over the calls.
        times: how often it runs in a call.
    """

    part: str
    micros: float
    times: int


def by_part(workload: Workload, calls: int, seconds: float) -> list[Row]:
    """What each part of the engine takes in a call without events, the most expensive first; last the user's own forward and backward.

    "the loop itself" is what no part accounts for. It has about 0.5 µs for each timing in it, and the end of each piece's graph, which a loop written
    by hand pays for as well.

    Args:
        workload: what to train.
        calls: how many to measure at most.
        seconds: time at most; five calls are run all the same.
    """
    clock = Clock()
    loss_fn = clock.timed("user: loss_fn", workload.loss_fn)
    found: list[dict[str, tuple[float, int]]] = []
    with make_runtime(workload) as mbs, instrumented(clock):
        call = clock.timed("the loop itself", mbs.backward)
        began = time.perf_counter()
        while len(found) < WARM + calls and (len(found) < WARM + 5 or time.perf_counter() - began < seconds):
            workload.model.zero_grad()
            wait(workload.device)
            clock.take()
            call(loss_fn, workload.batch)
            found.append(clock.take())
    found = found[WARM:]
    rows = []
    for label in dict.fromkeys(label for each in found for label in each):
        spent, times = zip(*(each.get(label, (0.0, 0)) for each in found), strict=True)
        rows.append(Row(label, 1e6 * statistics.median(spent), round(statistics.median(times))))
    return sorted(rows, key=lambda row: (row.part.startswith("user"), -row.micros))


@dataclass(frozen=True)
class Loop:
    """What a call takes more than the loop by hand, in microseconds.

    Attributes:
        per_call: for a call, whatever its number of pieces.
        per_piece: for each piece.
    """

    per_call: float
    per_piece: float


def per_call_and_piece(workload: Workload, calls: int, seconds: float) -> Loop:
    """The difference between both loops at two numbers of pieces, and from it the cost of a call and of a piece.

    Medians of differences between neighbouring steps, taken in turns: meant for workloads with little work in them.

    Args:
        workload: what to train; its batch has more than one piece.
        calls: how many to measure at most.
        seconds: time at most; five rounds are run all the same.
    """
    many = workload.samples // workload.size
    few = 1
    short = with_pieces(workload, few)
    extra: dict[str, list[float]] = defaultdict(list)
    with make_runtime(workload) as mbs:

        def took(run: Callable[[], object]) -> float:
            workload.model.zero_grad()
            wait(workload.device)
            began = time.perf_counter()
            run()
            wait(workload.device)
            return time.perf_counter() - began

        for each in (workload, short) * WARM:
            mbs.backward(each.loss_fn, each.batch)
        began = time.perf_counter()
        while len(extra["many"]) < calls and (len(extra["many"]) < 5 or time.perf_counter() - began < seconds):
            for name, each in (("many", workload), ("few", short)):
                elastic = took(partial(mbs.backward, each.loss_fn, each.batch))
                extra[name].append(elastic - took(each.by_hand))
    middle = {name: 1e6 * statistics.median(values) for name, values in extra.items()}
    per_piece = (middle["many"] - middle["few"]) / (many - few)
    return Loop(middle["few"] - few * per_piece, per_piece)


WARM = 10
"""Calls before the measurement: the runtime settles, and every cache is filled."""


def make_runtime(workload: Workload) -> ElasticMBS:
    """A runtime as a user would make it, whose size stays where it is."""
    return ElasticMBS(
        workload.model,
        micro_batch_size=workload.size,
        count=workload.count,
        policy=Policy(min_micro_batch_size=1, max_micro_batch_size=workload.size),
    )
