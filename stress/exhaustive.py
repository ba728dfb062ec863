"""Every place a call can fail: out of memory at every operation, and the outcome compared with a reference.

    python -m stress.exhaustive [CASE …] [--stride N] [--json FILE]

The only outcomes allowed are the right gradient, with buffers and random streams of a run that never failed, or a typed error with everything as
it was at the call's start.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from elastic_mbs import ElasticMBS, ElasticMBSError, RecoveryError
from elastic_mbs.accumulate import Counts
from elastic_mbs.batch import BatchView, map_tensors
from elastic_mbs.losses import read_losses, weighted_sum
from elastic_mbs.memory import NoSensor
from elastic_mbs.testing import InjectOOM

from .cases import CASES, Case, build

SIZE = 4
"""Micro-batch at the start: two pieces, so that a failure can meet a batch that is partly accumulated."""

PATTERNS: dict[str, tuple[int, ...] | None] = {"once": (), "twice": (3,), "three times": (7, 12), "persistent": None}
"""Distances from the first fault to the others; None: everything fails from the first on."""


REFERENCES = {"compiled": "mlp"}
"""Cases whose reference is another one: what is compiled must equal what is not."""


class WrongOutcomeError(AssertionError):
    """Neither the right gradient nor a typed error with its state."""


@dataclass(frozen=True)
class State:
    """Everything that a call may change."""

    grads: list[Tensor | None]
    buffers: list[Tensor]
    streams: tuple[Any, ...]

    @classmethod
    def of(cls, case: Case) -> State:
        """The state now, copied."""
        return cls(
            [None if leaf.grad is None else leaf.grad.clone() for leaf in case.leaves()],
            [buffer.clone() for buffer in case.model.buffers()],
            (torch.get_rng_state(), random.getstate(), np.random.get_state()),
        )


def same_streams(a: State, b: State) -> bool:
    """Whether all random streams stand at the same place."""
    return torch.equal(a.streams[0], b.streams[0]) and a.streams[1] == b.streams[1] and repr(a.streams[2]) == repr(b.streams[2])


def error_of(got: Sequence[Tensor | None], wanted: Sequence[Tensor | None]) -> float:
    """Largest relative difference over the leaves, infinite where one has a gradient and the other has none."""
    worst = 0.0
    for a, b in zip(got, wanted, strict=True):
        if (a is None) != (b is None):
            return float("inf")
        if a is not None and b is not None:
            left, right = a.to_dense().double(), b.to_dense().double()
            worst = max(
                worst, ((left - right).abs().max() / right.abs().max().clamp_min(1e-300)).item() if right.abs().max() > 0 else left.abs().max().item()
            )
    return worst


def reference(name: str, partition: tuple[tuple[int, int], ...]) -> State:
    """The state after a hand-written accumulation over this partition, without the engine and without a failure."""
    return _reference(name, partition)


@lru_cache(maxsize=4096)
def _reference(name: str, partition: tuple[tuple[int, int], ...]) -> State:
    case = build(REFERENCES.get(name, name))
    view = BatchView(case.batch)
    counts = Counts.read(case.options.get("count"), view)
    scaler, wide = case.options.get("scaler"), case.options.get("accumulate_dtype")
    totals: dict[Tensor, Tensor] = {}
    for start, stop in partition:
        piece = map_tensors(view.piece(start, stop), torch.clone) if name == "edited_batch" else view.piece(start, stop)
        terms = read_losses(case.loss_fn(piece), counts.names)[0]
        loss = weighted_sum(terms, {key: counts.weight(start, stop, key) for key in counts.names or (None,)})
        (loss if scaler is None else scaler.scale(loss)).backward()
        if wide is not None:
            for leaf in case.leaves():
                if leaf.grad is not None:
                    totals[leaf] = totals[leaf] + leaf.grad if leaf in totals else leaf.grad.to(wide)
                    leaf.grad = None
    for leaf, total in totals.items():
        leaf.grad = total.to(leaf.dtype)
    return State.of(case)


@dataclass(frozen=True)
class Run:
    """The outcome of one call under injection.

    Attributes:
        hits: faults that struck.
        operations: operations that could have failed.
        error: the typed error, or None.
        worst: largest relative difference of a gradient from the reference.
        modes: how failures were replayed.
    """

    hits: int
    operations: int
    error: str | None
    worst: float
    modes: tuple[str, ...]


def whole_batch(case: Case) -> tuple[tuple[int, int], ...]:
    """The partition of a batch that is not split."""
    return ((0, BatchView(case.batch).length),)


def run(name: str, inject: InjectOOM, *, warm: bool, door: int = 1, case: Case | None = None) -> Run:
    """Runs one call of a case under injection and checks its outcome.

    Args:
        name: of the case.
        inject: what fails.
        warm: whether the runtime has seen a clean call of this case before.
        door: 1 (`backward`) or 3 (the loop written out).
        case: a case to run again, where building it costs too much.

    Raises:
        WrongOutcomeError: the outcome is not one of those allowed.
    """
    case = case or build(name)
    modes: list[str] = []
    mbs = ElasticMBS(
        case.model,
        micro_batch_size=SIZE,
        grow=False,
        sensor=NoSensor("no readings under injection"),
        monitor_interval=0,
        wait_for_memory=0,
        on_event=lambda event: modes.append(getattr(event, "mode", "")),
        **case.options,
    )
    try:
        if warm:
            _warm_up(case, mbs)
        start = State.of(case)
        error: ElasticMBSError | None = None
        if case.backend is not None:
            case.backend.inject = inject
        with nullcontext() if case.backend is not None else inject:
            try:
                partition = _call(mbs, case, door)
            except ElasticMBSError as caught:
                error = caught
        if case.backend is not None:
            case.backend.inject = None
        end = State.of(case)
        notes = "\n".join(getattr(error, "__notes__", []))
    finally:
        mbs.close()
    replays = tuple(mode for mode in modes if mode)
    where = f"{name}, {'warm' if warm else 'cold'}, door {door}, faults at {inject.hits}, modes {replays}"
    if error is not None:
        _check_error(error, notes, start, end, where)
        return Run(len(inject.hits), inject.count, type(error).__name__, 0.0, replays)
    wanted = [reference(name, partition)]
    if case.separable:
        wanted.append(reference(name, whole_batch(case)))
    worst = min(error_of(end.grads, state.grads) for state in wanted) if case.separable else error_of(end.grads, wanted[0].grads)
    if not worst <= case.tolerance:
        raise WrongOutcomeError(f"gradient off by {worst:.3g} ({where}, partition {partition})")
    if any(not torch.allclose(a.double(), b.double(), rtol=1e-12, atol=1e-14) for a, b in zip(end.buffers, wanted[0].buffers, strict=True)):
        raise WrongOutcomeError(f"buffers differ from a run without failures ({where}, partition {partition})")
    if not same_streams(end, wanted[0]):
        raise WrongOutcomeError(f"random streams differ from a run without failures ({where})")
    return Run(len(inject.hits), inject.count, None, worst, replays)


def _call(mbs: ElasticMBS, case: Case, door: int) -> tuple[tuple[int, int], ...]:
    if door == 1:
        return mbs.backward(case.loss_fn, case.batch).partition
    for micro in mbs.micro_batches(case.batch):
        with micro:
            micro.backward(case.loss_fn(micro.data))
    assert mbs.last_result is not None
    return mbs.last_result.partition


def _warm_up(case: Case, mbs: ElasticMBS) -> None:
    """One clean call, and everything it changed put back."""
    start, objects = State.of(case), [leaf.grad for leaf in case.leaves()]
    batch = map_tensors(case.batch, lambda t: t.detach().clone())
    mbs.backward(case.loss_fn, case.batch)
    with torch.no_grad():
        for leaf, grad, value in zip(case.leaves(), objects, start.grads, strict=True):
            leaf.grad = grad if grad is None or value is None else grad.copy_(value)
        for buffer, value in zip(case.model.buffers(), start.buffers, strict=True):
            buffer.copy_(value)
        for tensor, value in zip(BatchView(case.batch).tensors(), BatchView(batch).tensors(), strict=True):
            if not torch.equal(tensor, value):
                tensor.copy_(value)
    torch.set_rng_state(start.streams[0])
    random.setstate(start.streams[1])
    np.random.set_state(start.streams[2])  # the legacy stream is what such models use


def _check_error(error: ElasticMBSError, notes: str, start: State, end: State, where: str) -> None:
    if not isinstance(error, RecoveryError):
        raise WrongOutcomeError(f"{type(error).__name__} is not what running out of memory should end in ({where}): {error}")
    for before, after in zip(start.grads, end.grads, strict=True):
        if before is None and after is not None:
            raise WrongOutcomeError(f"a gradient that was empty is not empty after {type(error).__name__} ({where})")
        if before is not None and "zero_grad()" not in notes and (after is None or error_of([after], [before]) > 0):
            raise WrongOutcomeError(f"a gradient changed, and {type(error).__name__} does not say so ({where})")
    if any(not torch.equal(a, b) for a, b in zip(start.buffers, end.buffers, strict=True)):
        raise WrongOutcomeError(f"buffers are not as at the start after {type(error).__name__} ({where})")
    if not same_streams(start, end):
        raise WrongOutcomeError(f"random streams are not as at the start after {type(error).__name__} ({where})")


def sweep(name: str, *, warm: bool, pattern: str, door: int = 1, stride: int = 1) -> Iterator[Run]:
    """Runs a case with the first fault at operation 1, 1 + stride, … until a run meets none."""
    distances = PATTERNS[pattern]
    first = build(name)
    again, start = (first, State.of(first)) if first.backend is not None else (None, None)  # compiling once a sweep is slow enough
    n = 1
    while True:
        inject = InjectOOM(always_from=n) if distances is None else InjectOOM(at=(n, *(n + distance for distance in distances)))
        if again is not None and start is not None:
            for leaf in again.leaves():
                leaf.grad = None
            torch.set_rng_state(start.streams[0])
        outcome = run(name, inject, warm=warm, door=door, case=again)
        if not outcome.hits:
            return
        yield outcome
        n += stride


@dataclass
class Summary:
    """What the sweeps of one case came to."""

    case: str
    points: int = 0
    exact: int = 0
    worst: float = 0.0
    errors: Counter[str] = field(default_factory=Counter)
    modes: Counter[str] = field(default_factory=Counter)

    def add(self, outcome: Run) -> None:
        """Counts one injection."""
        self.points += 1
        self.exact += outcome.error is None
        self.worst = max(self.worst, outcome.worst)
        self.modes.update(outcome.modes)
        if outcome.error is not None:
            self.errors[outcome.error] += 1


def main(argv: Sequence[str] | None = None) -> int:
    """Sweeps the cases and prints a table; returns 1 if any outcome was wrong."""
    parser = argparse.ArgumentParser(prog="python -m stress.exhaustive", description=__doc__)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"one or more of: {', '.join(CASES)} (all by default)")
    parser.add_argument("--stride", type=int, default=1, help="strike at every n-th operation only")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args(argv)
    unknown = [name for name in options.cases if name not in CASES]
    if unknown or options.stride < 1:
        parser.error(f"unknown case {unknown[0]!r}" if unknown else f"--stride {options.stride} is below 1")
    torch.set_num_threads(1)
    gc.freeze()  # recovery collects garbage; what has been imported by now need not be looked at each time
    wrong, table, began = 0, [], time.monotonic()
    for name in options.cases or CASES:
        summary = Summary(name)
        for warm in (False, True):
            for pattern in PATTERNS:
                for door in (1, 3):
                    try:
                        for outcome in sweep(name, warm=warm, pattern=pattern, door=door, stride=options.stride):
                            summary.add(outcome)
                    except WrongOutcomeError as error:
                        wrong += 1
                        print(f"WRONG {pattern}: {error}", flush=True)
        table.append(summary)
        modes, errors = ", ".join(f"{k} {v}" for k, v in summary.modes.items()), ", ".join(f"{k} {v}" for k, v in summary.errors.items())
        print(
            f"{name:28} {summary.points:6} points  {summary.exact:6} exact  worst {summary.worst:.1e}  replays: {modes}  errors: {errors}", flush=True
        )
    points, worst = sum(s.points for s in table), max(s.worst for s in table)
    print(f"{points} injection points, {sum(s.exact for s in table)} exact, {wrong} wrong, worst error {worst:.1e}, {time.monotonic() - began:.0f} s")
    if options.json is not None:
        cases = [{**vars(summary), "errors": dict(summary.errors), "modes": dict(summary.modes)} for summary in table]
        figures = {"torch": torch.__version__, "stride": options.stride, "points": points, "wrong": wrong, "cases": cases}
        options.json.write_text(json.dumps(figures, indent=1) + "\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
