"""Checks of a call against an accumulation loop by hand over the same pieces."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from elastic_mbs import StepResult

from ..models.plan import Plan
from ..models.setup import CONTAINERS, Setup, counts_by_hand
from ..reference.by_hand import Partition, add_up, check_covered, weights_of
from ..reference.samples import Samples, mapped
from ..reference.state import State, demand, error_of

TOLERANCE = 1e-12
# Smallest part of the largest gradient that a leaf's counts as, beside the whole batch's: one that
# cancels is as exact as its terms.
FLOOR = 1e-2
SCALE = 4.0  # factor of a GradScaler


def accumulate(setup: Setup, batch: Any, pieces: Partition) -> tuple[float, Tensor]:
    """Add the gradient of a whole batch's loss to a setup, over these pieces.

    Returns the loss, and the scores of the pieces in their order.
    """
    plan = setup.plan
    scores = list[Tensor]()
    view = Samples(batch, {"dims": CONTAINERS[plan.container].dims})
    counts = counts_by_hand(plan, batch)

    def terms(start: int, stop: int) -> dict[str, Tensor]:
        found, scored = setup.terms(view.piece(start, stop))
        scores.append(scored.detach())
        return found

    def weigh(start: int, stop: int) -> dict[str, float]:
        return weights_of(counts, start, stop, plan.reduction)

    wide = torch.float32 if plan.half else None
    scale = SCALE if plan.scaler else 1.0
    return add_up(
        terms, pieces, weigh, setup.leaves(), wide=wide, scale=lambda loss: loss * scale
    ), torch.cat(scores)


def check_partition(plan: Plan, result: StepResult, batch: Any, where: str) -> None:
    """Check that the pieces cover the batch once, in its order, and keep to the options."""
    check_covered(result.partition, plan.samples, where)
    demand(
        list(result.partition) == sorted(result.partition),
        f"{where}pieces are not in the batch's order: {result.partition}",
    )
    for start, stop in result.partition:
        piece = f"{where}the piece {start}:{stop}"
        demand(
            stop - start >= min(plan.minimum, plan.samples),
            f"{piece} is below the minimum of {plan.minimum}",
        )
        demand(start % plan.align == 0, f"{piece} does not begin at a multiple of {plan.align}")
        bounded = plan.maximum and plan.minimum == plan.align == 1
        demand(
            not bounded or stop - start <= plan.maximum,
            f"{piece} is above the maximum of {plan.maximum}",
        )


def check_result(
    before: Setup, start: State, real: Setup, result: StepResult, batch: Any, where: str
) -> float:
    """Check a result against a loop by hand over the same pieces, made on `before`.

    Gradients are compared with the whole batch's, too. Returns their largest error.
    """
    plan = real.plan
    tolerance = _tolerance(plan)
    now = State.of(real.leaves(), real.model)
    twin, whole = before.twin(), before.twin()
    start.streams.restore()
    loss, scores = accumulate(twin, mapped(batch, torch.clone), result.partition)
    worst = error_of(real.grads(), _with_zeros(twin.grads(), real.grads()))
    demand(
        worst <= tolerance, f"{where}gradient off by {worst:.3g} over the pieces {result.partition}"
    )
    now.demand_rest_of(State.of(twin.leaves(), twin.model), TOLERANCE, where)
    close = math.isclose(float(result), loss, rel_tol=1e-2 if plan.half else 1e-11, abs_tol=1e-12)
    demand(close, f"{where}the loss is {float(result)!r}, not {loss!r}")
    _check_outputs(plan, result.outputs, scores, where)
    if plan.separable:
        accumulate(whole, mapped(batch, torch.clone), [(0, plan.samples)])
        error = error_of(_with_zeros(real.grads(), whole.grads()), whole.grads(), floor=FLOOR)
        demand(error <= TOLERANCE, f"{where}gradient off by {error:.3g} from the whole batch's")
        worst = max(worst, error)
    now.streams.restore()
    return worst


def _with_zeros(grads: list[Tensor | None], others: list[Tensor | None]) -> list[Tensor | None]:
    """Return gradients, with zeros for none where the other side has zeros.

    Samples that count nothing run no backward in a piece of their own. Beside others they add zeros
    to leaves that only they reach.
    """
    pairs = zip(grads, others, strict=True)
    return [
        torch.zeros_like(b) if a is None and b is not None and not b.to_dense().any() else a
        for a, b in pairs
    ]


def _tolerance(plan: Plan) -> float:
    """Return the error that a plan may have: half precision rounds by a piece's place in memory."""
    return 2e-2 if plan.half else TOLERANCE


def _check_outputs(plan: Plan, outputs: Any, scores: Tensor, where: str) -> None:
    if plan.returns == "loss" or plan.outputs == "none":
        demand(outputs is None, f"{where}there are outputs although none were returned or wanted")
        return
    found = (
        outputs
        if plan.returns == "pair"
        else outputs["scores"]
        if plan.returns == "dict"
        else outputs.scores
    )
    tolerance = _tolerance(plan)
    same = (
        isinstance(found, Tensor)
        and found.shape == scores.shape
        and torch.allclose(
            found.to(scores.device), scores, rtol=max(1e-10, tolerance), atol=tolerance
        )
    )
    demand(same, f"{where}the outputs are not those of the committed pieces in their order")
