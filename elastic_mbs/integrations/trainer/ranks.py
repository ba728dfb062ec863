"""A trainer's piece on one of several ranks: its weight, and no exchange with the others."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from elastic_mbs.errors import UnsupportedError
from elastic_mbs.integrations.trainer.router import adds_loss
from elastic_mbs.integrations.trl import private

Count = Callable[[Any, Any], Any]  # batches and a device → their items

# what a trainer asks all ranks by
QUESTIONS = ("gather", "gather_for_metrics", "pad_across_processes", "reduce")
_AVERAGE, _COUNT = "average_tokens_across_devices", "_get_num_items_in_batch"


def asks(trainer: Any, options: Mapping[str, Any]) -> bool:
    """Return whether a trainer's loss needs words of all ranks, exchanged once a batch."""
    known = private.kind_of(type(trainer)) is not None or adds_loss(trainer)
    return known and bool(options.get("enabled", True))


@contextmanager
def alone(trainer: Any) -> Iterator[None]:
    """Keep a trainer from asking the other ranks in a block: they are not in one of theirs.

    It counts its own items, and trl's metrics are those of its own values. The loss of another
    trainer may mean all ranks where it asks them, so it is refused.
    """
    flags, own = vars(trainer.args), vars(trainer.accelerator)
    before = flags[_AVERAGE]
    answer = _own if private.kind_of(type(trainer)) else _refuse
    answers = dict.fromkeys(QUESTIONS, answer) if trainer.args.world_size > 1 else {}
    kept = {question: own[question] for question in answers if question in own}
    flags[_AVERAGE] = False
    own.update(answers)
    try:
        yield
    finally:
        flags[_AVERAGE] = before
        for question in answers:
            del own[question]
        own.update(kept)


def _own(values: Any, *args: Any, **kwargs: Any) -> Any:
    """Return what one process gathers."""
    return values


def _refuse(values: Any, *args: Any, **kwargs: Any) -> Any:
    raise UnsupportedError(
        "a loss asks the other ranks (accelerator.gather, gather_for_metrics, pad_across_processes "
        "or reduce). They have other numbers of pieces, so it would wait for ranks that do not "
        "come. Keep this rank's own values, and gather them outside of compute_loss and "
        "prediction_step, as in log()"
    )


def ask_of_items(trainer: Any, batch: Any, count: Count) -> tuple[float, float] | None:
    """Return the items of a batch of this rank and those of all ranks' batches.

    Every rank asks, once a batch and outside of its pieces; None where the trainer does not ask.

    Args:
        trainer: the trainer.
        batch: of this rank.
        count: the trainer's own function.
    """
    args = trainer.args
    if args.world_size == 1 or not vars(args)[_AVERAGE]:
        return None
    everyone = count([batch], args.device)
    with alone(trainer):
        own = count([batch], args.device)
    return None if everyone is None else (float(own), float(everyone))


@contextmanager
def answered(trainer: Any, asked: tuple[float, float] | None, count: Count) -> Iterator[None]:
    """Answer the trainer how many items all ranks have, in a block that runs one piece.

    It is told the part of them that the piece has of this rank's, so the mean over the pieces is
    the loss that it gives the whole batch.

    Args:
        trainer: the trainer.
        asked: what `ask_of_items` returned.
        count: the trainer's own function.
    """
    if asked is None:
        yield
        return
    flags, (own, everyone) = vars(trainer.args), asked
    before = flags[_AVERAGE]

    def answer(batches: Any, device: Any) -> Tensor:
        with alone(trainer):
            items = float(count(batches, device))
        found = items * everyone / own if own else everyone  # no item: nothing, and not 0 / 0
        return torch.tensor(found, dtype=torch.float64, device=device)

    flags[_AVERAGE] = True
    vars(trainer)[_COUNT] = answer
    try:
        yield
    finally:
        del vars(trainer)[_COUNT]
        flags[_AVERAGE] = before


def share_of_items(items: Any, num_items: Any, ranks: int, *, everywhere: bool) -> float:
    """Return the weight of a piece's loss in the sum over the ranks, where items are counted.

    DDP and FSDP take the mean over the ranks. Where the items of all ranks were counted, the
    trainer multiplies the loss by their number.

    Args:
        items: of the piece.
        num_items: of the step's batches.
        ranks: how many there are.
        everywhere: they are the items of all ranks.
    """
    if not items:
        return 0.0
    return float(items) / float(num_items) / (1 if everywhere else ranks)


def share_of_counts(count: Any, own: Any, steps: int, ranks: int) -> float:
    """Return the weight of a piece's loss in the sum over the ranks, where no items are counted.

    Args:
        count: of the piece.
        own: of this rank's batch.
        steps: batches that make a step.
        ranks: how many there are.
    """
    return float(count) / float(own) / steps / ranks if own else 0.0
