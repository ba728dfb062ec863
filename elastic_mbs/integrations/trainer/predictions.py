"""The predictions of pieces, put together as a trainer does with those of batches."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers.trainer_pt_utils import nested_concat

from elastic_mbs.batch.join import PerPiece
from elastic_mbs.errors import UnsupportedError


class OneRow:
    """Outputs of a piece, each one row (1, T, …) of all its samples.

    No dataclass: the engine would join its fields.
    """

    def __init__(self, values: Any) -> None:
        self.values = values


def mean_loss(losses: list[Tensor] | None, counts: list[Tensor]) -> Tensor | None:
    """Return the batch's mean loss; a piece without counts adds nothing."""
    if losses is None or len(losses) == 1:
        return None if losses is None else losses[0]
    each = torch.stack(counts).tolist()
    parts = [loss * (count / sum(each)) for loss, count in zip(losses, each, strict=True) if count]
    return sum(parts[1:], parts[0]) if parts else losses[0]


def joined(outputs: Any) -> Any:
    """Join outputs that pieces have padded, or that are no rows, as the trainer joins batches."""
    pieces = outputs if isinstance(outputs, PerPiece) else [outputs]
    if isinstance(pieces[0], OneRow):
        return _one_row([each.values for each in pieces])
    if isinstance(outputs, PerPiece):
        return functools.reduce(functools.partial(nested_concat, padding_index=-100), outputs)
    if isinstance(outputs, tuple | list):
        return type(outputs)(map(joined, outputs))
    kind: Any = type(outputs)
    return (
        kind(**{name: joined(value) for name, value in outputs.items()})
        if isinstance(outputs, Mapping)
        else outputs
    )


def _one_row(outputs: list[Any]) -> Any:
    first = outputs[0]
    if isinstance(first, Tensor):
        return first if len(outputs) == 1 else torch.cat(outputs, dim=1)
    if isinstance(first, tuple | list):
        return type(first)(_one_row(list(each)) for each in zip(*outputs, strict=True))
    raise UnsupportedError(
        "predictions on batches without padding are joined where they are tensors of tokens, and "
        f"one is a {type(first).__name__}: name it in ignore_keys"
    )
