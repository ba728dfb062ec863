"""Batches of completions, as `trl.GRPOTrainer` and `trl.RLOOTrainer` have them.

A step of these trainers generates completions, scores them, and keeps them for later steps. All of
that stays outside: `compute_loss` gets rows that are samples, and it alone runs in pieces. So what
the trainers keep (`_step`, `_buffered_inputs`, times, logs) is written once a batch, by themselves.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from elastic_mbs.engine.shared.running import running_call
from elastic_mbs.errors import UnsupportedError
from elastic_mbs.integrations.rows import Rows
from elastic_mbs.integrations.trl import private
from elastic_mbs.runtime import ElasticMBS


class Completions(Rows):
    """The batches of a trainer that generates them: a row is a completion."""

    generated = True

    def samples(self, inputs: Any) -> Any:
        """Return the batch, once it is known to be made of rows.

        Raises:
            UnsupportedError: a value has neither a row for each completion nor one for the batch.
        """
        rows = len(inputs["completion_ids"])
        for name, value in inputs.items():
            if not isinstance(value, Tensor) or (value.ndim and len(value) != rows):
                raise UnsupportedError(
                    f"{name!r} in a batch of {rows} completions has no row for each of them, so "
                    "it cannot be cut (pictures are not supported): use the trainer as it is, with "
                    "a smaller per_device_train_batch_size"
                )
        return inputs

    def count(self, samples: Any) -> Tensor | None:
        """Return 1 for each completion, or its tokens where the loss is a mean over those."""
        if private.aggregation_of(self._trainer) == private.TOKENS:
            return _tokens(samples)
        return torch.ones(len(samples["completion_ids"]), dtype=torch.long)

    def total(self, samples: Any) -> float:
        """Return the number of loss terms."""
        counts = self.count(samples)
        assert counts is not None
        return float(counts.sum())

    def weights(self, piece: Any) -> Mapping[str, float]:
        """Return the number of completions, and of their tokens."""
        return {
            "": float(len(piece["completion_ids"])),
            private.TOKENS: float(_tokens(piece).sum()),
        }

    def share(self, piece: Any, total: float) -> float:
        """Return the weight of a piece's loss in that of the batch, which has `total` loss terms.

        It is never 0: the loss of a piece without a token is 0, but for that of a router.
        """
        if private.aggregation_of(self._trainer) == private.SUM or not total:
            return 1.0
        return self.total(piece) / total or 1.0


@contextmanager
def around_step(trainer: Any, mbs: ElasticMBS) -> Iterator[None]:
    """Make a step of the trainer ready for pieces.

    Log-probabilities of what it has generated come in pieces of their own size.
    `accelerator.backward(loss)` does nothing: the pieces have run theirs.
    """
    name, accelerator = private.LOG_PROBABILITIES, trainer.accelerator
    own = {name: vars(trainer)[name]} if name in vars(trainer) else {}
    vars(trainer)[name] = functools.partial(_log_probabilities, getattr(trainer, name), mbs)
    accelerator.backward = _nothing
    try:
        yield
    finally:
        del vars(trainer)[name], accelerator.backward
        vars(trainer).update(own)


def _log_probabilities(
    plain: Callable[..., Any],
    mbs: ElasticMBS,
    model: Any,
    ids: Tensor,
    mask: Tensor,
    keep: int,
    batch_size: int | None = None,
    **others: Any,
) -> Any:
    """Return the log-probabilities of texts alone, in pieces where no gradient is wanted."""
    asked = any(value is not None for value in others.values())
    if asked or torch.is_grad_enabled() or running_call() is not None:
        return plain(model, ids, mask, keep, batch_size, **others)

    def of_piece(piece: Any) -> Any:
        return plain(model, piece["ids"], piece["mask"], keep)[0]

    return mbs.evaluate(of_piece, {"ids": ids, "mask": mask}, outputs="device"), None, None


def _nothing(loss: Tensor, **kwargs: Any) -> None:
    if kwargs:
        raise UnsupportedError(
            f"accelerator.backward(loss, {', '.join(kwargs)}=…) is not supported: the engine runs "
            "backward"
        )


def check_completions(trainer: Any) -> None:
    """Refuse losses under which completions cannot be cut.

    Raises:
        UnsupportedError: a part of the loss compares the completions of a batch, or is not known.
    """
    for reason in private.comparing(trainer):
        raise UnsupportedError(
            f"{reason}, so pieces have another loss: leave it out, or use the trainer as it is, "
            "with a smaller per_device_train_batch_size"
        )
    private.aggregation_of(trainer)


def _tokens(samples: Any) -> Tensor:
    """Return the tokens of each completion that its loss has terms of."""
    mask = samples["completion_mask"]
    found: Tensor = (mask * samples["tool_mask"] if "tool_mask" in samples else mask).sum(1)
    return found
