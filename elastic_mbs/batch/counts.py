"""Counts of loss terms per sample.

A piece with c of the batch's C terms has the weight c / C. This is exact for every split, also for
a split that changes during the call. Under `reduction="sum"` each piece has the weight 1.

A mean over nothing is 0/0, so under a mean a loss of weight 0 is left out of the sum: NaN · 0 is
NaN. It has to be 0 or NaN then, because any other value would be lost
(`engine.attempt.check_nothing_lost`).

Micro-Batch Streaming (arXiv 2110.12484) divides by the number of pieces instead. With pieces of 16
samples and a last one of 1, that last sample then has 8.5 times its share.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor

from elastic_mbs.batch.containers import Role, kind_of, lookup
from elastic_mbs.batch.ragged.rows import Rows
from elastic_mbs.batch.splitters import type_name
from elastic_mbs.batch.view import BatchView
from elastic_mbs.errors import CountError

CountFn = Callable[[Any], Any]  # batch → loss terms per sample, a vector of length N

# right for a mask of any number of dimensions, one included
_BY_SAMPLE = (
    "  where mask, such as labels != -100, has a row per sample: "
    "mask.reshape(len(mask), -1).sum(1)\n"
    "  count_tokens(key=...) counts labels so, along whichever dimension the samples lie"
)


@dataclass(slots=True)
class _Column:
    # prefix[i]: terms before sample i, in a unit in which all are whole, so that a share is rounded
    # once
    prefix: Sequence[int]
    units: float  # in the batch
    total: int | float


class Counts:
    """The loss terms of each sample, in the order of the pieces, read once before any split."""

    def __init__(self, columns: Mapping[str | None, _Column], samples: int) -> None:
        self.n = samples
        self._columns = columns  # by the name of the loss; a single loss has the name None
        single = columns.get(None)
        totals = {str(name): column.total for name, column in columns.items()}
        # names of the losses; None for a single one
        self.names = None if single is not None else tuple(totals)
        # losses without a term in the whole batch
        self.void = frozenset(name for name, column in columns.items() if not column.total)
        # loss terms of the batch
        self.total: int | float | dict[str, int | float] = (
            totals if single is None else single.total
        )

    @classmethod
    @lru_cache(maxsize=64)  # the batches of a run have few lengths
    def samples(cls, n: int) -> Counts:
        """Return counts of 1 for each of `n` samples."""
        return cls({None: _Column(range(n + 1), n, n)}, n)

    @classmethod
    def one(cls, names: Iterable[str | None]) -> Counts:
        """Return counts of 1 for the only sample of a batch, in each of its losses."""
        return cls(dict.fromkeys(names, _Column(range(2), 1, 1)), 1)

    @classmethod
    def none(cls, names: Iterable[str | None]) -> Counts:
        """Return the counts of no sample, in each of these losses."""
        return cls({name: _Column([0], 0, 0) for name in names}, 0)

    @classmethod
    def read(
        cls,
        count: CountFn | Mapping[str, CountFn | None] | None,
        view: BatchView,
        reduction: str = "mean",
        *,
        alone: bool = True,
    ) -> Counts:
        """Call `count` on the whole batch, or each function of a dict (None in it: samples).

        Each vector is copied to the host once. Unless `alone`, the batch is a part of a larger one,
        and may have no loss term.

        Raises:
            CountError: they are no counts of the batch's samples, or, under a mean, all zero.
        """
        samples = cls.samples(view.length)
        if count is None:
            return samples
        counts = cls._of(count, view, samples)
        if alone and reduction == "mean" and len(counts.void) == len(counts._columns):
            what = "count is" if counts.names is None else "each function of count is"
            raise CountError(
                f"{what} zero for all {view.length} samples, so the loss is a mean over nothing "
                "(is every label ignored?)\n"
                "  skip such a batch before the call"
            )
        return counts

    @classmethod
    def _of(
        cls, count: CountFn | Mapping[str, CountFn | None], view: BatchView, samples: Counts
    ) -> Counts:
        if not isinstance(count, Mapping):
            return cls({None: _column(count, view, "count")}, view.length)
        if not count or not all(isinstance(name, str) for name in count):
            raise CountError(
                f"count is the dict {dict(count)!r}: its keys are the names of the losses that "
                "loss_fn returns, one at least"
            )
        each: dict[str | None, _Column] = {
            name: samples._columns[None] if fn is None else _column(fn, view, f"count[{name!r}]")
            for name, fn in count.items()
        }
        return cls(each, view.length)

    def totals(self) -> list[float]:
        """Return the loss terms of the batch, for each loss."""
        return [float(column.total) for column in self._columns.values()]

    def among(self, totals: Sequence[float]) -> Counts:
        """Return the same counts as a part of larger totals, one for each loss."""
        columns = {
            name: _Column(
                column.prefix,
                column.units * total / column.total if column.total else 1,
                type(column.total)(total),
            )
            for (name, column), total in zip(self._columns.items(), totals, strict=True)
        }
        return Counts(columns, self.n)

    def divided_by(self, parts: int) -> Counts:
        """Return the same counts of one loss, whose weights are smaller by a factor of `parts`."""
        if parts == 1:
            return self
        column = self._columns[None]
        units = column.units * parts
        return Counts({None: _Column(column.prefix, units, column.total)}, self.n)

    def weights(self, start: int, stop: int, reduction: str = "mean") -> dict[str | None, float]:
        """Return the weight of each loss of samples `start` to `stop`, by name.

        It is c / C; under "sum" 1, because a sum over no term is 0 and not 0/0.
        """
        if reduction == "sum":
            return dict.fromkeys(self._columns, 1.0)
        shares = {}
        # not a comprehension, which is a call of its own: this runs for every piece
        for name, column in self._columns.items():
            shares[name] = (column.prefix[stop] - column.prefix[start]) / (column.units or 1)
        return shares


def _column(count: Any, view: BatchView, where: str) -> _Column:
    """Return the counts of one loss, in the order in which the samples run."""
    if not callable(count):
        raise CountError(
            f"{where} is {_described(count)}: it must be None (samples), a function of the batch "
            "that gives one count per sample, or a dict of such functions"
        )
    given = count.of(view) if isinstance(count, count_tokens) else count(view.batch)
    values = _on_host(given, where)
    if len(values) != view.length:
        raise CountError(
            f"{where} returned {len(values)} counts for a batch of {view.length} samples: it must "
            f"return one count per sample\n{_BY_SAMPLE}"
        )
    if not set(map(type, values)) <= {int, float}:
        values = [_number(value, i, where) for i, value in enumerate(values)]
    total = _total(values, where)
    if view.sorted is not None:
        values = [values[i] for i in view.sorted.order]
    if float in set(map(type, values)):
        ratios = [value.as_integer_ratio() for value in values]
        scale = max([denominator for _, denominator in ratios])  # each is a power of two
        values = [numerator * (scale // denominator) for numerator, denominator in ratios]
    return _Column([0, *accumulate(values)], sum(values), total)


def _total(values: list[Any], where: str) -> int | float:
    """Return the sum of the counts, none of which is negative or infinite."""
    floating = float in set(map(type, values))
    try:
        if min(values) < 0 or (floating and not all(map(math.isfinite, values))):
            i = next(i for i, value in enumerate(values) if not 0 <= value < math.inf)
            raise CountError(
                f"{where} of sample {i} is {values[i]}: counts are "
                f"{'not negative' if values[i] < 0 else 'finite'}"
            )
        return math.fsum(values) if floating else sum(values)
    except OverflowError:
        raise CountError(
            f"{where} adds up to more than a float can hold ({sys.float_info.max:.3g}): scale the "
            "counts down"
        ) from None


def _on_host(result: Any, where: str) -> list[Any]:
    """Return the vector as a list of Python numbers."""
    if isinstance(result, Mapping):
        raise CountError(
            f"{where} returned a dict: give a dict of functions instead, one per loss: "
            f"count={{{', '.join(map(repr, result))}: ...}}"
        )
    if isinstance(result, Real) or getattr(result, "ndim", 1) != 1:
        equal = "  where all samples count the same: torch.full((N,), count) for N samples\n"
        many = getattr(result, "ndim", 0) > 1
        raise CountError(
            f"{where} returned {_described(result)}: it must return one count per sample\n"
            f"{'' if many else equal}{_BY_SAMPLE}"
        )
    if isinstance(result, Tensor) or _is_array(result):
        return list(result.tolist())
    if not isinstance(result, Sequence) or isinstance(result, str | bytes):
        raise CountError(
            f"{where} returned {_described(result)}: it must return one number per sample, as a "
            "tensor or a sequence"
        )
    forms = {
        (value.device, value.dtype) if isinstance(value, Tensor) and value.ndim == 0 else None
        for value in result
    }
    if len(forms) == 1 and None not in forms:
        return list(torch.stack(list(result)).tolist())  # one copy from the device for all of them
    return [
        value.item() if isinstance(value, Tensor) and value.ndim == 0 else value for value in result
    ]


def _per_row(valid: Tensor) -> Tensor:
    """Return the number of true elements in each row."""
    return valid.sum(dim=tuple(range(1, valid.ndim))) if valid.ndim > 1 else valid.long()


def _number(value: Any, i: int, where: str) -> int | float:
    if isinstance(value, Real):
        return int(value) if isinstance(value, Integral) else float(value)
    raise CountError(
        f"{where} of sample {i} is {_described(value)}: counts are numbers, one per sample"
    )


def _is_array(value: Any) -> bool:
    return kind_of(type(value)).role is Role.ARRAY


def _described(value: Any) -> str:
    return (
        f"a tensor of shape {tuple(value.shape)}"
        if hasattr(value, "shape")
        else f"{value!r:.80} (of type {type_name(type(value))})"
    )


@dataclass(frozen=True, slots=True)
class count_tokens:
    """The number of labels in each sample, `count=` for losses that are means over labels.

    Called with a batch it returns a tensor of shape (N,) on the labels' device, or a list where the
    labels are a list with an entry per sample.

    Args:
        key: the place of the labels: a name, a dotted path, an index, or a function batch → labels,
            a tensor of shape (N, ...).
        ignore_index: labels of this value are no loss terms (-100 in PyTorch and transformers).
        shift: leave out the first position along dim 1, as causal language models do: they predict
            labels[:, 1:]. Not where tokens precede the labels, so that the first label is
            predicted too (the virtual tokens of peft's prompt tuning).
    """

    key: str | int | Callable[[Any], Any] = "labels"
    ignore_index: int = -100
    shift: bool = False

    def __call__(self, batch: Any) -> Any:
        return self._count(self._labels(batch))

    def of(self, view: BatchView) -> Any:
        """Return the counts of a batch whose samples can lie along another dimension than 0."""
        labels = self._labels(view.batch)
        dim = view.dim_of(labels)
        if dim is None and isinstance(labels, list | tuple):
            raise CountError(
                f"{self!r} found {len(labels)} fields of {view.length} samples each, which is no "
                "list with one entry per sample: give a function, as in "
                "count_tokens(lambda batch: torch.stack(batch['labels'], 1))"
            )
        rows = view.rows_of(labels)
        if rows is not None:
            return self._count_rows(labels, rows, dim or 0)
        return self._count(labels, dim or 0)

    def _count_rows(self, labels: Any, rows: Rows, dim: int) -> list[int]:
        """Return the counts of labels of which each sample has some rows.

        With `shift` the first row of each sample is left out.
        """
        if isinstance(labels, list | tuple):
            rows_valid = [int(self._valid(row).sum()) for row in labels]
            valid = torch.tensor(rows_valid, dtype=torch.int64)
        else:
            valid = _per_row(self._valid(labels).movedim(dim, 0)).cpu()
        if rows.order is not None:
            valid = valid[rows.order]
        each = [part[int(self.shift) :] for part in valid.split(rows.lengths)]
        return [int(part.sum()) for part in each]

    def _count(self, labels: Any, dim: int = 0) -> Any:
        if isinstance(labels, list | tuple):
            return [self._count_sample(sample) for sample in labels]
        labels = torch.as_tensor(labels) if _is_array(labels) else labels
        if not isinstance(labels, Tensor):
            raise CountError(
                f"{self!r} found {_described(labels)}: labels are a tensor of shape (N, ...) or a "
                "list with one entry per sample"
            )
        if labels.ndim < 1 + self.shift:
            raise CountError(
                f"{self!r} found labels of shape {tuple(labels.shape)}: they must be "
                f"{'(N, L, ...)' if self.shift else '(N, ...)'}"
            )
        labels = labels.movedim(dim, 0)
        return _per_row((labels[:, 1:] if self.shift else labels) != self.ignore_index)

    def _valid(self, labels: Any) -> Tensor:
        return torch.as_tensor(labels) != self.ignore_index

    def _count_sample(self, sample: Any) -> Any:
        sample = (
            torch.as_tensor(sample)
            if isinstance(sample, list | tuple | int) or _is_array(sample)
            else sample
        )
        if not isinstance(sample, Tensor) or sample.ndim < self.shift:
            raise CountError(
                f"{self!r} found a list with {_described(sample)} in it: its entries are one "
                "sample's labels each"
            )
        return ((sample[1:] if self.shift else sample) != self.ignore_index).sum()

    def _labels(self, batch: Any) -> Any:
        if callable(self.key):
            return self.key(batch)
        try:
            return lookup(batch, self.key)
        except LookupError as error:
            raise CountError(
                f"{self!r}: {error}\n  count_tokens(key=...) takes a name, a dotted path, an "
                "index or a function"
            ) from error


_LABEL_NAMES = frozenset({"label", "labels", "target", "targets", "y"})


def looks_like_token_labels(view: BatchView) -> str | None:
    """Return the name of a leaf that looks like labels with ignored positions.

    The loss is then probably no mean over samples. It reads whole int64 and int32 tensors on the
    CPU, and waits for no device: call it once, not at every step.
    """
    # the second part of a pair is usually the labels
    names = _LABEL_NAMES | ({"1"} if isinstance(view.batch, tuple | list) else set())
    for path, tensor in view.named_tensors():
        integers = tensor.device.type == "cpu" and tensor.dtype in (torch.int64, torch.int32)
        if (
            integers
            and (path in names or path.rpartition(".")[2] in _LABEL_NAMES)
            and bool((tensor == -100).any())
        ):
            return path
    return None
