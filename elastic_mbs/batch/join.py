"""Outputs of the pieces back into one output of the batch."""

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
    """How the samples of a sorted batch go back into its own order."""

    ranks: list[int]  # of each sample that was run, in the batch's order: its place in the pieces
    widths: list[int]  # of each piece: the length that its samples were trimmed to

    @classmethod
    def of(
        cls, order: Sequence[int], lengths: Sequence[int], pieces: Sequence[tuple[int, int]]
    ) -> Order:
        run = [sample for start, stop in pieces for sample in order[start:stop]]
        return cls(
            sorted(range(len(run)), key=run.__getitem__), [lengths[start] for start, _ in pieces]
        )

    def padded(self, values: list[Any]) -> list[Any]:
        """Tensors that differ in a dimension in which they are as wide as their pieces, filled up with zeros to the widest piece."""
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
    """The batch's output from its pieces' outputs, in the same containers however the batch was split.

    Tensors and arrays with one row per sample are concatenated, lists of per-sample items chained,
    equal texts, flags and None kept once; all else becomes a `PerPiece`. `per_piece` remembers the
    places of tensors known to come once per piece; new ones are added. `order` is of sorted
    batches.
    """
    return _Join(lengths, set() if per_piece is None else per_piece, order).of(list(outputs), ())


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
        return reduce(add, [value * weight for value, weight in zip(self, weights, strict=True)])


# A place: path, type and shape of a row of a tensor that once had another number of rows than its
# piece had samples. A matrix of four classes is not taken for four samples where pieces have four.
_MOST_PLACES = 256  # remembered: outputs of another shape in each call must not fill the memory
_CONSTANT = (str, bytes, bool, Enum, torch.dtype, torch.device)


@dataclass
class _Join:
    """One join of several pieces."""

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
            return PerPiece(values, self.lengths)  # a nested one can be without a shape
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
        # not where padded per piece
        alike = (
            len(
                {(value.shape[1:], value.dtype, getattr(value, "device", None)) for value in values}
            )
            == 1
        )
        if not by_sample or not alike or not self.per_piece.isdisjoint(places):
            return PerPiece(values, self.lengths)
        concatenate = (
            torch.cat if isinstance(values[0], Tensor) else sys.modules["numpy"].concatenate
        )
        joined = values[0] if len(values) == 1 else concatenate(values)
        return joined if self.order is None else joined[self.order.ranks]

    def _list(self, lists: list[Any], kind: Kind, path: Path) -> Any:
        """Lists as long as their pieces hold items; where tensors directly in them could be fields just as well, they are fields, as in a batch."""
        if len(set(self.lengths)) == 1 and any(Role.TENSOR in roles_in(each) for each in lists):
            fields = [
                self.of(list(parts), (*path, i)) for i, parts in enumerate(zip(*lists, strict=True))
            ]
            if not any(isinstance(field, PerPiece) for field in fields):
                return kind.put(lists[0], dict(enumerate(fields)))
        items = list(chain.from_iterable(lists))
        return kind.put(
            lists[0],
            dict(
                enumerate(
                    items if self.order is None else [items[rank] for rank in self.order.ranks]
                )
            ),
        )

    def _fields(self, values: list[Any], kind: Kind, path: Path) -> Any:
        parts = [kind.take(value) for value in values]
        if any(each.keys() != parts[0].keys() for each in parts):
            return PerPiece(values, self.lengths)
        joined = {key: self.of([each[key] for each in parts], (*path, key)) for key in parts[0]}
        try:
            return kind.put(values[0], joined)
        except BatchError:
            # a type that takes certain values only, such as torch.Size
            return PerPiece(values, self.lengths)
