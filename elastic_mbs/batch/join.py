"""The outputs of the pieces, joined into the output of the batch."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import reduce
from itertools import chain
from operator import add
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from elastic_mbs.batch.containers import Kind, Path, Role, kind_of, roles_in
from elastic_mbs.errors import BatchError


@dataclass(frozen=True)
class Order:
    """The way of a sorted batch's samples back into the batch's own order."""

    ranks: list[int]  # place in the pieces of each sample that was run, in the batch's order
    widths: list[int]  # length of each piece's trimmed samples

    @classmethod
    def of(
        cls, order: Sequence[int], lengths: Sequence[int], pieces: Sequence[tuple[int, int]]
    ) -> Order:
        run = [sample for start, stop in pieces for sample in order[start:stop]]
        return cls(
            sorted(range(len(run)), key=run.__getitem__), [lengths[start] for start, _ in pieces]
        )

    def padded(self, values: list[Any]) -> list[Any]:
        """Fill up trimmed tensors with zeros to the widest piece.

        A dimension counts as trimmed where each tensor is as wide in it as its piece.
        """
        for dim, sizes in enumerate(zip(*[value.shape[1:] for value in values], strict=True), 1):
            if len(set(sizes)) > 1 and list(sizes) == self.widths:
                behind = (0, 0) * (values[0].ndim - 1 - dim)
                values = [
                    functional.pad(value, (*behind, 0, max(sizes) - value.shape[dim]))
                    for value in values
                ]
        return values


def join(
    outputs: Sequence[Any],
    lengths: Sequence[int],
    per_piece: set[Path] | None = None,
    order: Order | None = None,
) -> Any:
    """Return the batch's output, in the same containers however the batch was split.

    Tensors and arrays with one row per sample are concatenated, lists of per-sample items chained,
    equal texts, flags and None kept once. All else becomes a `PerPiece`.

    Args:
        outputs: of the pieces, in order.
        lengths: samples of each piece.
        per_piece: places of tensors known to come once per piece; new ones are added.
        order: of a sorted batch.
    """
    return _Join(lengths, set() if per_piece is None else per_piece, order).of(list(outputs), ())


class PerPiece(list[Any]):
    """Values that come once per piece and not once per sample: a mean loss, a confusion matrix.

    Attributes:
        lengths: samples of each piece.
    """

    def __init__(self, values: Iterable[Any], lengths: Iterable[int]) -> None:
        super().__init__(values)
        self.lengths = tuple(lengths)

    def mean(self) -> Any:
        """Return the mean over all samples, where each value is the mean over its piece."""
        total = sum(self.lengths)
        return self._combined([length / total for length in self.lengths])

    def sum(self) -> Any:
        """Return the sum over all samples, where each value is the sum over its piece."""
        return self._combined([1] * len(self))

    def _combined(self, weights: Sequence[float]) -> Any:
        return reduce(add, [value * weight for value, weight in zip(self, weights, strict=True)])


# A place is the path, type and row shape of a tensor that once had another number of rows than its
# piece had samples. So a matrix of four classes is not taken for the samples of a piece of four.
_MOST_PLACES = 256  # outputs of another shape in each call must not fill the memory
_CONSTANT = (str, bytes, bool, Enum, torch.dtype, torch.device)


@dataclass
class _Join:
    """A join of several pieces."""

    lengths: Sequence[int]
    per_piece: set[Path]
    order: Order | None

    def of(self, values: list[Any], path: Path) -> Any:
        first = values[0]
        kind = kind_of(type(first))
        if any(type(value) is not type(first) for value in values):
            return PerPiece(values, self.lengths)
        if first is None or (
            isinstance(first, _CONSTANT) and all(value == first for value in values)
        ):
            return first
        if kind.role in (Role.TENSOR, Role.ARRAY):
            return self._rows(values, path)
        if kind.role is Role.LIST and all(
            len(value) == length for value, length in zip(values, self.lengths, strict=True)
        ):
            return self._list(values, kind, path)
        if kind.role in (Role.LIST, Role.FIELDS):
            return self._fields(values, kind, path)
        return PerPiece(values, self.lengths)

    def _rows(self, values: list[Any], path: Path) -> Any:
        if any(
            getattr(value, "is_nested", False)
            or getattr(value, "layout", torch.strided) is not torch.strided
            for value in values
        ):
            return PerPiece(values, self.lengths)  # a nested tensor can be without a shape
        places = [(*path, value.dtype, value.shape[1:]) for value in values]
        sized = list(zip(places, values, self.lengths, strict=True))
        if len(self.per_piece) < _MOST_PLACES:
            self.per_piece.update(
                place
                for place, value, length in sized
                if value.ndim > 0 and value.shape[0] != length
            )
        by_sample = all(value.ndim > 0 and value.shape[0] == length for _, value, length in sized)
        if (
            by_sample
            and self.order is not None
            and isinstance(values[0], Tensor)
            and len({value.ndim for value in values}) == 1
        ):
            values = self.order.padded(values)
        # tensors that were padded per piece differ in shape
        forms = {(value.shape[1:], value.dtype, getattr(value, "device", None)) for value in values}
        if not by_sample or len(forms) > 1 or not self.per_piece.isdisjoint(places):
            return PerPiece(values, self.lengths)
        concatenate = (
            torch.cat if isinstance(values[0], Tensor) else sys.modules["numpy"].concatenate
        )
        joined = values[0] if len(values) == 1 else concatenate(values)
        return joined if self.order is None else joined[self.order.ranks]

    def _list(self, lists: list[Any], kind: Kind, path: Path) -> Any:
        """Join lists that are as long as their pieces: they hold items.

        Where tensors directly in them could be fields as well, they are fields, as in a batch.
        """
        if len(set(self.lengths)) == 1 and any(Role.TENSOR in roles_in(each) for each in lists):
            fields = [
                self.of(list(parts), (*path, i)) for i, parts in enumerate(zip(*lists, strict=True))
            ]
            if not any(isinstance(field, PerPiece) for field in fields):
                return kind.put(lists[0], dict(enumerate(fields)))
        items = list(chain.from_iterable(lists))
        if self.order is not None:
            items = [items[rank] for rank in self.order.ranks]
        return kind.put(lists[0], dict(enumerate(items)))

    def _fields(self, values: list[Any], kind: Kind, path: Path) -> Any:
        parts = [kind.take(value) for value in values]
        if any(each.keys() != parts[0].keys() for each in parts):
            return PerPiece(values, self.lengths)
        joined = {key: self.of([each[key] for each in parts], (*path, key)) for key in parts[0]}
        try:
            return kind.put(values[0], joined)
        except BatchError:
            # a type such as torch.Size takes certain values only
            return PerPiece(values, self.lengths)
