"""The predictions of pieces, put together as a trainer does with those of batches."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers.trainer_pt_utils import nested_concat

from elastic_mbs.batch.join import PerPiece


def mean_loss(losses: list[Tensor] | None, counts: list[Tensor]) -> Tensor | None:
    """Return the batch's mean loss; a piece without counts adds nothing."""
    if losses is None or len(losses) == 1:
        return None if losses is None else losses[0]
    each = torch.stack(counts).tolist()
    parts = [loss * (count / sum(each)) for loss, count in zip(losses, each, strict=True) if count]
    return sum(parts[1:], parts[0]) if parts else losses[0]


def joined(outputs: Any) -> Any:
    """Join outputs that pieces have padded, or that are no rows, as the trainer joins batches."""
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
