"""Batches of texts that are wanted or not, as `trl.KTOTrainer` has them.

Its loss compares each text with an estimate of the KL divergence: a mean over the batch, without a
gradient. So that estimate is made first, of the whole batch in pieces, and each piece gets it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from elastic_mbs.errors import UnsupportedError
from elastic_mbs.integrations.exchange import Exchange
from elastic_mbs.integrations.rows import Rows
from elastic_mbs.integrations.trl import private
from elastic_mbs.memory import oom
from elastic_mbs.runtime import ElasticMBS


class Unpaired(Rows):
    """The batches of a KTO trainer: each loss is a mean over texts, once the estimate is known."""

    def __init__(self, trainer: Any) -> None:
        super().__init__(trainer)
        self._estimate: Tensor | None = None  # of the batch; None where the loss has none

    def count(self, samples: Any) -> Tensor | None:
        """Return 1 for each text."""
        return torch.ones(len(samples["label"]), dtype=torch.long)

    def weights(self, piece: Any) -> Mapping[str, float]:
        """Return the number of texts and of their tokens, in all and of each kind."""
        wanted = piece["label"].bool()
        tokens = piece["completion_mask"][:, 1:].sum(1)
        return {
            "": float(len(wanted)),
            private.TOKENS: float(tokens.sum()),
            private.CHOSEN: float(tokens[wanted].sum()),
            private.REJECTED: float(tokens[~wanted].sum()),
            private.WANTED: float(wanted.sum()),
            private.UNWANTED: float((~wanted).sum()),
        }

    def prepare(self, samples: Any, mbs: ElasticMBS, model: Any, exchange: Exchange) -> None:
        """Make the estimate of a batch, in pieces without gradients: the mean over the ranks."""
        trainer = self._trainer
        if not private.estimates_kl(trainer):
            return

        def divergence(piece: Any) -> Any:
            ours = private.kl_log_probabilities(trainer, model, piece)
            return ours - private.reference_log_probabilities(trainer, piece)

        what, devices = "take the mean of the KL divergence", (trainer.args.device,)
        with exchange.told():
            found = mbs.evaluate(divergence, samples, outputs="device")
            estimate = oom.retry(what, found.mean, devices)
            mine = oom.retry(what, estimate.item, devices)
        means = exchange.all(mine)[: exchange.counted]
        self._estimate = estimate.fill_(sum(means) / len(means))

    @contextmanager
    def losses_of(self, piece: Any, whole: Any) -> Iterator[None]:
        """Give the loss of a piece the estimate of its batch."""
        estimate = self._estimate
        if estimate is None:
            yield
            return
        with private.replaced_kl(self._trainer, _estimator(estimate)):
            yield

    @contextmanager
    def comparable(self) -> Iterator[None]:
        """Give all losses an estimate of 0."""
        if not private.estimates_kl(self._trainer):
            yield
            return
        with private.replaced_kl(self._trainer, _estimator(None)):
            yield


def _estimator(estimate: Tensor | None) -> Callable[[Any, Any], Tensor]:
    """Return a function for the log-probabilities whose mean difference is the estimate.

    trl asks for those of the model first, and then for those of the reference, where they are not
    in the batch.
    """
    asked = 0

    def log_probabilities(model: Any, batch: Any) -> Tensor:
        nonlocal asked
        asked += 1
        known: Tensor | None = batch.get("ref_KL_logps")
        base = torch.zeros_like(batch["label"], dtype=torch.float32) if known is None else known
        if estimate is None or (known is None and asked % 2 == 0):
            return base
        # in the estimate's type: one number would be rounded to that of the reference
        return base.to(estimate.dtype) + estimate

    return log_probabilities


def check_unpaired(trainer: Any) -> None:
    """Refuse losses that are not known.

    Raises:
        UnsupportedError: it is one of these.
    """
    loss = private.unpaired_loss(trainer)
    if loss not in private.UNPAIRED:
        raise UnsupportedError(
            f"loss_type={loss!r} is not known, so it cannot be told what it is a mean over: use "
            "KTOTrainer as it is, with a smaller per_device_train_batch_size"
        )
