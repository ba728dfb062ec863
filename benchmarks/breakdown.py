"""Microseconds of the engine in a call without events.

A profile by function, and the cost of a call and of a piece.
"""

from __future__ import annotations

import cProfile
import gc
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import elastic_mbs
from benchmarks.workloads import Workload, wait, with_pieces
from elastic_mbs import ElasticMBS, Policy

PACKAGE = Path(elastic_mbs.__file__).parent
SHOWN = 25


@dataclass(frozen=True)
class Row:
    """Cost of one function of the engine in a call, with the built-in functions that it calls."""

    part: str  # module and name; "user" for everything outside the engine
    micros: float  # microseconds in a call
    times: float  # runs in a call


def by_part(workload: Workload, calls: int, seconds: float) -> list[Row]:
    """Return the cost of each function of the engine in a call without events.

    The most expensive comes first, the user's own forward and backward last. The profiler adds
    about
    half a microsecond to each run of a function.

    Args:
        workload: what to train.
        calls: how many to measure at most.
        seconds: time at most; five calls are run all the same.
    """
    # Processor time: neighbours on the machine do not count.
    profile = cProfile.Profile(time.process_time)
    done = 0
    with make_runtime(workload) as mbs:
        for _ in range(WARM):
            mbs.backward(workload.loss_fn, workload.batch)
        began = time.perf_counter()
        while done < calls and (done < 5 or time.perf_counter() - began < seconds):
            workload.model.zero_grad()
            wait(workload.device)
            profile.runcall(mbs.backward, workload.loss_fn, workload.batch)
            done += 1
    spent: dict[str, float] = defaultdict(float)
    times: dict[str, int] = defaultdict(int)
    for code in profile.getstats():
        if isinstance(code.code, str):
            continue  # a built-in function is counted where it is called
        path = Path(code.code.co_filename)
        part = (
            f"{path.relative_to(PACKAGE)}:{code.code.co_qualname}"
            if path.is_relative_to(PACKAGE)
            else "user"
        )
        spent[part] += code.inlinetime + sum(
            each.totaltime for each in code.calls or () if isinstance(each.code, str)
        )
        times[part] += code.callcount
    rows = [Row(part, 1e6 * spent[part] / done, times[part] / done) for part in spent]
    return sorted(rows, key=lambda row: (row.part == "user", -row.micros))


@dataclass(frozen=True)
class Loop:
    """Cost of a call beyond the loop by hand: a straight line through several numbers of pieces.

    Attributes:
        per_call: microseconds of processor time for a call, whatever its number of pieces.
        per_piece: microseconds more for each piece.
        opcodes_per_call: operations of Python's for a call.
        opcodes_per_piece: more for each piece. Unlike the time, these are the same on a busy
            machine.
        extra: microseconds of a whole step, by its number of pieces: the points of the line.
    """

    per_call: float
    per_piece: float
    opcodes_per_call: float
    opcodes_per_piece: float
    extra: Mapping[int, float]


def per_call_and_piece(workload: Workload, rounds: int, seconds: float) -> Loop:
    """Return the cost of a call and of a piece beyond the loop by hand, from 1, 2, 4 … pieces.

    Medians of differences between neighbouring steps, taken in turns, in processor time of this
    thread, which runs backward too on a CPU. One number of pieces after the other, as a run has
    batches of one length. Meant for workloads with little work in them, whose batch has several
    pieces.

    Args:
        workload: what to train.
        rounds: how many to measure of each number of pieces at most.
        seconds: time at most; five rounds are run all the same.
    """
    most = workload.samples // workload.size
    batches = {
        pieces: with_pieces(workload, pieces) for pieces in (1, 2, 4, 8, 16) if pieces <= most
    }
    with make_runtime(workload) as mbs:
        loops: dict[int, tuple[Callable[[], object], Callable[[], object]]] = {
            pieces: (each.by_hand, partial(mbs.backward, each.loss_fn, each.batch))
            for pieces, each in (*batches.items(), (most, workload))
        }
        for _ in range(WARM):
            for _, elastic in loops.values():
                elastic()
        extra: dict[int, float] = {}
        gc.disable()  # a collection would hit one loop and not the other
        try:
            for pieces, (by_hand, elastic) in loops.items():
                began = time.perf_counter()
                taken = list[float]()
                while len(taken) < rounds and (
                    len(taken) < 5 or time.perf_counter() - began < seconds / len(loops)
                ):
                    taken.append(_seconds(elastic, workload) - _seconds(by_hand, workload))
                extra[pieces] = 1e6 * statistics.median(taken)
                gc.collect()
        finally:
            gc.enable()
        opcodes = {
            pieces: [min(_opcodes(run, workload) for _ in range(5)) for run in pair]
            for pieces, pair in loops.items()
        }
    lines = (
        _line(extra),
        _line({pieces: second - first for pieces, (first, second) in opcodes.items()}),
    )
    return Loop(*lines[0], *lines[1], extra)


def _seconds(run: Callable[[], object], workload: Workload) -> float:
    workload.model.zero_grad()
    wait(workload.device)
    clock = time.thread_time if workload.device.type == "cpu" else time.perf_counter
    began = clock()
    run()
    wait(workload.device)
    return clock() - began


def _opcodes(run: Callable[[], object], workload: Workload) -> int:
    """Return the operations of Python's that `run` takes on this thread, torch's included."""
    count = 0

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal count
        frame.f_trace_opcodes = True
        frame.f_trace_lines = False
        count += event == "opcode"
        return trace

    workload.model.zero_grad()
    before = sys.gettrace()
    sys.settrace(trace)
    try:
        run()
    finally:
        sys.settrace(before)
    return count


def _line(points: Mapping[int, float]) -> tuple[float, float]:
    """Return the start at 0 and the slope of a straight line, by least squares.

    A measurement on n pieces has n times the variance.
    """
    weight = sum(1 / x for x in points)
    middle, height = len(points) / weight, sum(y / x for x, y in points.items()) / weight
    rise = sum((x - middle) * (y - height) / x for x, y in points.items()) / (
        sum((x - middle) ** 2 / x for x in points) or 1.0
    )
    return height - rise * middle, rise


WARM = 10
"""Calls before the measurement: the runtime settles, and every cache is filled."""


def make_runtime(workload: Workload) -> ElasticMBS:
    """Return a runtime as a user would make it, whose size stays where it is."""
    return ElasticMBS(
        workload.model,
        micro_batch_size=workload.size,
        count=workload.count,
        policy=Policy(min_micro_batch_size=1, max_micro_batch_size=workload.size),
    )
