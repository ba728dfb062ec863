"""Outputs of the pieces back into one output of the batch."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from elastic_mbs.batch.containers import Path, Role, kind_of, roles_in
from elastic_mbs.errors import BatchError


def join(outputs: Sequence[Any], lengths: Sequence[int], apart: set[Path] | None = None) -> Any:
    """The batch's output from its pieces' outputs.

    Args:
        outputs: what each piece gave, in the batch's order.
        lengths: samples of each piece.
        apart: places, by path, type and shape of a row, at which a tensor or an array is known to come once per piece, because it once had another
            number of rows than its piece had samples; those that are found are added. A matrix of four classes is then not taken for four samples,
            where pieces have four. What else the same function gives in that place, in evaluation, say, is not it.

    Returns:
        The same containers as the pieces', with per-sample tensors (dim 0 equals the piece's length in every piece) and numpy arrays concatenated,
        lists of per-sample items chained, texts, flags and None that are the same in every piece once, and for any other leaf (a number, a tensor of
        another shape) and for containers that differ the `PerPiece` of their values. What comes out has the same type however the batch was split,
        but for what happens to have as many rows as each piece has samples, until it has been seen in pieces of another length.

    Raises:
        ValueError: there are not as many lengths as outputs, or none at all.
    """
    if len(outputs) != len(lengths) or not outputs:
        raise ValueError(f"join needs one length per output and at least one output: got {len(outputs)} outputs and {len(lengths)} lengths")
    return _join(list(outputs), lengths, (), set() if apart is None else apart)


class PerPiece(list[Any]):
    """What a step function gives once for a piece and not once for a sample: a mean loss, a confusion matrix. One value per piece, in order.

    Attributes:
        lengths: samples of each piece.
    """

    def __init__(self, values: Iterable[Any], lengths: Iterable[int]) -> None:
        super().__init__(values)
        self.lengths = tuple(lengths)

    def mean(self) -> Any:
        """The mean over the samples, of values that are means over their piece's."""
        total = sum(self.lengths)
        return self._combined([length / total for length in self.lengths])

    def sum(self) -> Any:
        """The sum, of values that are sums over their piece."""
        return self._combined([1] * len(self))

    def _combined(self, weights: Sequence[float]) -> Any:
        found = self[0] * weights[0]
        for value, weight in zip(self[1:], weights[1:], strict=True):
            found = found + value * weight
        return found


def _join(values: list[Any], lengths: Sequence[int], path: Path, apart: set[Path]) -> Any:
    first = values[0]
    if any(type(value) is not type(first) for value in values):
        return PerPiece(values, lengths)
    if first is None or (isinstance(first, _CONSTANT) and all(value == first for value in values)):
        return first
    kind = kind_of(type(first))
    if kind.role in (Role.TENSOR, Role.ARRAY) and not any(getattr(value, "is_nested", False) for value in values):  # which may have no shape
        looks = [(*path, value.dtype, value.shape[1:]) for value in values]
        if len(apart) < _MOST_APART:  # what is of another shape each time fills no memory
            apart.update(look for look, value, length in zip(looks, values, lengths, strict=True) if value.ndim > 0 and value.shape[0] != length)
        if not apart.isdisjoint(looks):
            return PerPiece(values, lengths)
    if kind.role is Role.TENSOR:
        return _cat(values) if _cat_able(values, lengths) else PerPiece(values, lengths)
    if kind.role is Role.ARRAY:
        return sys.modules["numpy"].concatenate(values) if _same_rows(values, lengths) else PerPiece(values, lengths)
    if kind.role is Role.LIST and _are_items(values, lengths):
        chained = [item for value in values for item in value]
        return kind.put(first, list(range(len(chained))), chained)
    if kind.role not in (Role.LIST, Role.FIELDS):
        return PerPiece(values, lengths)
    parts = [kind.take(value) for value in values]
    keys = parts[0][0]
    if any(len(others) != len(keys) or set(others) != set(keys) for others, _ in parts):
        return PerPiece(values, lengths)
    by_key = [dict(zip(own, part, strict=True)) for own, part in parts]
    joined = [_join([each[key] for each in by_key], lengths, (*path, key), apart) for key in keys]
    try:
        return kind.put(first, keys, joined)
    except BatchError:
        return PerPiece(values, lengths)  # a type that takes certain values only (torch.Size): the pieces' own are all there is


_MOST_APART = 256
_CONSTANT = (str, bytes, bool, Enum, torch.dtype, torch.device)


def _cat(values: list[Tensor]) -> Tensor:
    return values[0] if len(values) == 1 else torch.cat(values)


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
    # Tensors directly in a list are fields if they can be, as in a batch; so are things of several types, because samples are alike.
    if len({len(value) for value in values}) > 1:
        return True
    positions = list(zip(*values, strict=True))
    if all(isinstance(part, Tensor) for parts in positions for part in parts):
        return not all(_cat_able(list(parts), lengths) for parts in positions)
    alike = len({type(item) for item in values[0]}) == 1
    return alike or not all(_is_field(parts, lengths) for parts in positions)


def _is_field(parts: Sequence[Any], lengths: Sequence[int]) -> bool:
    """Whether these can be one field of each piece's output: of one type, with something in it that has rows, and one of them for each sample."""
    same = len({type(part) for part in parts}) == 1
    return same and all(set(_rows(part)) == {length} for part, length in zip(parts, lengths, strict=True))


def _rows(value: Any) -> list[int]:
    """How many rows each tensor, each array and each list of other things in `value` has."""
    kind = kind_of(type(value))
    if kind.role in (Role.TENSOR, Role.ARRAY):
        return [value.shape[0] if value.ndim else 0]
    if kind.role is Role.LIST and Role.TENSOR not in roles_in(value):
        return [len(value)]
    parts = kind.take(value)[1] if kind.role in (Role.LIST, Role.FIELDS) else []
    return [count for part in parts for count in _rows(part)]
