"""Counts of loss terms, and the exact weights that follow from them.

The batch's loss is a mean over C terms, a piece's loss the mean over its own c terms, so the piece is weighed by c / C. That is exact for every split
and does not depend on the number of pieces, so what is already accumulated stays valid when the split changes in the middle of a batch. Micro-Batch
Streaming (arXiv 2110.12484) divides by the number of pieces instead, which weighs a sample in a ragged tail of 1 beside 16 by 8.5 times its share.

Counts are kept as prefix sums of Python integers. Floating-point counts are binary fractions, so they are brought to one power-of-two denominator and
summed as integers too: sums over any range are exact and take constant time, and `c / C` is one division of integers, which Python rounds correctly.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor

from elastic_mbs.batch.containers import lookup
from elastic_mbs.batch.splitters import type_name
from elastic_mbs.batch.view import BatchView
from elastic_mbs.errors import CountError

CountFn = Callable[[Any], Any]
"""batch → loss terms per sample, a vector of length N."""


@dataclass(frozen=True, slots=True)
class _Column:
    """The counts of one loss: `prefix[i] / denominator` terms before sample i."""

    prefix: Sequence[int]
    denominator: int = 1
    floating: bool = False

    def number(self, terms: int) -> int | float:
        return terms / self.denominator if self.floating else terms


@dataclass(frozen=True, slots=True, repr=False)
class Counts:
    """Loss terms per sample, read once before any split. Make it with `samples` or `read`."""

    _columns: Mapping[str | None, _Column]

    @classmethod
    def samples(cls, n: int) -> Counts:
        """Every one of `n` samples counts 1.

        Raises:
            CountError: `n` is not positive.
        """
        if n < 1:
            raise CountError(f"a batch of {n} samples has no loss terms: skip it before the call")
        return cls({None: _Column(range(n + 1))})

    @classmethod
    def read(cls, count: CountFn | Mapping[str, CountFn | None] | None, view: BatchView) -> Counts:
        """Calls `count` on the whole batch and copies what it returns to the host (one copy per vector).

        Args:
            count: None (samples), a function batch → vector of length N (tensor, array or sequence of numbers ≥ 0), or such functions by name for a
                `loss_fn` that returns a dict of losses with the same keys (None in it: samples).
            view: the batch.

        Raises:
            CountError: `count` is something else, or what it returns is no vector of length N, negative, not finite or zero for every sample.
        """
        if count is None:
            return cls.samples(view.length)
        if not isinstance(count, Mapping):
            return cls({None: _column(count, view, None)})
        if not count:
            raise CountError("count is an empty dict: name each loss, or leave count out to count samples")
        for name in count:
            if not isinstance(name, str):
                raise CountError(f"count has the key {name!r}: keys are the names of the losses that loss_fn returns")
        return cls({name: _column(fn, view, name) if fn is not None else _Column(range(view.length + 1)) for name, fn in count.items()})

    @property
    def n(self) -> int:
        """Samples."""
        return len(next(iter(self._columns.values())).prefix) - 1

    @property
    def uniform(self) -> bool:
        """Whether samples are counted, each as 1: then pieces of one length have one weight."""
        only = self._columns.get(None)
        return only is not None and isinstance(only.prefix, range)

    @property
    def names(self) -> tuple[str, ...] | None:
        """The names of the losses; None where there is one without a name."""
        return tuple(name for name in self._columns if name is not None) or None

    @property
    def totals(self) -> dict[str | None, int | float]:
        """Loss terms of the batch, by name."""
        return self.of(0, self.n)

    @property
    def total(self) -> int | float | dict[str, int | float]:
        """Loss terms of the batch: a number, or a dict where the losses have names."""
        totals = self.totals
        return totals[None] if None in totals else {str(name): total for name, total in totals.items()}

    def of(self, start: int, stop: int) -> dict[str | None, int | float]:
        """Loss terms of samples `start` to `stop`, by name: an int, or the nearest float where the counts are floats."""
        self._check(start, stop)
        return {name: column.number(column.prefix[stop] - column.prefix[start]) for name, column in self._columns.items()}

    def weight(self, start: int, stop: int, name: str | None = None) -> float:
        """The share c / C of samples `start` to `stop`, correctly rounded. The weights of any split add up to 1 (see `share`).

        Raises:
            CountError: no such range, or no loss of that name.
        """
        terms, total = self._ratio(start, stop, name)
        return terms / total

    def share(self, start: int, stop: int, name: str | None = None) -> Fraction:
        """`weight` before rounding."""
        return Fraction(*self._ratio(start, stop, name))

    def weights_of(self, bounds: Sequence[tuple[int, int]], *, reduction: str = "mean") -> list[dict[str | None, float] | None]:
        """The `weights` of several pieces, which may share them: of each (start, stop)."""
        if not self.uniform or reduction != "mean":
            return [self.weights(start, stop, reduction=reduction) for start, stop in bounds]
        samples = self.n
        by_length: dict[int, dict[str | None, float] | None] = {
            length: {None: length / samples} for length in {stop - start for start, stop in bounds}
        }
        return [by_length[stop - start] for start, stop in bounds]

    def weights(self, start: int, stop: int, *, reduction: str = "mean") -> dict[str | None, float] | None:
        """What each loss of samples `start` to `stop` is multiplied by, by name; None where they have no loss term at all.

        A piece without terms is skipped: its mean loss is 0/0, and no weight mends a NaN. Under "mean" it is `weight`; under "sum" a loss only has to
        be left out where it has no terms.
        """
        self._check(start, stop)
        terms = {name: column.prefix[stop] - column.prefix[start] for name, column in self._columns.items()}
        if not any(terms.values()):
            return None
        if reduction == "sum":
            return {name: float(bool(own)) for name, own in terms.items()}
        return {name: own / self._columns[name].prefix[-1] for name, own in terms.items()}

    def _ratio(self, start: int, stop: int, name: str | None) -> tuple[int, int]:
        self._check(start, stop)
        column = self._columns.get(name)
        if column is None:
            there = f"the names are {', '.join(map(repr, self._columns))}" if self.names else "there is one loss, without a name"
            raise CountError(f"there is no count for the loss {name!r}: {there}")
        return column.prefix[stop] - column.prefix[start], column.prefix[-1]

    def _check(self, start: int, stop: int) -> None:
        if not 0 <= start <= stop <= self.n:
            raise CountError(f"there are no samples {start}:{stop} in a batch of {self.n}")

    def __repr__(self) -> str:
        return f"Counts(n={self.n}, total={self.total})"


def _column(count: Any, view: BatchView, name: str | None) -> _Column:
    where = "count" if name is None else f"count[{name!r}]"
    if not callable(count):
        raise CountError(
            f"{where} is {_shown(count)}: it must be None (samples), a function of the batch that gives one count per sample, "
            "or a dict of such functions"
        )
    result = count.of(view) if isinstance(count, TokenCount) else count(view.batch)
    if isinstance(result, Mapping):
        raise CountError(f"{where} returned a dict: give a dict of functions instead, one per loss: count={{{', '.join(map(repr, result))}: ...}}")
    values = _on_host(result, where)
    if len(values) != view.length:
        raise CountError(
            f"{where} returned {len(values)} counts for a batch of {view.length} samples: it must return one count per sample\n"
            f"  sum over every dimension but the first, e.g. (labels != -100).sum(1)"
        )
    return _summed(values, where)


def _is_array(value: Any) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray)


def _as_tensor(value: Any) -> Any:
    return torch.as_tensor(value) if _is_array(value) else value


def _on_host(result: Any, where: str) -> list[Any]:
    """The vector as a list of Python numbers."""
    if isinstance(result, Tensor) or _is_array(result):
        if result.ndim != 1:
            shape = "a single number" if result.ndim == 0 else f"a tensor of shape {tuple(result.shape)}"
            raise CountError(f"{where} returned {shape}: it must return one count per sample\n  sum over every dimension but the first")
        values: list[Any] = result.tolist()
        return values
    if isinstance(result, Real):
        raise CountError(f"{where} returned the single number {result}: it must return one count per sample, so that every split is known in advance")
    if not isinstance(result, Sequence) or isinstance(result, str | bytes):
        raise CountError(f"{where} returned {_shown(result)}: it must return one number per sample, as a tensor or a sequence")
    scalars = [value for value in result if isinstance(value, Tensor) and value.ndim == 0]
    if not scalars:
        return list(result)
    if len(scalars) == len(result) and len({(value.device, value.dtype) for value in scalars}) == 1:
        stacked: list[Any] = torch.stack(scalars).tolist()  # one copy from the device for all of them
        return stacked
    return [value.item() if isinstance(value, Tensor) and value.ndim == 0 else value for value in result]


def _summed(values: list[Any], where: str) -> _Column:
    """Prefix sums, exact."""
    kinds = set(map(type, values))
    if not kinds <= {int, float, bool}:
        values = [_number(value, i, where) for i, value in enumerate(values)]
        kinds = set(map(type, values))
    if float in kinds:
        for i, value in enumerate(values):
            if not math.isfinite(value):
                raise CountError(f"{where} of sample {i} is {value}: counts are finite")
    if min(values) < 0:
        i = next(i for i, value in enumerate(values) if value < 0)
        raise CountError(f"{where} of sample {i} is {values[i]}: counts are not negative")
    if not any(values):
        raise CountError(
            f"{where} is zero for all {len(values)} samples, so the loss is a mean over nothing (is every label ignored?)\n"
            "  skip such a batch before the call"
        )
    if float not in kinds:
        return _Column([0, *accumulate(map(int, values))])
    ratios = [value.as_integer_ratio() for value in values]
    denominator = max(below for _, below in ratios)
    prefix = [0, *accumulate(above * (denominator // below) for above, below in ratios)]
    if prefix[-1] > denominator * int(sys.float_info.max):
        raise CountError(f"{where} adds up to more than a float can hold ({sys.float_info.max:.3g}): scale the counts down")
    return _Column(prefix, denominator, floating=True)


def _number(value: Any, i: int, where: str) -> int | float:
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        return float(value)
    raise CountError(f"{where} of sample {i} is {_shown(value)}: counts are numbers, one per sample")


def _shown(value: Any) -> str:
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"{value!r:.80} (of type {type_name(type(value))})"


@dataclass(frozen=True, slots=True)
class TokenCount:
    """Counts the labels that are not ignored, per sample. Made by `count_tokens`."""

    key: str | int | Callable[[Any], Any] = "labels"
    ignore_index: int = -100
    shift: bool = False

    def __call__(self, batch: Any) -> Any:
        """The counts: a tensor of shape (N,) on the labels' device, or a list where the labels are a list with one entry per sample.

        Raises:
            CountError: there are no such labels, or `shift` has no dimension to shift along.
        """
        return self._counted(_as_tensor(self._labels(batch)))

    def of(self, view: BatchView) -> Any:
        """The counts of a batch whose samples may lie along another dimension than 0.

        Raises:
            CountError: as above, or the labels are a list of fields, each with all samples in it.
        """
        found = self._labels(view.batch)
        how = view.cut_of(found)
        if how is None and isinstance(found, list | tuple):
            raise CountError(
                f"{self!r} found {len(found)} fields of {view.length} samples each, which is no list with one entry per sample: "
                "give a function, as in count_tokens(lambda batch: torch.stack(batch['labels'], 1))"
            )
        labels = _as_tensor(found)
        return self._counted(labels.movedim(how, 0) if how else labels)

    def _counted(self, labels: Any) -> Any:
        if isinstance(labels, list | tuple):
            return [self._count_one(sample) for sample in labels]
        if not isinstance(labels, Tensor):
            raise CountError(f"{self!r} found {_shown(labels)}: labels are a tensor of shape (N, ...) or a list with one entry per sample")
        if labels.ndim < 1 + self.shift:
            need = "(N, L, ...)" if self.shift else "(N, ...)"
            raise CountError(f"{self!r} found labels of shape {tuple(labels.shape)}: they must be {need}")
        valid = (labels[:, 1:] if self.shift else labels) != self.ignore_index
        return valid.sum(dim=tuple(range(1, labels.ndim))) if labels.ndim > 1 else valid.long()

    def _labels(self, batch: Any) -> Any:
        if callable(self.key):
            return self.key(batch)
        try:
            return lookup(batch, self.key)
        except LookupError as error:
            raise CountError(
                f"{self!r}: {error}\n  say where the labels are: count_tokens(key=...) takes a name, a dotted path, an index or a function"
            ) from error

    def _count_one(self, sample: Any) -> Any:
        sample = _as_tensor(torch.tensor(sample) if isinstance(sample, list | tuple | int) else sample)
        if not isinstance(sample, Tensor) or sample.ndim < self.shift:
            raise CountError(f"{self!r} found a list with {_shown(sample)} in it: its entries are one sample's labels each")
        return ((sample[1:] if self.shift else sample) != self.ignore_index).sum()

    def __repr__(self) -> str:
        key = getattr(self.key, "__qualname__", repr(self.key)) if callable(self.key) else repr(self.key)
        return f"count_tokens(key={key}, ignore_index={self.ignore_index}, shift={self.shift})"


def count_tokens(key: str | int | Callable[[Any], Any] = "labels", ignore_index: int = -100, shift: bool = False) -> TokenCount:
    """`count=` for losses that are means over labels: the number of labels other than `ignore_index` in each sample.

    Args:
        key: where the labels are: a name, a dotted path, an index, or a function batch → labels, a tensor of shape (N, ...).
        ignore_index: labels of this value are no loss terms (-100 in PyTorch and transformers).
        shift: leave out the first position along dim 1, as causal language models do: they predict labels[:, 1:]. Not where something stands in
            front of the labels, so that the first one is predicted, too (the virtual tokens of peft's prompt tuning).

    Returns:
        A function batch → counts of shape (N,).
    """
    return TokenCount(key, ignore_index, shift)


_LABEL_NAMES = frozenset({"label", "labels", "target", "targets", "y"})


def looks_like_token_labels(view: BatchView) -> str | None:
    """The name of a leaf that looks like labels with ignored positions, so that a mean over samples is probably not what the loss is.

    Looks at int64 and int32 tensors on the CPU only (no device is waited for), named label(s), target(s) or y, or second in a tuple or list.
    Reads the whole tensor: call it once, not on every step.
    """
    pair = isinstance(view.batch, tuple | list)
    for path, tensor in view.named_tensors():
        named = path.rpartition(".")[2] in _LABEL_NAMES or (pair and path == "1")
        integers = tensor.device.type == "cpu" and tensor.dtype in (torch.int64, torch.int32)
        if named and integers and bool((tensor == -100).any()):
            return path
    return None
