"""The loops that a user writes: over the pieces of a batch by hand, which is what everything is compared with, and over those of a runtime."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from elastic_mbs import ElasticMBS, StepResult
from elastic_mbs.batch.counts import Counts
from elastic_mbs.batch.loss_terms import read_losses, weighted_sum
from elastic_mbs.batch.view import BatchView

from ..models.subject import Subject

Partition = Sequence[Sequence[int]]


def view_of(subject: Subject, batch: Any) -> BatchView:
    """How the batch is cut, as the subject's options say."""
    return BatchView(batch, subject.options.get("dims"))


def accumulate(subject: Subject, view: BatchView, pieces: Partition, *, backward: bool = True) -> float:
    """Adds the gradient of a batch piece by piece, unless only the loss is wanted; returns that."""
    counts = Counts.read(subject.options.get("count"), view)
    total = 0.0
    for start, stop in pieces:
        weights = counts.weights(start, stop, reduction=subject.options.get("reduction", "mean"))
        if weights is not None:
            loss = weighted_sum(read_losses(subject.loss_fn(view.piece(start, stop)), counts.names)[0], weights)
            if backward:
                loss.backward()
            total += float(loss.detach())
    return total


def by_loop(mbs: ElasticMBS, loss_fn: Callable[[Any], Any], batch: Any) -> StepResult:
    """One batch through the third door, the loop written out."""
    for micro in mbs.micro_batches(batch):
        with micro:
            micro.backward(loss_fn(micro.data))
    assert mbs.last_result is not None
    return mbs.last_result
