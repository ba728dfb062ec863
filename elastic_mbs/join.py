"""Outputs of the pieces back into one output of the batch."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from elastic_mbs.containers import Role, kind_of, roles_in
from elastic_mbs.errors import BatchError


def join(outputs: Sequence[Any], lengths: Sequence[int]) -> Any:
    """The batch's output from its pieces' outputs.

    Args:
        outputs: what each piece gave, in the batch's order.
        lengths: samples of each piece.

    Returns:
        The same containers as the pieces', with per-sample tensors (dim 0 equals the piece's length in every piece) and numpy arrays concatenated,
        lists of per-sample items chained, None where every piece has None, and for any other leaf (a scalar, a string, a tensor of another shape)
        the list of the pieces' values, one per piece. Containers that differ between the pieces give a list of the pieces. One piece is returned as
        it is.

    Raises:
        ValueError: there are not as many lengths as outputs, or none at all.
    """
    if len(outputs) != len(lengths) or not outputs:
        raise ValueError(f"join needs one length per output and at least one output: got {len(outputs)} outputs and {len(lengths)} lengths")
    return outputs[0] if len(outputs) == 1 else _join(list(outputs), lengths)


def _join(values: list[Any], lengths: Sequence[int]) -> Any:
    first = values[0]
    if all(value is None for value in values):
        return None
    if any(type(value) is not type(first) for value in values):
        return values
    kind = kind_of(type(first))
    if kind.role is Role.TENSOR:
        return torch.cat(values) if _cat_able(values, lengths) else values
    if kind.role is Role.ARRAY:
        return sys.modules["numpy"].concatenate(values) if _same_rows(values, lengths) else values
    if kind.role is Role.LIST and _are_items(values, lengths):
        chained = [item for value in values for item in value]
        return kind.put(first, list(range(len(chained))), chained)
    if kind.role not in (Role.LIST, Role.FIELDS):
        return values
    parts = [kind.take(value) for value in values]
    keys = parts[0][0]
    if any(len(others) != len(keys) or set(others) != set(keys) for others, _ in parts):
        return values
    by_key = [dict(zip(own, part, strict=True)) for own, part in parts]
    joined = [_join([each[key] for each in by_key], lengths) for key in keys]
    try:
        return kind.put(first, keys, joined)
    except BatchError:
        return values  # a type that takes certain values only (torch.Size): the pieces' own are all there is


def _cat_able(values: list[Tensor], lengths: Sequence[int]) -> bool:
    plain = all(value.layout is torch.strided and not value.is_nested and value.device == values[0].device for value in values)
    return plain and _same_rows(values, lengths)


def _same_rows(values: list[Any], lengths: Sequence[int]) -> bool:
    """One row per sample, and rows that are alike in every piece (a batch padded per piece is not)."""
    return all(
        value.ndim > 0 and value.shape[0] == length and value.shape[1:] == values[0].shape[1:] and value.dtype == values[0].dtype
        for value, length in zip(values, lengths, strict=True)
    )


def _are_items(values: list[Any], lengths: Sequence[int]) -> bool:
    if any(len(value) != length for value, length in zip(values, lengths, strict=True)):
        return False
    if all(Role.TENSOR not in roles_in(value) for value in values):
        return True
    # Tensors directly in a list are fields if they can be, as in a batch.
    as_fields = len({len(value) for value in values}) == 1 and all(
        all(isinstance(part, Tensor) for part in parts) and _cat_able(list(parts), lengths) for parts in zip(*values, strict=True)
    )
    return not as_fields
