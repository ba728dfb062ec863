"""The outputs of the pieces, joined into the output of the batch."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto
from functools import reduce
from itertools import chain
from operator import add
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from elastic_mbs.batch.containers import Kind, Path, Role, dotted, kind_of, roles_in, suffixes
from elastic_mbs.errors import BatchError, UsageError


class Apart(Enum):
    """The word for ragged outputs that are left as one value per piece."""

    APART = auto()


# the value that fills up ragged outputs, or one by name; None refuses them
Fill = float | Mapping[str, float] | None
Pad = Fill | Apart


def check_pad(pad: object) -> None:
    """Refuse a `pad` that is neither a number nor numbers by name."""
    each = list(pad.values()) if isinstance(pad, Mapping) else [pad]
    numbers = all(isinstance(value, int | float) and not isinstance(value, bool) for value in each)
    named = isinstance(pad, Mapping) and not all(isinstance(name, str) for name in pad)
    if not (pad is None or isinstance(pad, Apart) or numbers) or named:
        raise UsageError(
            f"pad={pad!r} is neither a number nor a dict of numbers by the names of outputs: say "
            "pad=0, or pad={'sequences': 0}"
        )


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

    def padded(self, values: list[Any], fill: float) -> list[Any]:
        """Fill up trimmed tensors to the widest piece.

        A dimension counts as trimmed where each tensor is as wide in it as its piece.
        """
        for dim, sizes in enumerate(zip(*[value.shape[1:] for value in values], strict=True), 1):
            if len(set(sizes)) > 1 and list(sizes) == self.widths:
                behind = (0, 0) * (values[0].ndim - 1 - dim)
                values = [
                    functional.pad(value, (*behind, 0, max(sizes) - value.shape[dim]), value=fill)
                    for value in values
                ]
        return values


def join(
    outputs: Sequence[Any],
    lengths: Sequence[int],
    per_piece: set[Path] | None = None,
    order: Order | None = None,
    pad: Pad = None,
) -> Any:
    """Return the batch's output, in the same containers however the batch was split.

    Tensors and arrays with one row per sample are concatenated, lists of per-sample items chained,
    equal texts, flags and None kept once. All else becomes a `PerPiece`. Rows that are as wide as
    the widest of their piece (generated texts) are filled up with `pad` at their ends.

    Args:
        outputs: of the pieces, in order.
        lengths: samples of each piece.
        per_piece: places of tensors known to come once per piece; new ones are added.
        order: of a sorted batch.
        pad: fills up ragged rows.

    Raises:
        UsageError: the pieces differ in width, and there is no value to fill them up with.
    """
    known = set[Path]() if per_piece is None else per_piece
    return _Join(lengths, known, order, pad).of(list(outputs), ())


class PerPiece(list[Any]):
    """Values that come once per piece and not once per sample: a mean loss, a confusion matrix.

    Attributes:
        lengths: samples of each piece.
    """

    def __init__(self, values: Iterable[Any], lengths: Iterable[int]) -> None:
        super().__init__(values)
        self.lengths = tuple(lengths)

    def mean(self) -> Any:
        """Return the mean over all samples, where each value is the mean over its piece.

        A piece weighs by its samples, whatever `count` says: for a mean over tokens return their
        sum and their number, and divide one `sum` by the other.
        """
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
    pad: Pad

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
            found = self._pad_of(path)
            values = self.order.padded(values, 0 if found is None else found)
        if by_sample and self.per_piece.isdisjoint(places):
            values = self._even(values, path)
        forms = {(value.shape[1:], value.dtype, getattr(value, "device", None)) for value in values}
        if not by_sample or len(forms) > 1 or not self.per_piece.isdisjoint(places):
            return PerPiece(values, self.lengths)
        concatenate = (
            torch.cat if isinstance(values[0], Tensor) else sys.modules["numpy"].concatenate
        )
        joined = values[0] if len(values) == 1 else concatenate(values)
        return joined if self.order is None else joined[self.order.ranks]

    def _pad_of(self, path: Path) -> float | None:
        """Return the value that fills up the output at `path`."""
        if isinstance(self.pad, Mapping):
            return next((self.pad[name] for name in suffixes(path) if name in self.pad), None)
        return None if isinstance(self.pad, Apart) else self.pad

    def _even(self, values: list[Any], path: Path) -> list[Any]:
        """Fill up rows whose width differs from piece to piece, at their ends.

        In one piece the whole batch would have given one tensor, so they must not come apart.
        """
        shapes = {tuple(value.shape[1:]) for value in values}
        if len(shapes) == 1 or len(set(map(len, shapes))) > 1 or self.pad is Apart.APART:
            return values
        fill = self._pad_of(path)
        name = dotted(path)
        if fill is None:
            by_name = f" (for this output alone pad={{{name!r}: 0}})" if name else ""
            raise UsageError(
                f"the output{' ' if name else ''}{name} has rows of the shapes {sorted(shapes)} in "
                "the pieces of this batch, and would be one tensor if the batch ran in one piece\n"
                "  say which value fills them up at the end, such as 0: evaluate(fn, batch, pad=0)"
                f" or, for training too, ElasticMBS(model, pad=0){by_name}\n"
                "  or return a list with one tensor per sample, list(output)"
            )
        widths = [max(sizes) for sizes in zip(*shapes, strict=True)]
        return [_filled(value, widths, fill, name) for value in values]

    def _list(self, lists: list[Any], kind: Kind, path: Path) -> Any:
        """Join lists that are as long as their pieces: they hold items.

        Where tensors directly in them could be fields as well, they are fields, as in a batch.
        """
        if len(set(self.lengths)) == 1 and any(Role.TENSOR in roles_in(each) for each in lists):
            apart = replace(self, pad=Apart.APART)  # a try: what does not fit together is no field
            fields = [
                apart.of(list(parts), (*path, i))
                for i, parts in enumerate(zip(*lists, strict=True))
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


def _filled(value: Any, widths: Sequence[int], fill: float, name: str) -> Any:
    """Return a tensor or an array whose dimensions after the first are `widths` long."""
    if not _holds(value, fill):
        raise UsageError(
            f"pad={fill!r} is no value of the output{' ' if name else ''}{name}, whose type is "
            f"{value.dtype}: give one that it can hold, such as pad="
            f"{f'{{{name!r}: 0}}' if name else 0}"
        )
    missing = [width - size for width, size in zip(widths, value.shape[1:], strict=True)]
    if isinstance(value, Tensor):
        pairs = [each for size in reversed(missing) for each in (0, size)]
        return functional.pad(value, pairs, value=fill)
    behind = [(0, 0), *((0, size) for size in missing)]
    return sys.modules["numpy"].pad(value, behind, constant_values=fill)


def _holds(value: Any, fill: float) -> bool:
    """Return whether the type of a tensor or an array has the value `fill`, but for rounding."""
    if isinstance(value, Tensor):
        kind = "f" if value.is_floating_point() or value.is_complex() else "i"
        kind = "b" if value.dtype is torch.bool else kind
        limits: Any = torch.iinfo
    else:
        kind, limits = value.dtype.kind, sys.modules["numpy"].iinfo
    if kind in "iu":
        low, high = limits(value.dtype).min, limits(value.dtype).max
        return low <= fill <= high and fill == int(fill)
    return kind in "fc" or (kind == "b" and fill in (0, 1))
