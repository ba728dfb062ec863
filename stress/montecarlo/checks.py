"""What a call of a case has to leave behind."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from elastic_mbs import StepResult
from elastic_mbs.batch.view import map_tensors

from ..reference.by_hand import check_covered
from ..reference.state import State, WrongOutcomeError, error_of
from ..streams import Streams
from .batches import counts_by_hand
from .plan import Plan
from .reference import Wanted, accumulate
from .setup import Setup

TOLERANCE = 1e-12
FLOOR = 1e-2
"""A leaf whose gradient cancels to nearly nothing is as exact as the terms that cancel: beside the whole batch, whose sums run in another order, it
is held against this part of the largest gradient at least."""

SCALE = 4.0
"""What a GradScaler multiplies by."""


def demand(holds: bool, what: Callable[[], str] | str) -> None:
    """Ends the case unless `holds`."""
    if not holds:
        raise WrongOutcomeError(what if isinstance(what, str) else what())


def grads_of(setup: Setup) -> list[Tensor | None]:
    """The gradients that are there."""
    return [leaf.grad for leaf in setup.leaves()]


def check_partition(plan: Plan, result: StepResult, batch: Any, where: str) -> None:
    """The pieces cover the batch once, in its order, and keep to the options."""
    counts = counts_by_hand(plan, batch)
    ranges = sorted([*result.partition, *result.skipped])
    check_covered(ranges, plan.samples, f"{where}: ")
    demand(list(result.partition) == sorted(result.partition), f"{where}: pieces are not in the batch's order: {result.partition}")
    for start, stop in result.skipped:
        demand(not any(any(own[start:stop]) for own in counts.values()), f"{where}: samples {start}:{stop} count and were skipped")
    for start, stop in ranges:
        demand(stop - start >= min(plan.minimum, plan.samples), f"{where}: the piece {start}:{stop} is below the minimum of {plan.minimum}")
        demand(start % plan.align == 0, f"{where}: the piece {start}:{stop} does not begin at a multiple of {plan.align}")
        if plan.maximum and plan.minimum == plan.align == 1:
            demand(stop - start <= plan.maximum, f"{where}: the piece {start}:{stop} is above the maximum of {plan.maximum}")


def _beside_skipped(wanted: list[Tensor | None], found: list[Tensor | None], result: StepResult) -> list[Tensor | None]:
    """What is wanted, with a gradient of zeros in place of none where samples that do not count are skipped.

    A piece of such samples alone is skipped. In an attempt that failed half-way they may have been in a piece with others, as in the whole batch:
    then they have added zeros to leaves that only they reach.
    """
    if not result.skipped:
        return wanted
    return [
        torch.zeros_like(mine) if other is None and mine is not None and not mine.count_nonzero() else other
        for other, mine in zip(wanted, found, strict=True)
    ]


def check_state(real: Setup, twin: Setup, result: StepResult, batch: Any, before: State, where: str) -> float:
    """Gradients, buffers, random streams, loss and outputs are those of a loop by hand over the same pieces; gradients also the whole batch's.

    Args:
        real: after the call.
        twin: as `real` was before it.
        result: of the call.
        batch: as it was before it.
        before: what `real` had.
        where: for the error.

    Returns:
        The largest relative error of a gradient.
    """
    plan = real.plan
    after = Streams.now()
    scale = SCALE if plan.scaler else 1.0
    before.streams.restore()
    wanted = accumulate(twin, map_tensors(batch, torch.clone), result.partition, scale)
    worst = error_of(grads_of(real), _beside_skipped(grads_of(twin), grads_of(real), result))
    demand(worst <= TOLERANCE, f"{where}: gradient off by {worst:.3g} over the pieces {result.partition}")
    demand(after.same(Streams.now()), f"{where}: random streams are not where a run without failures leaves them")
    pairs = zip(real.model.buffers(), twin.model.buffers(), strict=True)
    demand(all(torch.allclose(a, b, rtol=TOLERANCE, atol=1e-14) for a, b in pairs), f"{where}: buffers differ from a run without failures")
    demand(real.counters() == twin.counters(), f"{where}: a module's own count differs from a run without failures")
    _check_loss_and_outputs(plan, result, wanted, where)
    if plan.separable:
        worst = max(worst, _check_whole(real, twin, batch, before, scale, where))
    after.restore()
    return worst


def _check_whole(real: Setup, twin: Setup, batch: Any, before: State, scale: float, where: str) -> float:
    for leaf, grad in zip(twin.leaves(), before.grads, strict=True):
        leaf.grad = None if grad is None else grad.clone()
    accumulate(twin, map_tensors(batch, torch.clone), [(0, real.plan.samples)], scale)
    for leaf, other in zip(twin.leaves(), real.leaves(), strict=True):
        if leaf.grad is not None and other.grad is None and not leaf.grad.to_dense().any():
            leaf.grad = None  # only samples that count nothing reach it, and those are left out where a piece has no others
    error = error_of(grads_of(real), grads_of(twin), floor=FLOOR)
    demand(error <= TOLERANCE, f"{where}: gradient off by {error:.3g} from the whole batch's")
    return error


def _check_loss_and_outputs(plan: Plan, result: StepResult, wanted: Wanted, where: str) -> None:
    close = math.isclose(float(result), wanted.loss, rel_tol=1e-2 if plan.half else 1e-11, abs_tol=1e-12)
    demand(close, f"{where}: the loss is {float(result)!r}, not {wanted.loss!r}")
    outputs = result.outputs
    if plan.returns == "loss" or plan.outputs == "none":
        demand(outputs is None, f"{where}: there are outputs although none were returned or wanted")
        return
    scores = outputs if plan.returns == "pair" else outputs["scores"] if plan.returns == "dict" else outputs.scores
    demand(
        isinstance(scores, Tensor) and scores.shape == wanted.scores.shape and torch.allclose(scores, wanted.scores, rtol=1e-10, atol=1e-12),
        f"{where}: the outputs are not those of the committed pieces in their order",
    )


def check_nothing_left(real: Setup) -> None:
    """A closed runtime has left no hook."""
    for leaf in real.leaves():
        demand(not leaf._post_accumulate_grad_hooks and not leaf._backward_hooks, "a closed runtime has left a hook on a leaf")
    for module in real.model.modules():
        demand(not module._forward_hooks and not module._forward_pre_hooks, "a closed runtime has left a hook on a module")
