"""`count=` for losses that are means over labels: how many labels of each sample are not ignored."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from elastic_mbs.batch.containers import Role, kind_of, lookup
from elastic_mbs.batch.splitters import type_name
from elastic_mbs.batch.view import BatchView
from elastic_mbs.errors import CountError


@dataclass(frozen=True, slots=True)
class count_tokens:
    """`count=` for losses that are means over labels: the number of labels other than `ignore_index` in each sample.

    Called with a batch it returns a tensor of shape (N,) on the labels' device, or a list where the labels are one with an entry per sample.

    Args:
        key: where the labels are: a name, a dotted path, an index, or a function batch → labels, a tensor of shape (N, ...).
        ignore_index: labels of this value are no loss terms (-100 in PyTorch and transformers).
        shift: leave out the first position along dim 1, as causal language models do: they predict labels[:, 1:]. Not where something precedes
            the labels, so that the first one is predicted too (the virtual tokens of peft's prompt tuning).
    """

    key: str | int | Callable[[Any], Any] = "labels"
    ignore_index: int = -100
    shift: bool = False

    def __call__(self, batch: Any) -> Any:
        return self._count(self._labels(batch))

    def of(self, view: BatchView) -> Any:
        """The counts of a batch whose samples can lie along another dimension than 0."""
        labels = self._labels(view.batch)
        dim = view.dim_of(labels)
        if dim is None and isinstance(labels, list | tuple):
            raise CountError(
                f"{self!r} found {len(labels)} fields of {view.length} samples each, which is no list with one entry per sample: "
                "give a function, as in count_tokens(lambda batch: torch.stack(batch['labels'], 1))"
            )
        return self._count(labels, dim or 0)

    def _count(self, labels: Any, dim: int = 0) -> Any:
        if isinstance(labels, list | tuple):
            return [self._count_sample(sample) for sample in labels]
        labels = torch.as_tensor(labels) if is_array(labels) else labels
        if not isinstance(labels, Tensor):
            raise CountError(f"{self!r} found {described(labels)}: labels are a tensor of shape (N, ...) or a list with one entry per sample")
        if labels.ndim < 1 + self.shift:
            raise CountError(f"{self!r} found labels of shape {tuple(labels.shape)}: they must be {'(N, L, ...)' if self.shift else '(N, ...)'}")
        valid = (labels.movedim(dim, 0)[:, 1:] if self.shift else labels.movedim(dim, 0)) != self.ignore_index
        return valid.sum(dim=tuple(range(1, labels.ndim))) if labels.ndim > 1 else valid.long()

    def _count_sample(self, sample: Any) -> Any:
        sample = torch.as_tensor(sample) if isinstance(sample, list | tuple | int) or is_array(sample) else sample
        if not isinstance(sample, Tensor) or sample.ndim < self.shift:
            raise CountError(f"{self!r} found a list with {described(sample)} in it: its entries are one sample's labels each")
        return ((sample[1:] if self.shift else sample) != self.ignore_index).sum()

    def _labels(self, batch: Any) -> Any:
        if callable(self.key):
            return self.key(batch)
        try:
            return lookup(batch, self.key)
        except LookupError as error:
            raise CountError(f"{self!r}: {error}\n  count_tokens(key=...) takes a name, a dotted path, an index or a function") from error


_LABEL_NAMES = frozenset({"label", "labels", "target", "targets", "y"})


def looks_like_token_labels(view: BatchView) -> str | None:
    """The name of a leaf that looks like labels with ignored positions, so that the loss is probably no mean over samples.

    Reads whole int64 and int32 tensors on the CPU (no device is waited for): call it once, not on every step.
    """
    names = _LABEL_NAMES | ({"1"} if isinstance(view.batch, tuple | list) else set())  # the second part of a pair is usually the labels
    for path, tensor in view.named_tensors():
        integers = tensor.device.type == "cpu" and tensor.dtype in (torch.int64, torch.int32)
        if integers and (path in names or path.rpartition(".")[2] in _LABEL_NAMES) and bool((tensor == -100).any()):
            return path
    return None


def is_array(value: Any) -> bool:
    return kind_of(type(value)).role is Role.ARRAY


def described(value: Any) -> str:
    return f"a tensor of shape {tuple(value.shape)}" if hasattr(value, "shape") else f"{value!r:.80} (of type {type_name(type(value))})"
