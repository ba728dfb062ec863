#!/usr/bin/env python3
"""Samples in a part of their memory: the smallest share of the activations that is enough.

    python benchmarks/inside.py [NAME…] [--escalate auto] [--half | --alone] [--json FILE]

Each model runs one sample on a CPU under a `MemoryBudget`, which counts bytes, so a busy machine
gives the same figures. The plain need is the peak of forward and backward above the weights and
the gradients: activations, logits and temporaries. With each share of it, from the smallest up,
one call of `backward` is made with `RecoveryOptions(escalate=)`; the first that ends well counts.
Its gradient is compared with the plain one, in double precision. The language models need
transformers; without it they are left out.

With `--half` the time of a step in half of the plain need is measured instead, against a plain step
with all memory, in turns: processor time, after the call that finds its way. With `--alone` it is
measured for each rung by itself, in the smallest share of the need in which that one trains.
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

# so that it runs from anywhere, installed or not
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.inside_models import BY_HAND, LANGUAGE, Subject, subject
from elastic_mbs import (
    ElasticMBS,
    Escalated,
    Event,
    MemoryBudget,
    MemoryOptions,
    MicroBatchFloorError,
    Policy,
    RecoveryOptions,
)
from elastic_mbs.options import RUNGS
from stress.reference.state import error_of

SHARES = (0.15, 0.2, 0.25, 0.35, 0.5, 0.75)
FINE = tuple(step / 20 for step in range(1, 20))
GOAL = 0.25
MIB = 2**20
AMPLE = "64GiB"


@dataclass(frozen=True)
class Row:
    """The outcome for one model.

    Attributes:
        name: the model.
        plain: bytes of a plain step above weights and gradients.
        share: the smallest share of them in which the sample trains; None if it does in none.
        rungs: the steps that were taken, in words.
        error: of the gradient, relative to its largest value by parameter, which counts
            as a millionth of the largest of all at least.
        reason: the largest tensors that were alive when the next smaller share did not do.
    """

    name: str
    plain: int
    share: float | None
    rungs: tuple[str, ...]
    error: float
    reason: str = ""


@dataclass(frozen=True)
class Time:
    """The time of one model in a part of its plain need.

    Attributes:
        name: the model.
        share: the part of the need.
        seconds: processor time of a plain step, the least of the rounds.
        slower: the time in that part over that of a plain step, the median of the rounds.
        rungs: the steps that were taken, in words.
    """

    name: str
    share: float
    seconds: float
    slower: float
    rungs: tuple[str, ...]


def timed(name: str, escalate: Any = "auto", share: float = 0.5, rounds: int = 5) -> Time:
    """Return the time of a step in a share of the plain need."""
    made = subject(name)
    gradients, plain = _needs(made)
    made.model.zero_grad()
    rungs: tuple[str, ...] = ()
    alone, ratios = list[float](), list[float]()
    for _ in range(rounds):
        with MemoryBudget(AMPLE, [made.model, made.sample]):
            alone.append(_seconds(lambda: made.loss_of(made.sample).backward()))
        made.model.zero_grad()
        seconds = list[float]()
        rungs = _trained(made, gradients + int(share * plain), escalate, seconds)
        ratios.append(seconds[0] / alone[-1])
        made.model.zero_grad()
    return Time(name, share, min(alone), statistics.median(ratios), rungs)


def each_alone(name: str, rounds: int = 5) -> Iterator[Time]:
    """Yield the time of each rung by itself, in the smallest share in which that one trains.

    A rung that helps nowhere is left out.
    """
    for rung in RUNGS:
        share = measured(name, (rung,), FINE).share
        if share is not None:
            yield timed(name, (rung,), share, rounds)


def _seconds(run: Callable[[], object]) -> float:
    began = time.process_time()
    run()
    return time.process_time() - began


def _needs(made: Subject) -> tuple[int, int]:
    """Make a plain step; return the bytes of gradients, and of everything else that it took."""
    gradients = sum(each.nbytes for each in made.model.parameters())
    with MemoryBudget(AMPLE, [made.model, made.sample]) as budget:
        before = budget.live
        made.loss_of(made.sample).backward()
        return gradients, budget.peak - before - gradients


def measured(name: str, escalate: Any = "auto", shares: Sequence[float] = SHARES) -> Row:
    """Return the smallest of the shares, in rising order, in which a sample trains."""
    made = subject(name)
    gradients, plain = _needs(made)
    wanted = _gradients(made)
    reason = ""
    for share in shares:
        try:
            rungs = _trained(made, gradients + int(share * plain), escalate)
        except MicroBatchFloorError as error:
            reason = str(error).partition("The largest of its tensors: ")[2].partition(". ")[0]
            continue
        return Row(name, plain, share, rungs, _error(made, wanted), reason)
    return Row(name, plain, None, (), 0.0, reason)


def _gradients(made: Subject) -> list[Tensor | None]:
    """Return the gradients, and take them from the parameters."""
    found = [parameter.grad for parameter in made.model.parameters()]
    made.model.zero_grad()
    return found


def _error(made: Subject, wanted: Sequence[Tensor | None]) -> float:
    # the bias of a key has no gradient but rounding, and by itself would be compared with that
    return error_of(_gradients(made), wanted, floor=1e-6)


def _trained(
    made: Subject, room: int, escalate: Any, seconds: list[float] | None = None
) -> tuple[str, ...]:
    """Run a call with so many bytes beside the weights; return the steps that it took.

    With `seconds` a second call is timed.
    """
    events = list[Event]()
    with MemoryBudget(AMPLE, [made.model, made.sample]) as budget:
        budget.limit = budget.live + room
        with ElasticMBS(
            made.model,
            policy=Policy(grow=False),
            memory=MemoryOptions(wait_for_memory=0, monitor_interval=0),
            recovery=RecoveryOptions(escalate=escalate),
            on_event=events.append,
        ) as mbs:
            mbs.backward(made.loss_of, made.sample)
            if seconds is not None:
                made.model.zero_grad()
                seconds.append(_seconds(lambda: mbs.backward(made.loss_of, made.sample)))
    taken = [event for event in events if isinstance(event, Escalated)]
    last = {event.by: f"{event.by} ({event.part})" if event.part else event.by for event in taken}
    return tuple(last.values())


def line(row: Row) -> str:
    """Return a row of the table."""
    share = "none" if row.share is None else f"{row.share:.2f}"
    plain = f"{row.plain / MIB:.1f} MiB"
    return f"{row.name:20}  {plain:>9}  {share:>5}  {row.error:7.0e}  {', '.join(row.rungs)}"


def summary(rows: Sequence[Row]) -> str:
    """Return how many models reach the goal, and why the others do not."""
    missed = [row for row in rows if row.share is None or row.share > GOAL]
    reached = f"{len(rows) - len(missed)} of {len(rows)} in {GOAL} of the plain need or less"
    return "\n".join([reached, *(f"{row.name} needs more: {row.reason}" for row in missed)])


def _table(names: Sequence[str], escalate: Any) -> list[Row]:
    print(f"{'model':20}  {'plain':>9}  {'share':>5}  {'error':>7}  rungs")
    rows = list[Row]()
    for name in names:
        rows.append(measured(name, escalate))
        print(line(rows[-1]), flush=True)
    print(summary(rows))
    return rows


def _times(rows: Iterable[Time]) -> list[Time]:
    print(f"{'model':20}  share  {'seconds':>7}  slower  rungs")
    found = list[Time]()
    for row in rows:
        found.append(row)
        way = ", ".join(row.rungs)
        print(
            f"{row.name:20}  {row.share:5.2f}  {row.seconds:7.3f}  {row.slower:4.2f} ×  {way}",
            flush=True,
        )
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table; return 0."""
    names = [*(LANGUAGE if find_spec("transformers") else ()), *BY_HAND]
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(names)}")
    parser.add_argument("--escalate", nargs="+", default=["auto"], help="rungs, or auto")
    times = parser.add_mutually_exclusive_group()
    times.add_argument("--half", action="store_true", help="times in half of the plain need")
    times.add_argument("--alone", action="store_true", help="times of each rung by itself")
    parser.add_argument("--rounds", type=int, default=5, help="how often a time is taken")
    parser.add_argument("--json", type=Path, help="where to write the rows")
    given = parser.parse_args(argv)
    if unknown := set(given.names) - set(names):
        parser.error(f"no such model here: {', '.join(sorted(unknown))}")
    escalate = "auto" if given.escalate == ["auto"] else tuple(given.escalate)
    names = given.names or names
    rows: Sequence[Row | Time]
    if given.half:
        rows = _times(timed(name, escalate, rounds=given.rounds) for name in names)
    elif given.alone:
        rows = _times(row for name in names for row in each_alone(name, given.rounds))
    else:
        rows = _table(names, escalate)
    if given.json is not None:
        found = {"torch": torch.__version__, "rows": [asdict(row) for row in rows]}
        given.json.write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    logging.disable(logging.WARNING)  # not in main, which tests call: it is the process's own
    torch.set_num_threads(1)
    sys.exit(main())
