"""Batches without padding: all samples one after the other in one row, cut into samples."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor
from transformers import DataCollatorWithFlattening

from elastic_mbs.errors import UnsupportedError
from elastic_mbs.integrations.rows import Rows
from elastic_mbs.integrations.trainer.predictions import OneRow
from elastic_mbs.memory import oom
from elastic_mbs.rollback.random_streams import RandomStreams

_NEEDED = ("input_ids", "labels", "position_ids")
_STARTS = "cu_seqlens"  # ours, where a batch tells its samples by position_ids alone
_GIVEN = ("cu_seq_lens_q", "cu_seq_lens_k")
_CUT = frozenset((*_NEEDED, *_GIVEN, "seq_idx", "max_length_q", "max_length_k"))
_PAD = (
    "pad the samples: take a data_collator that does, and in trl say padding_free=False, without "
    'packing=True or with packing_strategy="wrapped"'
)
_SAME = 1e-6  # relative difference of two losses of the same samples that is rounding

Value = TypeVar("Value")


def makes_one_row(collator: object) -> bool:
    """Return whether a collator puts all samples of a batch into one row."""
    return isinstance(collator, DataCollatorWithFlattening) or bool(
        getattr(collator, "padding_free", False)
    )


class Packed(Rows):
    """A batch of one row (1, T), with the samples one after the other.

    `position_ids` tell where they begin: they do not go on by 1 there. transformers' masks are made
    by the same rule.

    Args:
        trainer: the trainer.
        shifts: its loss has each label predicted by the token before.
    """

    mismatch = (
        "The loss of a batch without padding is to be a mean over the labels that are not -100. "
        f"For another loss {_PAD}"
    )

    def __init__(self, trainer: Any, *, shifts: bool) -> None:
        super().__init__(trainer)
        self._shifts = shifts

    def samples(self, inputs: Any) -> Any:
        """Return the row with the first token of each sample beside it.

        Raises:
            UnsupportedError: it does not tell where its samples begin, or has fields or labels that
                belong to more than one sample.
        """
        strange = sorted(inputs.keys() - _CUT)
        for key in _NEEDED:
            if key not in inputs:
                raise UnsupportedError(
                    f"a batch without padding has no {key}, and cannot be cut into samples: take "
                    "DataCollatorWithFlattening() with return_position_ids=True, its default"
                )
        ids = inputs["input_ids"]
        if ids.ndim != 2 or len(ids) != 1:
            raise UnsupportedError(
                f"input_ids are of shape {tuple(ids.shape)}, and a batch without padding is one "
                "row (1, T)"
            )
        if strange:
            raise UnsupportedError(
                f"a batch without padding has the fields {', '.join(map(repr, strange))}, and it "
                "is not known which of their values belong to which sample: leave them out, or use "
                "a data_collator that pads"
            )
        found = {**inputs, _STARTS: self._retried(lambda: _starts(inputs))}
        self._retried(lambda: self._check_labels(found))
        return self.rows(found) if _GIVEN[0] in inputs else found

    def _retried(self, read: Callable[[], Value]) -> Value:
        return oom.retry("read a batch without padding", read, (self._trainer.args.device,))

    def rows(self, piece: Any) -> Any:
        """Return samples as the trainer's batch."""
        return {key: value for key, value in piece.items() if key != _STARTS}

    def number(self, samples: Any) -> int:
        """Return the number of samples."""
        return len(_bounds(samples)) - 1

    def count(self, samples: Any) -> Tensor:
        """Return the labels that are not -100 in each sample."""

        def count() -> Tensor:
            counted = self._counted(samples["labels"])
            return torch.nn.functional.pad(counted.cumsum(0), (1, 0))[_bounds(samples)].diff()

        return self._retried(count)

    def _counted(self, labels: Tensor) -> Tensor:
        """Return 1 for each token that counts in the loss, of shape (T,), on the host."""
        counted = labels.cpu().ne(-100).reshape(-1).long()
        if self._shifts:  # nothing predicts a row's first token
            counted[0] = 0
        return counted

    def _check_labels(self, samples: Any) -> None:
        counted, starts = self._counted(samples["labels"]), _bounds(samples)[1:-1]
        if self._shifts and bool(counted[starts].any()):
            raise UnsupportedError(
                "the first label of a sample is not -100, so the last token of the sample before "
                "it predicts it: say separator_id=-100"
            )

    def checked(self, loss: Callable[[Any], Tensor]) -> Callable[[Any], Tensor]:
        """Return a loss that raises an UnsupportedError where samples see each other."""

        def watched(piece: Any) -> Tensor:
            if self.number(piece) > 1:
                self._check_apart(piece, loss)
            return loss(piece)

        return watched

    def _check_apart(self, piece: Any, loss: Callable[[Any], Tensor]) -> None:
        """Change the tokens of the first sample, and look whether the others' loss changes."""
        first, ids = int(_bounds(piece)[1]), piece["input_ids"]
        labels, other = piece["labels"].clone(), ids.clone()
        labels[:, :first] = -100
        others = {**piece, "labels": labels}
        if not bool(self.count(others).any()):
            return
        largest = ids.max()
        other[:, :first] = torch.where(ids[:, :first] == largest, ids.min(), largest)
        streams = RandomStreams((), {self._trainer.args.device})
        state, losses = streams.read(), list[float]()
        for tokens in (ids, other):
            losses.append(loss({**others, "input_ids": tokens}).item())
            streams.restore(state)
        if abs(losses[0] - losses[1]) > _SAME * abs(losses[0]):
            raise UnsupportedError(
                f"{type(self._trainer.model).__name__} lets the samples of a row without padding "
                f"see each other: other tokens in the first sample move the loss of the rest from "
                f"{losses[0]:.6g} to {losses[1]:.6g}. Its pieces have another loss, so {_PAD}"
            )

    def stored(self, outputs: Any) -> Any:
        """Return outputs of a piece as one object: they have a row for all of its samples."""
        return None if outputs is None else OneRow(outputs)


def _bounds(samples: Any) -> Tensor:
    """Return the first token of each sample and the end, of shape (N + 1,), on the host."""
    starts = samples[_STARTS] if _STARTS in samples else samples[_GIVEN[0]]
    return torch.as_tensor(starts).cpu().long()


def _starts(inputs: Any) -> Tensor:
    """Return where `position_ids` do not go on by 1, and the end."""
    positions = inputs["position_ids"].cpu()
    begins = (positions.reshape(-1).diff() != 1).nonzero().flatten() + 1
    starts = torch.cat([begins.new_zeros(1), begins, begins.new_tensor([positions.shape[-1]])])
    for key in _GIVEN:
        if key in inputs and not torch.equal(torch.as_tensor(inputs[key]).cpu().long(), starts):
            raise UnsupportedError(
                f"{key} and position_ids tell of different samples in a batch without padding: "
                "position_ids must begin anew where a sample begins, and nowhere else"
            )
    return starts
