"""Batches of pairs, as `trl.DPOTrainer` and `trl.RewardTrainer` have them.

trl puts the chosen texts of N pairs into the first N rows and the rejected ones into the N rows
after them. A sample is a pair: tensors of 2N rows become views of shape (N, ..., 2), so that a cut
never parts one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from elastic_mbs.errors import UnsupportedError
from elastic_mbs.integrations.rows import Rows
from elastic_mbs.integrations.trl import private

# the parts of a sample: tensors with a row for each text, and tensors with one for each pair
_TEXTS, _PAIRS = "texts", "pairs"


class Pairs(Rows):
    """The batches of a reward trainer: each loss and metric is a mean over pairs."""

    @property
    def length(self) -> Callable[[Any], Tensor] | None:
        """A function samples → the length of the longer text of each pair."""
        return lambda samples: samples[_TEXTS]["attention_mask"].sum(1).amax(1)

    def samples(self, inputs: Any) -> Any:
        """Return the trainer's batch with one pair per sample.

        Raises:
            UnsupportedError: a value belongs neither to rows nor to pairs.
        """
        rows = len(inputs["input_ids"])
        texts, pairs = {}, {}
        for name, value in inputs.items():
            length = len(value) if isinstance(value, Tensor) and value.ndim else None
            if length == rows:
                texts[name] = _paired(value)
            elif length == rows // 2:
                pairs[name] = value
            else:
                raise UnsupportedError(
                    f"{name!r} in a batch of {rows // 2} pairs has neither a row for each text nor "
                    "one for each pair, so it cannot be cut: leave it out of what the data "
                    "collator returns"
                )
        return {_TEXTS: texts, _PAIRS: pairs} if pairs else {_TEXTS: texts}

    def rows(self, piece: Any) -> Any:
        """Return pairs as the trainer's batch: the chosen texts, then the rejected ones."""
        texts = {name: _flat(value) for name, value in piece[_TEXTS].items()}
        return texts | piece.get(_PAIRS, {})

    def count(self, samples: Any) -> Tensor | None:
        """Return 1 for each pair."""
        return torch.ones(_number(samples), dtype=torch.long)

    def weights(self, piece: Any) -> Mapping[str, float]:
        """Return the number of pairs."""
        return {"": float(_number(piece))}

    def stored(self, outputs: Any) -> Any:
        """Return the outputs of a piece by pairs."""
        return _mapped(outputs, _paired)

    def joined(self, outputs: Any) -> Any:
        """Return the outputs of the batch: the chosen texts, then the rejected ones."""
        return _mapped(outputs, _flat)


class PreferencePairs(Pairs):
    """The batches of a DPO trainer, whose losses are means over pairs, or over chosen tokens."""

    @property
    def _only_by_token(self) -> bool:
        return {name for name, _ in private.losses_of(self._trainer)} == {private.BY_TOKEN}

    def count(self, samples: Any) -> Tensor | None:
        """Return 1 for each pair, or its chosen tokens where the loss is a mean over those."""
        return _chosen(samples) if self._only_by_token else super().count(samples)

    def weights(self, piece: Any) -> Mapping[str, float]:
        """Return the number of pairs, and of the tokens that trl's metrics are means over."""
        chosen, rejected = (float(each.sum()) for each in _tokens(piece).unbind(-1))
        return {
            **super().weights(piece),
            private.TOKENS: chosen + rejected,
            private.CHOSEN: chosen,
            private.REJECTED: rejected,
        }

    @contextmanager
    def losses_of(self, piece: Any, whole: Any) -> Iterator[None]:
        """Weigh the mean over chosen tokens by tokens where the engine weighs by pairs."""
        losses = private.losses_of(self._trainer)
        if self._only_by_token or private.BY_TOKEN not in dict(losses):
            yield
            return
        tokens, all_tokens = int(_chosen(piece).sum()), int(_chosen(whole).sum())
        share = _number(piece) / _number(whole)
        ours = [
            (name, weight * (tokens / all_tokens / share) if name == private.BY_TOKEN else weight)
            for name, weight in losses
            if tokens or name != private.BY_TOKEN
        ]
        with self._with(ours):
            yield

    @contextmanager
    def comparable(self) -> Iterator[None]:
        """Leave a mean over chosen tokens out, beside means over pairs."""
        by_pair = [each for each in private.losses_of(self._trainer) if each[0] != private.BY_TOKEN]
        with self._with(by_pair or private.losses_of(self._trainer)):
            yield

    @contextmanager
    def _with(self, losses: list[tuple[str, float]]) -> Iterator[None]:
        before = private.losses_of(self._trainer)
        private.set_losses(self._trainer, losses)
        try:
            yield
        finally:
            private.set_losses(self._trainer, before)


def check_preferences(trainer: Any) -> None:
    """Refuse losses of a DPO trainer that are no mean over pairs, or over chosen tokens.

    Raises:
        UnsupportedError: a loss compares the pairs of a batch, or is not known.
    """
    losses, weighs = private.losses_of(trainer), private.weighs_pairs(trainer)
    for name, _ in losses:
        if name in private.SORTING:
            raise UnsupportedError(
                f"loss_type={name!r} sorts the pairs of a batch and compares them, so pieces have "
                "another loss: use DPOTrainer as it is, with a smaller per_device_train_batch_size"
            )
        if name not in private.BY_PAIR and name != private.BY_TOKEN:
            raise UnsupportedError(
                f"loss_type={name!r} is not known, so it cannot be told what it is a mean over: "
                "use DPOTrainer as it is, with a smaller per_device_train_batch_size"
            )
    if weighs and private.BY_TOKEN in dict(losses):
        raise UnsupportedError(
            "use_weighting=True multiplies the 'sft' loss, a mean over the batch, by a weight of "
            "each pair, so pieces have another loss: leave one of them out"
        )


def _number(samples: Any) -> int:
    """Return the number of pairs."""
    return len(samples[_TEXTS]["input_ids"])


def _tokens(samples: Any) -> Tensor:
    """Return the predicted tokens of each pair's completions, of shape (N, 2)."""
    found: Tensor = samples[_TEXTS]["completion_mask"][:, 1:].sum(1)
    return found


def _chosen(samples: Any) -> Tensor:
    """Return the predicted tokens of each pair's chosen completion."""
    return _tokens(samples).select(1, 0)


def _paired(rows: Tensor) -> Tensor:
    """Return a view of shape (N, ..., 2) of a tensor with 2N rows."""
    found: Tensor = rows.unflatten(0, (2, -1)).movedim(0, -1)
    return found


def _flat(pairs: Tensor) -> Tensor:
    """Return the 2N rows of a tensor of shape (N, ..., 2)."""
    return pairs.movedim(-1, 0).flatten(0, 1)


def _mapped(outputs: Any, fn: Callable[[Tensor], Tensor]) -> Any:
    """Return outputs with `fn` applied to their tensors that have rows."""
    if isinstance(outputs, Tensor):
        return fn(outputs) if outputs.ndim else outputs
    if isinstance(outputs, tuple | list):
        return type(outputs)(_mapped(each, fn) for each in outputs)
    return outputs
