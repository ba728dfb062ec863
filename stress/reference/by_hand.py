"""The loop that a user writes over the pieces of a batch by hand: the oracle of every comparison.

Nothing here is the product's: `samples.py` reads batches, counts and losses by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .samples import Samples, counts_of, losses_in, mapped, tensors_of
from .state import demand

if TYPE_CHECKING:
    from ..models.subject import Subject

Partition = Sequence[Sequence[int]]
HALF = (torch.float16, torch.bfloat16)


def view_of(subject: Subject, batch: Any) -> Samples:
    """Return a subject's batch, cut as its options say."""
    return Samples(batch, subject.options)


def add_up(
    terms: Callable[[int, int], Mapping[Any, Tensor]],  # runs a piece and gives its losses by name
    pieces: Partition,
    # the weight of each loss of a piece
    weigh: Callable[[int, int], Mapping[Any, float]],
    leaves: Iterable[Tensor] = (),
    *,
    # the type in which the leaves' gradients are summed, where it is another
    wide: torch.dtype | None = None,
    scale: Callable[[Tensor], Tensor] = lambda loss: loss,  # what a GradScaler does
    backward: bool = True,
) -> float:
    """Add the gradient of a batch piece by piece, and return its loss.

    With `backward=False` only the loss is computed.
    """
    leaves = [] if wide is None else list(leaves)
    sums = {leaf: leaf.grad.to(wide) for leaf in leaves if leaf.grad is not None}
    total = 0.0
    for start, stop in pieces:
        weights = weigh(start, stop)
        parts = [
            (term.float() if term.dtype in HALF else term) * weights[name]
            for name, term in terms(start, stop).items()
            if weights[name]
        ]
        if not parts:  # nothing in the piece counts: it runs forward only
            continue
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
    view: Samples,
    pieces: Partition,
    *,
    backward: bool = True,
    scaler: torch.amp.GradScaler | None = None,
) -> float:
    """Add the gradient of a subject's batch, and return its loss.

    Pieces run on the model's device, weighed as the subject's options say.
    """
    options, device = subject.options, subject.device

    def run(start: int, stop: int) -> Any:
        return subject.loss_fn(mapped(view.piece(start, stop), lambda tensor: tensor.to(device)))

    if subject.over is not None:
        loss = subject.over(joined([run(start, stop) for start, stop in pieces]))
        if backward:
            (loss if scaler is None else scaler.scale(loss)).backward()
        return float(loss.detach())
    count = options.get("count")
    counts = counts_of(count, view)
    names = list(count) if isinstance(count, Mapping) else None
    return add_up(
        lambda start, stop: losses_in(run(start, stop), names),
        pieces,
        lambda start, stop: weights_of(counts, start, stop, options.get("reduction", "mean")),
        subject.leaves(),
        wide=options.get("accumulate_dtype"),
        scale=(lambda loss: loss) if scaler is None else scaler.scale,
        backward=backward,
    )


def weights_of(
    counts: Mapping[Any, Sequence[Fraction]], start: int, stop: int, reduction: str
) -> dict[Any, float]:
    """Return the weight of each loss of a piece.

    A mean weighs as its share of the batch's terms, 0 where it has none. A sum weighs 1.
    """
    if reduction == "sum":
        return dict.fromkeys(counts, 1.0)
    shares = {}
    for name, each in counts.items():
        total = sum(each, Fraction(0))
        shares[name] = float(sum(each[start:stop], Fraction(0)) / total) if total else 0.0
    return shares


def joined(embeddings: Sequence[Any]) -> Any:
    """Return the embeddings of all pieces as one, with the graphs of the pieces."""
    parts = iter([torch.cat(each) for each in zip(*map(tensors_of, embeddings), strict=True)])
    return mapped(embeddings[0], lambda tensor: next(parts))


def check_covered(pieces: Iterable[tuple[int, int]], length: int, where: str = "") -> None:
    """Raise a WrongOutcomeError unless the pieces of a batch hold each sample once."""
    ranges = sorted(pieces)
    covered = [start for start, _ in ranges] + [length] == [0, *(stop for _, stop in ranges)]
    demand(
        covered, f"{where}the pieces {ranges} do not cover the {length} samples of the batch once"
    )
