"""The count of a mean over labels: found in what the loss calls, and in the batch."""

from __future__ import annotations

import inspect
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from elastic_mbs.batch.agreement.texts import place_of
from elastic_mbs.batch.containers import dotted, walk
from elastic_mbs.batch.counts import count_tokens
from elastic_mbs.batch.view import BatchView
from elastic_mbs.errors import CountError
from elastic_mbs.rehearsal.samples import rows_of

_SIGNATURES = {fn: inspect.signature(fn) for fn in (functional.cross_entropy, functional.nll_loss)}
_VALUES = 6  # of a field that are tried as the label that is ignored


@dataclass(frozen=True)
class LabelMean:
    """A mean over labels that a loss function took.

    Attributes:
        labels: the labels.
        weight: the weight of each class, or None.
        ignore_index: labels of this value are left out.
    """

    labels: Tensor
    weight: Tensor | None
    ignore_index: int

    def terms(self) -> float:
        """Return the number that the sum is divided by."""
        counted = self.labels != self.ignore_index
        if self.weight is None:
            return float(counted.sum())
        return float(self.weight[self.labels[counted]].double().sum())


class LabelMeans(TorchFunctionMode):
    """A mode that notes the means that a loss function takes over labels."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[LabelMean] = []

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _SIGNATURES:
            given = _SIGNATURES[func].bind(*args, **kwargs)
            given.apply_defaults()
            each = given.arguments
            labels = each["target"]
            if each["reduction"] == "mean" and not labels.is_floating_point():
                weight = each["weight"]
                self.found.append(
                    LabelMean(
                        labels.detach().clone(),
                        None if weight is None else weight.detach().to(labels.device),
                        each["ignore_index"],
                    )
                )
        return func(*args, **kwargs)


def way_out(view: BatchView, mean: LabelMean) -> str | None:
    """Return the `count=` of a mean over labels, and what it is a mean over.

    None where the labels are no field of the batch, or weights are summed over several rows.
    """
    field = _field_of(view, mean.labels)
    if field is None:
        return None
    name, shift = field
    ignored = mean.ignore_index
    if mean.weight is None:
        return _token_count(name, ignored, shift=shift)
    if not _has_a_row_each(view, name):
        return None
    place = _place(view.batch, name) + ("[:, 1:]" if shift else "")
    deep = ".flatten(1).sum(1)" if _tensor(view, name).ndim > 1 else ""
    if not bool((mean.labels == ignored).any()):
        weights = f"w[{place}]"
    elif ignored >= 0:
        weights = f"torch.where({place} == {ignored}, 0, w[{place}])"
    else:
        weights = f"torch.where({place} == {ignored}, 0, w[{place}.clamp(min=0)])"
    return f"{_over(mean)}: give count=lambda b: {weights}{deep}, with w its weight="


def in_words(mean: LabelMean) -> str:
    """Return the way out for labels that the loss function makes itself."""
    terms = (
        "the number of such labels, under the mask that loss_fn applies to them if any,"
        if mean.weight is None
        else "the sum of the weights of such labels, w[y].sum(),"
    )
    return f"{_over(mean)}: give count= a function batch → {terms} in each sample"


def _over(mean: LabelMean) -> str:
    weighted = "" if mean.weight is None else ", weighted by class"
    return f"is a mean over the labels that are not {mean.ignore_index}{weighted}"


def _token_count(name: str, ignored: int, *, shift: bool) -> str:
    index = "" if ignored == -100 else f", ignore_index={ignored}"
    over, how = (", from the second of each sample on", ", shift=True") if shift else ("", "")
    return (
        f"is a mean over the labels that are not {ignored}{over}: give "
        f"count=count_tokens({_key(name)!r}{index}{how})"
    )


def _key(name: str) -> str | int:
    return int(name) if name.isdecimal() else name


def guessed(
    view: BatchView, is_mean_over: Callable[[Sequence[float]], bool], ready: str | None
) -> str | None:
    """Return the `count=` that makes the pieces add up, from the batch's own fields.

    Labels that look so come first, numbers of the samples next (the lengths of CTC's targets, the
    boxes in each picture's dict), and other labels and masks last: a value that few samples end
    with can be a label in others.

    Args:
        view: the samples.
        is_mean_over: returns whether the loss is a mean over so many terms of each sample.
        ready: the name of a field that is tried first.
    """
    fields = view.named_tensors()
    labels = [field for field in fields if field[0] == ready]
    others = [field for field in fields if field[0] != ready]
    for counted, found in chain(
        _by_labels(view, labels, ready),
        _by_numbers(view),
        _by_items(view),
        _by_labels(view, others, ready),
    ):
        if is_mean_over(counted):
            return found
    return None


def _by_labels(
    view: BatchView, fields: Sequence[tuple[str, Tensor]], ready: str | None
) -> Iterator[tuple[list[float], str]]:
    """Yield counts of the labels or the mask that a field may be, each with its advice."""
    for name, tensor in fields:
        several = view.rows_of(tensor) is not None  # each sample has several, flat in one row
        rows = tensor.cpu().reshape(-1, 1) if several else rows_of(view, tensor)
        # of several rows other fields than labels count as many by chance: first rows, positions
        for value in [] if rows is None or (several and name != ready) else _values(rows):
            for shift in (False, True)[: 1 + (several or tensor.ndim > 1)]:
                try:
                    key = _key(name) if name else (lambda batch: batch)
                    counted = count_tokens(key, ignore_index=value, shift=shift).of(view)
                except CountError:
                    continue
                yield [float(each) for each in counted], _token_count(name, value, shift=shift)


def _by_numbers(view: BatchView) -> Iterator[tuple[list[float], str]]:
    """Yield the fields that have a number for each sample, each with its advice."""
    for name, tensor in view.named_tensors():
        if not name or tensor.ndim != 1 or tensor.is_complex() or not _has_a_row_each(view, name):
            continue
        numbers = [float(each) for each in tensor.tolist()]
        if all(0 <= each < math.inf for each in numbers):
            place = _place(view.batch, name)
            yield numbers, f"is divided by the sum of {name!r}: give count=lambda b: {place}"


def _by_items(view: BatchView) -> Iterator[tuple[list[float], str]]:
    """Yield the numbers of rows in the dicts of the samples, by key, each with its advice."""
    for path, items in [((), view.batch), *walk(view.batch)]:
        if not isinstance(items, list | tuple) or len(items) != view.length:
            continue
        if not all(isinstance(item, Mapping) for item in items):
            continue
        for key in items[0]:
            rows = [item.get(key) for item in items]
            if all(isinstance(each, Tensor) and each.ndim for each in rows):
                place = place_of(path, view.batch)
                yield (
                    [float(len(each)) for each in rows],
                    f"is divided by the number of {key!r}: give "
                    f"count=lambda b: [len(d[{key!r}]) for d in {place}]",
                )


def _values(rows: Tensor) -> Iterator[int]:
    """Yield values that could stand for no label: -100, those that samples end with, others."""
    ends, all_values = Counter(rows[:, -1].tolist()), Counter(rows.flatten().tolist())
    found = [value for value, _ in (ends.most_common(_VALUES) + all_values.most_common(_VALUES))]
    yield from dict.fromkeys(map(int, [-100, *found]))


def _tensor(view: BatchView, name: str) -> Tensor:
    return dict(view.named_tensors())[name]


def _has_a_row_each(view: BatchView, name: str) -> bool:
    """Return whether a field has one row for each sample on dim 0."""
    tensor = _tensor(view, name)
    return view.dim_of(tensor) == 0 and view.rows_of(tensor) is None


def _field_of(view: BatchView, labels: Tensor) -> tuple[str, bool] | None:
    """Return the name of the field that the labels are, and whether its first are left out."""
    flat = labels.flatten().cpu()
    for name, tensor in view.named_tensors():
        dim = view.dim_of(tensor)
        if tensor.is_floating_point() or dim is None or not name:
            continue
        if torch.equal(tensor.flatten().cpu(), flat):
            return name, False
        first = tensor.movedim(dim, 0)
        several = view.rows_of(tensor) is not None
        if several or tensor.ndim > 1:
            shifted = first[1:] if several else first[:, 1:]
            if torch.equal(shifted.flatten().cpu(), flat):
                return name, True
    return None


def _place(batch: Any, name: str) -> str:
    """Return the place of a field of a batch `b`, as Python code."""
    return place_of(next(path for path, _ in walk(batch) if dotted(path) == name), batch)
