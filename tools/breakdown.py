"""Where the engine's microseconds go in a call without events: a profile by function, and what a call and a piece cost."""

from __future__ import annotations

import cProfile
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import elastic_mbs
from elastic_mbs import ElasticMBS, Policy
from tools.workloads import Workload, wait, with_pieces

PACKAGE = Path(elastic_mbs.__file__).parent
SHOWN = 25


@dataclass(frozen=True)
class Row:
    """What one function of the engine takes in a call, with the built-in functions that it calls."""

    part: str  # module and name; "user" for all that is not the engine's
    micros: float  # microseconds in a call
    times: float  # how often it runs in a call


def by_part(workload: Workload, calls: int, seconds: float) -> list[Row]:
    """What each function of the engine takes in a call without events, the most expensive first, last the user's own forward and backward.

    The profiler adds about half a microsecond to each run of a function.

    Args:
        workload: what to train.
        calls: how many to measure at most.
        seconds: time at most; five calls are run all the same.
    """
    profile, done = cProfile.Profile(time.process_time), 0  # processor time: neighbours on the machine do not count
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
            continue  # a built-in function: counted where it is called
        path = Path(code.code.co_filename)
        part = f"{path.relative_to(PACKAGE)}:{code.code.co_qualname}" if path.is_relative_to(PACKAGE) else "user"
        spent[part] += code.inlinetime + sum(each.totaltime for each in code.calls or () if isinstance(each.code, str))
        times[part] += code.callcount
    rows = [Row(part, 1e6 * spent[part] / done, times[part] / done) for part in spent]
    return sorted(rows, key=lambda row: (row.part == "user", -row.micros))


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
