"""Outputs of the pieces back into one output of the batch."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from elastic_mbs.batch.containers import Kind, Path, Role, kind_of, roles_in
from elastic_mbs.errors import BatchError


def join(outputs: Sequence[Any], lengths: Sequence[int], per_piece: set[Path] | None = None) -> Any:
    """The batch's output from its pieces' outputs, in the same containers however the batch was split.

    Tensors and arrays with one row per sample are concatenated, lists of per-sample items chained, equal texts, flags and None kept once; all else
    becomes a `PerPiece`. `per_piece` remembers the places of tensors known to come once per piece; new ones are added.
    """
    if len(outputs) != len(lengths) or not outputs:
        raise ValueError(f"join needs one length per output and at least one output: got {len(outputs)} outputs and {len(lengths)} lengths")
    return _Join(lengths, set() if per_piece is None else per_piece).of(list(outputs), ())


class PerPiece(list[Any]):
    """Values that a step function returns once per piece and not once per sample, in order: a mean loss, a confusion matrix.

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


# A place: path, type and shape of a row of a tensor that once had another number of rows than its piece had samples. A matrix of four classes is not
# taken for four samples where pieces have four.
_MOST_PLACES = 256  # remembered: outputs of another shape in each call must not fill the memory
_CONSTANT = (str, bytes, bool, Enum, torch.dtype, torch.device)


class _Join:
    """One join of several pieces."""

    def __init__(self, lengths: Sequence[int], per_piece: set[Path]) -> None:
        self._lengths = lengths
        self._per_piece = per_piece

    def of(self, values: list[Any], path: Path) -> Any:
        first = values[0]
        kind = kind_of(type(first))
        alike = all(type(value) is type(first) for value in values)
        if alike and (first is None or (isinstance(first, _CONSTANT) and all(value == first for value in values))):
            return first
        if alike and kind.role in (Role.TENSOR, Role.ARRAY):
            return self._rows(values, path)
        if alike and kind.role is Role.LIST and self._are_items(values):
            items = [item for value in values for item in value]
            return kind.put(first, dict(enumerate(items)))
        if alike and kind.role in (Role.LIST, Role.FIELDS):
            return self._fields(values, kind, path)
        return PerPiece(values, self._lengths)

    def _fields(self, values: list[Any], kind: Kind, path: Path) -> Any:
        parts = [kind.take(value) for value in values]
        if any(each.keys() != parts[0].keys() for each in parts):
            return PerPiece(values, self._lengths)
        joined = {key: self.of([each[key] for each in parts], (*path, key)) for key in parts[0]}
        try:
            return kind.put(values[0], joined)
        except BatchError:
            return PerPiece(values, self._lengths)  # a type that takes certain values only, such as torch.Size

    def _rows(self, values: list[Any], path: Path) -> Any:
        if any(getattr(value, "is_nested", False) for value in values):
            return PerPiece(values, self._lengths)  # it can be without a shape
        places = [(*path, value.dtype, value.shape[1:]) for value in values]
        if len(self._per_piece) < _MOST_PLACES:
            sized = zip(places, values, self._lengths, strict=True)
            self._per_piece.update(place for place, value, length in sized if value.ndim > 0 and value.shape[0] != length)
        if not self._per_piece.isdisjoint(places) or not self._can_be_joined(values):
            return PerPiece(values, self._lengths)
        if isinstance(values[0], Tensor):
            return values[0] if len(values) == 1 else torch.cat(values)
        return sys.modules["numpy"].concatenate(values)

    def _can_be_joined(self, values: Sequence[Any]) -> bool:
        """One row per sample, and rows that are alike in every piece (those of a batch padded per piece are not)."""
        if any(getattr(value, "is_nested", False) or getattr(value, "layout", torch.strided) is not torch.strided for value in values):
            return False
        one = len({(value.shape[1:], value.dtype, getattr(value, "device", None)) for value in values}) == 1
        return one and all(value.ndim > 0 and value.shape[0] == length for value, length in zip(values, self._lengths, strict=True))

    def _are_items(self, lists: list[Any]) -> bool:
        """Whether lists hold one item per sample; else each place in them is a field."""
        if any(len(each) != length for each, length in zip(lists, self._lengths, strict=True)):
            return False
        if len(set(self._lengths)) > 1 or all(Role.TENSOR not in roles_in(each) for each in lists):
            return True
        return not all(map(self._is_field, zip(*lists, strict=True)))  # tensors directly in a list are fields if they can be, as in a batch

    def _is_field(self, parts: Sequence[Any]) -> bool:
        """Whether these can be one field of each piece: of one type, with rows in it, one for each sample."""
        if all(isinstance(part, Tensor) for part in parts):
            return self._can_be_joined(parts)
        return len(set(map(type, parts))) == 1 and all(_row_counts(part) == {length} for part, length in zip(parts, self._lengths, strict=True))


def _row_counts(value: Any) -> set[int]:
    """How many rows the tensors, the arrays and the lists of other things in `value` have."""
    kind = kind_of(type(value))
    if kind.role in (Role.TENSOR, Role.ARRAY):
        return {value.shape[0] if value.ndim else 0}
    if kind.role is Role.LIST and Role.TENSOR not in roles_in(value):
        return {len(value)}
    return {count for part in kind.take(value).values() for count in _row_counts(part)}
