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
class TokenCount:
    """Counts the labels that are not ignored, per sample. Made by `count_tokens`."""

    key: str | int | Callable[[Any], Any] = "labels"
    ignore_index: int = -100
    shift: bool = False

    def __call__(self, batch: Any) -> Any:
        """A tensor of shape (N,) on the labels' device, or a list where the labels are a list with one entry per sample."""
        return self._count(as_tensor(self._labels(batch)))

    def of(self, view: BatchView) -> Any:
        """The counts of a batch whose samples can lie along another dimension than 0."""
        found = self._labels(view.batch)
        dim = view.dim_of(found)
        if dim is None and isinstance(found, list | tuple):
            raise CountError(
                f"{self!r} found {len(found)} fields of {view.length} samples each, which is no list with one entry per sample: "
                "give a function, as in count_tokens(lambda batch: torch.stack(batch['labels'], 1))"
            )
        labels = as_tensor(found)
        return self._count(labels.movedim(dim, 0) if dim else labels)

    def _count(self, labels: Any) -> Any:
        if isinstance(labels, list | tuple):
            return [self._count_sample(sample) for sample in labels]
        if not isinstance(labels, Tensor):
            raise CountError(f"{self!r} found {described(labels)}: labels are a tensor of shape (N, ...) or a list with one entry per sample")
        if labels.ndim < 1 + self.shift:
            need = "(N, L, ...)" if self.shift else "(N, ...)"
            raise CountError(f"{self!r} found labels of shape {tuple(labels.shape)}: they must be {need}")
        valid = (labels[:, 1:] if self.shift else labels) != self.ignore_index
        return valid.sum(dim=tuple(range(1, labels.ndim))) if labels.ndim > 1 else valid.long()

    def _count_sample(self, sample: Any) -> Any:
        sample = torch.tensor(sample) if isinstance(sample, list | tuple | int) else as_tensor(sample)
        if not isinstance(sample, Tensor) or sample.ndim < self.shift:
            raise CountError(f"{self!r} found a list with {described(sample)} in it: its entries are one sample's labels each")
        return ((sample[1:] if self.shift else sample) != self.ignore_index).sum()

    def _labels(self, batch: Any) -> Any:
        if callable(self.key):
            return self.key(batch)
        try:
            return lookup(batch, self.key)
        except LookupError as error:
            remedy = "say where the labels are: count_tokens(key=...) takes a name, a dotted path, an index or a function"
            raise CountError(f"{self!r}: {error}\n  {remedy}") from error

    def __repr__(self) -> str:
        key = getattr(self.key, "__qualname__", repr(self.key)) if callable(self.key) else repr(self.key)
        return f"count_tokens(key={key}, ignore_index={self.ignore_index}, shift={self.shift})"


def count_tokens(key: str | int | Callable[[Any], Any] = "labels", ignore_index: int = -100, shift: bool = False) -> TokenCount:
    """`count=` for losses that are means over labels: the number of labels other than `ignore_index` in each sample.

    Args:
        key: where the labels are: a name, a dotted path, an index, or a function batch → labels, a tensor of shape (N, ...).
        ignore_index: labels of this value are no loss terms (-100 in PyTorch and transformers).
        shift: leave out the first position along dim 1, as causal language models do: they predict labels[:, 1:]. Not where something precedes
            the labels, so that the first one is predicted too (the virtual tokens of peft's prompt tuning).

    Returns:
        A function batch → counts of shape (N,).
    """
    return TokenCount(key, ignore_index, shift)


_LABEL_NAMES = frozenset({"label", "labels", "target", "targets", "y"})


def looks_like_token_labels(view: BatchView) -> str | None:
    """The name of a leaf that looks like labels with ignored positions, so that the loss is probably no mean over samples.

    Reads whole int64 and int32 tensors on the CPU (no device is waited for): call it once, not on every step.
    """
    pair = isinstance(view.batch, tuple | list)  # whose second part is usually the labels
    for path, tensor in view.named_tensors():
        named = path.rpartition(".")[2] in _LABEL_NAMES or (pair and path == "1")
        integers = tensor.device.type == "cpu" and tensor.dtype in (torch.int64, torch.int32)
        if named and integers and bool((tensor == -100).any()):
            return path
    return None


def is_array(value: Any) -> bool:
    return kind_of(type(value)).role is Role.ARRAY


def as_tensor(value: Any) -> Any:
    return torch.as_tensor(value) if is_array(value) else value


def described(value: Any) -> str:
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"{value!r:.80} (of type {type_name(type(value))})"
