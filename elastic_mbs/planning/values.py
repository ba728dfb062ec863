"""Values that a trace carries along: labels, lengths, masks.

A fake has no values. A step that counts the labels of its batch, takes the places of a mask, or
asks whether its mask is the causal one can be traced all the same: whole numbers of the batch,
tables in buffers and what the step makes of nothing are known. What is computed of them alone is
computed for real beside the fakes, on the host.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only
from torch.utils.weak import WeakTensorKeyDictionary

_READ = torch.ops.aten._local_scalar_dense.default
_PLACES = torch.ops.aten.nonzero.default
_MOST = 2**20  # numbers in a tensor that is carried along


class Values:
    """The values of the fakes that are known."""

    def __init__(self, mode: FakeTensorMode) -> None:
        self._mode = mode
        self._known: WeakTensorKeyDictionary = WeakTensorKeyDictionary()

    def know_labels(self, fake: Tensor, real: Tensor) -> None:
        """Note the values of a part of a batch, where they are whole numbers on the host."""
        if _is_whole(real) and real.device.type == "cpu":
            self.know(fake, real)

    def know(self, fake: Tensor, real: Tensor) -> None:
        """Note the values of a fake, where they are few; they are kept on the host."""
        if _is_readable(real) and real.numel() <= _MOST:
            with _disable_current_modes():
                self._known[fake] = real.detach().cpu()

    def of(self, func: Any, args: Any) -> Any:
        """Return what an operation that needs values gives; None where they are not known."""
        real = self._known.get(args[0]) if func in (_READ, _PLACES) else None
        if real is None or (func is _PLACES and args[0].device.type != "cpu"):
            return None
        with _disable_current_modes():
            if func is _READ:
                return real.item()
            places = real.nonzero()
        fake = self._mode.from_tensor(places)
        self.know(fake, places)
        return fake

    def follow(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Compute the values of a result that is made of known ones alone, or of nothing."""
        own = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        real = [self._value(leaf) for leaf in own]
        if func._schema.is_mutable:
            self._forget(_written(func, args, kwargs or {}))
        few = isinstance(out, FakeTensor) and out.numel() <= _MOST
        known = [value for value in real if value is not None]
        if not few or len(known) < len(own) or not _is_definite(func):
            return
        with _disable_current_modes():
            copies = iter([value.detach().clone() for value in known])
            given = tree_map_only(Tensor, lambda leaf: next(copies), (args, kwargs or {}))
            given = tree_map(lambda each: "cpu" if _is_device(each) else each, given)
            self.know(out, func(*given[0], **given[1]))

    def _value(self, tensor: Tensor) -> Tensor | None:
        """Return the values of an argument: known, or there, as those of a mask of the step's."""
        if isinstance(tensor, FakeTensor):
            known: Tensor | None = self._known.get(tensor)
            return known
        few = tensor.device.type == "cpu" and tensor.numel() <= _MOST and _is_readable(tensor)
        return tensor if few else None

    def _forget(self, written: list[Tensor]) -> None:
        """Forget everything that shares its memory with tensors that have been written to."""
        storages = {each.untyped_storage()._cdata for each in written if _has_storage(each)}
        for fake in list(self._known):
            if fake.untyped_storage()._cdata in storages:
                del self._known[fake]


def _is_whole(tensor: Tensor) -> bool:
    return not (tensor.dtype.is_floating_point or tensor.dtype.is_complex)


def _has_storage(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_nested


def _is_readable(tensor: Tensor) -> bool:
    """Return whether a real tensor has values that can be copied."""
    plain = type(tensor) in (Tensor, torch.nn.Parameter)
    return plain and _has_storage(tensor) and tensor.device.type != "meta"


def _written(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """Return the arguments that an operation writes to."""
    written = [
        args[place] if place < len(args) else kwargs.get(argument.name)
        for place, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    return [leaf for leaf in tree_leaves(written) if isinstance(leaf, Tensor)]


def _is_definite(func: Any) -> bool:
    """Return whether the values of a result follow from those of the arguments."""
    unset = func.overloadpacket.__name__.startswith(("empty", "new_empty"))
    return not unset and torch.Tag.nondeterministic_seeded not in func.tags


def _is_device(value: object) -> bool:
    return isinstance(value, torch.device)
