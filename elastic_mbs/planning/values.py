"""Values of whole numbers that a trace carries along: labels, lengths, masks.

A fake has no values. A step that counts the labels of its batch, or takes the places of a mask, can
be traced all the same: whole numbers on the host take little memory, and what is computed of them
alone is computed for real beside the fakes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_any, tree_leaves, tree_map_only
from torch.utils.weak import WeakTensorKeyDictionary

_READ = torch.ops.aten._local_scalar_dense.default
_PLACES = torch.ops.aten.nonzero.default
_MOST = 2**20  # numbers in a tensor that is carried along


class Values:
    """The values of the fakes that are known."""

    def __init__(self, mode: FakeTensorMode) -> None:
        self._mode = mode
        self._known: WeakTensorKeyDictionary = WeakTensorKeyDictionary()

    def know(self, fake: Tensor, real: Tensor) -> None:
        """Note the values of a fake, where they are whole numbers on the host."""
        if _is_whole(real) and real.device.type == "cpu" and real.numel() <= _MOST:
            self._known[fake] = real

    def of(self, func: Any, args: Any) -> Any:
        """Return what an operation that needs values gives; None where they are not known."""
        real = self._known.get(args[0]) if func in (_READ, _PLACES) else None
        if real is None:
            return None
        with _disable_current_modes():
            if func is _READ:
                return real.item()
            places = real.nonzero()
        fake = self._mode.from_tensor(places)
        self.know(fake, places)
        return fake

    def follow(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Compute the values of a result that is made of known ones alone."""
        own = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        schema = func._schema
        if schema.is_mutable and any(map(_is_whole, own)):
            self._known.clear()  # what shares its memory has changed, too
        if not isinstance(out, FakeTensor) or not _is_whole(out) or out.numel() > _MOST:
            return
        if not own or schema.is_mutable or torch.Tag.nondeterministic_seeded in func.tags:
            return
        if any(leaf not in self._known for leaf in own) or tree_any(_is_device, kwargs):
            return
        with _disable_current_modes():
            real = tree_map_only(Tensor, self._known.__getitem__, (args, kwargs or {}))
            self.know(out, func(*real[0], **real[1]))


def _is_whole(tensor: Tensor) -> bool:
    return not (tensor.dtype.is_floating_point or tensor.dtype.is_complex)


def _is_device(value: object) -> bool:
    return isinstance(value, torch.device) and value.type != "cpu"
