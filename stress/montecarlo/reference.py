"""The gradient that has to come out: an accumulation loop as a person writes it, without the runtime."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor

from elastic_mbs.batch.view import BatchView

from ..reference.by_hand import Partition, add_up
from ..reference.state import WrongOutcomeError
from .batches import counts_by_hand, dims_of
from .setup import Setup


@dataclass
class Wanted:
    """What a call has to give, beside the gradients that it leaves in the setup.

    Attributes:
        loss: of the whole batch.
        scores: of the pieces, one after the other.
    """

    loss: float
    scores: Tensor


def accumulate(setup: Setup, batch: Any, pieces: Partition, scale: float = 1.0) -> Wanted:
    """Adds the gradient of the batch's loss to `setup`, piece by piece.

    Args:
        setup: with what gradients it has.
        batch: whole.
        pieces: ranges of its samples that count.
        scale: what the loss is multiplied by.
    """
    plan = setup.plan
    view, counts, scores = BatchView(batch, dims_of(plan)), counts_by_hand(plan, batch), list[Tensor]()

    def terms(start: int, stop: int) -> dict[str, Tensor]:
        found, scored = setup.terms(view.piece(start, stop))
        scores.append(scored.detach())
        return found

    def weigh(start: int, stop: int) -> dict[str, float]:
        own = {name: sum(each[start:stop], Fraction(0)) for name, each in counts.items()}
        if not any(own.values()):
            raise WrongOutcomeError(f"samples {start}:{stop} were run, and nothing in them counts")
        # a mean over nothing is 0/0, and left out
        return {name: float(bool(part) if plan.reduction == "sum" else part / sum(counts[name], Fraction(0))) for name, part in own.items()}

    wide = torch.float32 if plan.half else None
    loss = add_up(terms, pieces, weigh, setup.leaves(), wide=wide, scale=lambda loss: loss * scale)
    return Wanted(loss, torch.cat(scores))
