"""The gradient that has to come out: an accumulation loop as a person writes it, without the runtime."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor

from elastic_mbs.batch.view import BatchView

from ..reference.state import WrongOutcomeError
from .batches import counts_by_hand, dims_of
from .setup import Setup

Partition = Sequence[tuple[int, int]]


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
    view = BatchView(batch, dims_of(plan))
    counts = counts_by_hand(plan, batch)
    loss, scores = 0.0, []
    leaves = setup.leaves()
    wide: dict[int, Tensor] = {id(leaf): leaf.grad.float() for leaf in leaves if plan.half and leaf.grad is not None}
    for start, stop in pieces:
        terms, found = setup.terms(view.piece(start, stop))
        total: Tensor | None = None
        for name, term in terms.items():
            own, all_ = sum(counts[name][start:stop], Fraction(0)), sum(counts[name], Fraction(0))
            if own == 0:
                continue  # its mean is 0/0
            weighed = (term.float() if plan.half else term) * (1.0 if plan.reduction == "sum" else float(own / all_))
            total = weighed if total is None else total + weighed
        if total is None:
            raise WrongOutcomeError(f"samples {start}:{stop} were run, and nothing in them counts")
        if plan.half:
            for leaf in leaves:
                leaf.grad = None
        (total * scale).backward()
        if plan.half:
            for leaf in leaves:
                if leaf.grad is not None:
                    wide[id(leaf)] = wide[id(leaf)] + leaf.grad if id(leaf) in wide else leaf.grad.float()
        loss += float(total.detach())
        scores.append(found.detach())
    if plan.half:
        for leaf in leaves:
            leaf.grad = wide[id(leaf)].to(leaf.dtype) if id(leaf) in wide else None
    return Wanted(loss, torch.cat(scores))
