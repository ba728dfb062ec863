"""The count of a mean over labels: found in what the loss calls, and in the batch."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

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


def way_out(view: BatchView, mean: LabelMean) -> str:
    """Return the `count=` of a mean over labels, and what it is a mean over."""
    over = "" if mean.weight is None else ", weighted by class"
    field = _field_of(view, mean.labels)
    ignored = mean.ignore_index
    what = f"is a mean over the labels that are not {ignored}{over}"
    if field is None:
        terms = "labels" if mean.weight is None else "labels' weights, w[y].sum() of each"
        return f"{what}: give count= a function batch → the number of such {terms} in each sample"
    name, shift = field
    if mean.weight is None:
        return _token_count(name, ignored, shift=shift)
    place = _place(view.batch, name) + ("[:, 1:]" if shift else "")
    deep = ".flatten(1).sum(1)" if _tensor(view, name).ndim > 1 else ""
    if not bool((mean.labels == ignored).any()):
        weights = f"w[{place}]"
    elif ignored >= 0:
        weights = f"torch.where({place} == {ignored}, 0, w[{place}])"
    else:
        weights = f"torch.where({place} == {ignored}, 0, w[{place}.clamp(min=0)])"
    return f"{what}: give count=lambda b: {weights}{deep}, with w its weight="


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
    """Return the `count=` that makes the pieces add up, from the batch's own labels and masks.

    Args:
        view: the samples.
        is_mean_over: returns whether the loss is a mean over so many terms of each sample.
        ready: the name of a field that is tried first.
    """
    tensors = sorted(view.named_tensors(), key=lambda each: each[0] != ready)
    for name, tensor in tensors:
        rows = rows_of(view, tensor)
        for value in [] if rows is None else _values(rows):
            for shift in (False, True)[: 1 + (tensor.ndim > 1)]:
                try:
                    key = _key(name) if name else (lambda batch: batch)
                    counted = count_tokens(key, ignore_index=value, shift=shift).of(view)
                except CountError:
                    continue
                if is_mean_over([float(each) for each in counted]):
                    return _token_count(name, value, shift=shift)
    return None


def _values(rows: Tensor) -> Iterator[int]:
    """Yield values that could stand for no label: -100, those that samples end with, others."""
    ends, all_values = Counter(rows[:, -1].tolist()), Counter(rows.flatten().tolist())
    found = [value for value, _ in (ends.most_common(_VALUES) + all_values.most_common(_VALUES))]
    yield from dict.fromkeys(map(int, [-100, *found]))


def _tensor(view: BatchView, name: str) -> Tensor:
    return dict(view.named_tensors())[name]


def _field_of(view: BatchView, labels: Tensor) -> tuple[str, bool] | None:
    """Return the name of the field that the labels are, and whether its first are left out."""
    flat = labels.flatten().cpu()
    for name, tensor in view.named_tensors():
        if tensor.is_floating_point() or view.dim_of(tensor) != 0 or not name:
            continue
        for shift in (False, True)[: 1 + (tensor.ndim > 1)]:
            if torch.equal((tensor[:, 1:] if shift else tensor).flatten().cpu(), flat):
                return name, shift
    return None


def _place(batch: Any, name: str) -> str:
    """Return the place of a field of a batch `b`, as Python code."""
    code, value = "b", batch
    for part in name.split("."):
        if isinstance(value, Mapping):
            key = part if part in value else _key(part)
            code, value = f"{code}[{key!r}]", value[key]
        elif part.isdecimal():
            code, value = f"{code}[{part}]", value[int(part)]
        else:
            code, value = f"{code}.{part}", getattr(value, part)
    return code
