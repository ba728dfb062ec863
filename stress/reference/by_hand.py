"""The loops that a user writes: over the pieces of a batch by hand, which is what everything is compared with, and over those of a runtime."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from elastic_mbs import ElasticMBS, StepResult
from elastic_mbs.batch.containers import tensors_in
from elastic_mbs.batch.counts import Counts
from elastic_mbs.batch.lengths import ByLength
from elastic_mbs.batch.loss_terms import read_losses
from elastic_mbs.batch.view import BatchView, map_tensors

from ..models.subject import Subject
from .state import demand

Partition = Sequence[Sequence[int]]
HALF = (torch.float16, torch.bfloat16)


def view_of(subject: Subject, batch: Any) -> BatchView:
    """How the batch is cut, as the subject's options say."""
    options = subject.options
    by_length = ByLength.of(
        options.get("pieces", "in_order"),
        options.get("length"),
        options.get("trim"),
        lambda kind, text: None,
    )
    return BatchView(batch, options.get("dims"), by_length=by_length)


def add_up(
    terms: Callable[[int, int], Mapping[Any, Tensor]],  # runs a piece and gives its losses by name
    pieces: Partition,
    # the weight of each loss of a piece; None leaves the piece out
    weigh: Callable[[int, int], Mapping[Any, float] | None],
    leaves: Iterable[Tensor] = (),
    *,
    # the type in which the leaves' gradients are summed, where it is another
    wide: torch.dtype | None = None,
    scale: Callable[[Tensor], Tensor] = lambda loss: loss,  # what a GradScaler does
    backward: bool = True,
) -> float:
    """Adds the gradient of a batch piece by piece, unless only its loss is wanted; returns that."""
    leaves = [] if wide is None else list(leaves)
    sums = {leaf: leaf.grad.to(wide) for leaf in leaves if leaf.grad is not None}
    total = 0.0
    for start, stop in pieces:
        weights = weigh(start, stop)
        if weights is None:
            continue
        parts = [
            (term.float() if term.dtype in HALF else term) * weights[name]
            for name, term in terms(start, stop).items()
            if weights[name]
        ]
        loss = sum(parts[1:], parts[0])
        total += float(loss.detach())
        if not backward:
            continue
        for leaf in leaves:
            leaf.grad = None
        scale(loss).backward()
        for leaf in leaves:
            if leaf.grad is not None:
                sums[leaf] = sums[leaf] + leaf.grad if leaf in sums else leaf.grad.to(wide)
    for leaf in leaves:
        leaf.grad = sums[leaf].to(leaf.dtype) if leaf in sums else None
    return total


def accumulate(
    subject: Subject,
    view: BatchView,
    pieces: Partition,
    *,
    backward: bool = True,
    scaler: torch.amp.GradScaler | None = None,
) -> float:
    """The same for a subject's batch, on the model's device, weighed as its options say."""
    options, device = subject.options, subject.leaves()[0].device
    if subject.over is not None:
        embeddings = [
            subject.loss_fn(map_tensors(view.piece(start, stop), lambda t: t.to(device)))
            for start, stop in pieces
        ]
        loss = subject.over(joined(embeddings))
        if backward:
            (loss if scaler is None else scaler.scale(loss)).backward()
        return float(loss.detach())
    counts = Counts.read(options.get("count"), view)
    return add_up(
        lambda start, stop: read_losses(
            subject.loss_fn(map_tensors(view.piece(start, stop), lambda t: t.to(device))),
            counts.names,
        )[0],
        pieces,
        lambda start, stop: counts.weights(start, stop, reduction=options.get("reduction", "mean")),
        subject.leaves(),
        wide=options.get("accumulate_dtype"),
        scale=(lambda loss: loss) if scaler is None else scaler.scale,
        backward=backward,
    )


def joined(embeddings: Sequence[Any]) -> Any:
    """The embeddings of all pieces, each of which has a graph."""
    parts = iter(list(map(torch.cat, zip(*map(tensors_in, embeddings), strict=True))))
    return map_tensors(embeddings[0], lambda tensor: next(parts))


def check_covered(pieces: Iterable[tuple[int, int]], length: int, where: str = "") -> None:
    """WrongOutcomeError unless the pieces of a batch, those that were skipped among them, hold each sample once."""
    ranges = sorted(pieces)
    covered = [start for start, _ in ranges] + [length] == [0, *(stop for _, stop in ranges)]
    demand(
        covered, f"{where}the pieces {ranges} do not cover the {length} samples of the batch once"
    )


def by_loop(mbs: ElasticMBS, loss_fn: Callable[[Any], Any], batch: Any) -> StepResult:
    """One batch through the third door, the loop written out."""
    for micro in mbs.micro_batches(batch):
        with micro:
            micro.backward(loss_fn(micro.data))
    assert mbs.last_result is not None
    return mbs.last_result
