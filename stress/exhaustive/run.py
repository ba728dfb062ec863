"""One call with chosen operations failing, and a sweep over all of them: n = 1, 2, …, until a run has no failure.

The only outcomes allowed are the right gradient, with buffers and random streams of a run that never failed, or a typed error with everything as
it was at the call's start.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass

import torch

from elastic_mbs import ElasticMBS, ElasticMBSError, OutOfMemory, RecoveryError, StepResult
from elastic_mbs.batch.containers import tensors_in
from elastic_mbs.batch.view import map_tensors
from elastic_mbs.memory import NoSensor
from elastic_mbs.testing import InjectOOM

from ..by_hand import by_loop
from ..cases import Case
from ..flat_options import grouped
from ..state import State, WrongOutcomeError, error_of
from .target import Target, reference, whole_batch

PATTERNS: dict[str, tuple[int, ...] | None] = {"once": (), "twice": (3,), "three times": (7, 12), "persistent": None}
"""Distances from the first fault to the others; None: everything fails from the first on."""


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


def run(target: Target, inject: InjectOOM, *, warm: bool, door: int = 1, case: Case | None = None) -> Run:
    """Runs one call of a case under injection and checks its outcome.

    Args:
        target: whose call.
        inject: what fails.
        warm: whether the runtime has seen a clean call of it before.
        door: 1 (`backward`) or 3 (the loop written out).
        case: a case to run again, where building it costs too much.

    Raises:
        WrongOutcomeError: the outcome is not one of those allowed.
    """
    case = case or target.build()
    modes: list[str] = []
    mbs = ElasticMBS(
        case.model,
        **grouped(
            {
                "micro_batch_size": target.size,
                "grow": False,
                **case.options,
                "sensor": NoSensor("no readings under injection"),
                "monitor_interval": 0,
                "wait_for_memory": 0,
                "on_event": lambda event: modes.append(event.mode) if isinstance(event, OutOfMemory) else None,
            }
        ),
    )
    try:
        if warm:
            _warm_up(case, mbs)
        start = State.of(case.leaves(), case.model)
        error: ElasticMBSError | None = None
        if case.backend is not None:
            case.backend.inject = inject
        with nullcontext() if case.backend is not None else inject:
            try:
                result = _call(mbs, case, door)
            except ElasticMBSError as caught:
                error = caught
        if case.backend is not None:
            case.backend.inject = None
        end = State.of(case.leaves(), case.model)
        notes = "\n".join(getattr(error, "__notes__", []))
    finally:
        mbs.close()
    replays = tuple(modes)
    where = f"{target.name}, {'warm' if warm else 'cold'}, door {door}, faults at {inject.hits}, modes {replays}"
    if error is not None:
        _check_error(error, notes, start, end, where)
        return Run(len(inject.hits), inject.count, type(error).__name__, 0.0, replays)
    partition, covered = result.partition, 0
    for begin, stop in sorted([*partition, *result.skipped]):
        if begin != covered:
            raise WrongOutcomeError(f"samples {covered}:{begin} are missing or doubled ({where}, partition {partition})")
        covered = stop
    if covered != whole_batch(target)[-1][1]:
        raise WrongOutcomeError(f"samples from {covered} on are missing ({where}, partition {partition})")
    wanted = [reference(target, partition)]
    if case.separable:
        wanted.append(reference(target, whole_batch(target)))
    worst = min(error_of(end.grads, state.grads) for state in wanted) if case.separable else error_of(end.grads, wanted[0].grads)
    if not worst <= case.tolerance:
        raise WrongOutcomeError(f"gradient off by {worst:.3g} ({where}, partition {partition})")
    if any(not torch.allclose(a.double(), b.double(), rtol=case.tolerance, atol=1e-14) for a, b in zip(end.buffers, wanted[0].buffers, strict=True)):
        raise WrongOutcomeError(f"buffers differ from a run without failures ({where}, partition {partition})")
    if not end.streams.same(wanted[0].streams):
        raise WrongOutcomeError(f"random streams differ from a run without failures ({where})")
    return Run(len(inject.hits), inject.count, None, worst, replays)


def _call(mbs: ElasticMBS, case: Case, door: int) -> StepResult:
    if door == 1:
        return mbs.backward(case.loss_fn, case.batch)
    return by_loop(mbs, case.loss_fn, case.batch)


def _warm_up(case: Case, mbs: ElasticMBS) -> None:
    """One clean call, and everything it changed put back."""
    start, objects = State.of(case.leaves(), case.model), [leaf.grad for leaf in case.leaves()]
    batch = map_tensors(case.batch, lambda t: t.detach().clone())
    mbs.backward(case.loss_fn, case.batch)
    with torch.no_grad():
        for leaf, grad, value in zip(case.leaves(), objects, start.grads, strict=True):
            leaf.grad = grad if grad is None or value is None else grad.copy_(value)
        for buffer, value in zip(case.model.buffers(), start.buffers, strict=True):
            buffer.copy_(value)
        for tensor, value in zip(tensors_in(case.batch), tensors_in(batch), strict=True):
            if not torch.equal(tensor, value):
                tensor.copy_(value)
    start.streams.restore()


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
    if not start.streams.same(end.streams):
        raise WrongOutcomeError(f"random streams are not as at the start after {type(error).__name__} ({where})")


def sweep(target: Target, *, warm: bool, pattern: str, door: int = 1, stride: int = 1) -> Iterator[Run]:
    """Runs a case with the first fault at operation 1, 1 + stride, … until a run meets none."""
    distances = PATTERNS[pattern]
    first = target.build()
    again, start = (
        (first, State.of(first.leaves(), first.model)) if first.backend is not None else (None, None)
    )  # compiling once a sweep is slow enough
    n = 1
    while True:
        inject = InjectOOM(always_from=n) if distances is None else InjectOOM(at=(n, *(n + distance for distance in distances)))
        if again is not None and start is not None:
            for leaf in again.leaves():
                leaf.grad = None
            start.streams.restore()
        outcome = run(target, inject, warm=warm, door=door, case=again)
        if not outcome.hits:
            return
        yield outcome
        n += stride
