"""Values that a trace carries along: labels, lengths, masks.

A fake has no values. A step that counts the labels of its batch, takes the places of a mask, or
asks whether its mask is the causal one can be traced all the same: whole numbers of the batch,
tables in buffers and what the step makes of nothing are known. What is computed of them alone is
computed for real beside the fakes, on the host. A known mask tells how many rows it selects, of
unknown values, too.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only
from torch.utils.weak import WeakTensorKeyDictionary

_READ = torch.ops.aten._local_scalar_dense.default
_INDEX = torch.ops.aten.index.Tensor
_SELECT = torch.ops.aten.masked_select.default
_CTC = torch.ops.aten._ctc_loss.Tensor
_CTC_BACKWARD = torch.ops.aten._ctc_loss_backward.Tensor
# their results take the shape of an argument, and none of its values
_FILLED = ("ones_like", "zeros_like", "full_like", "new_ones", "new_zeros", "new_full")
_MASKS = (torch.bool, torch.uint8)
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

    def of(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Return what an operation that needs values gives; None where they are not known."""
        if func is _READ:
            real = self._known.get(args[0])
            with _disable_current_modes():
                return None if real is None else real.item()
        if func is _CTC_BACKWARD:
            return torch.empty_like(args[1])
        if torch.Tag.dynamic_output_shape not in func.tags:
            return None
        known = self._computed(func, args, kwargs)
        if known is not None:
            return tree_map_only(Tensor, partial(self._fake_of, args[0].device), known)
        if func is _SELECT and args[1] in self._known:
            shape = torch.broadcast_shapes(args[0].shape, args[1].shape)
            return _INDEX(args[0].expand(shape), self._places(args[1], shape))
        if func is _CTC:
            return self._aligned(args[0], args[3])
        return self._indexed(*args) if func is _INDEX else None

    def _indexed(self, tensor: Tensor, indices: list[Tensor | None]) -> Tensor | None:
        """Return the part of unknown values that known masks select; None without such masks."""
        masks = [each for each in indices if each is not None and each.dtype in _MASKS]
        if not masks or any(mask not in self._known for mask in masks):
            return None
        places: list[Tensor | None] = []
        for each in indices:
            if each is None or each.dtype not in _MASKS:
                places.append(each)
            else:
                places.extend(self._places(each, each.shape))
        selected: Tensor = _INDEX(tensor, places)
        return selected

    def _aligned(self, log_probs: Tensor, lengths: Tensor) -> Any:
        """Return a CTC loss and its table, which is as wide as the longest labels ask for."""
        known = self._value(lengths)
        if known is None:
            return None
        with _disable_current_modes():
            longest = int(known.max())
        positions, samples, _ = log_probs.shape
        table = samples, positions, 2 * longest + 1  # each label between two blanks
        return log_probs.new_empty(samples), log_probs.new_empty(table)

    def _places(self, mask: Tensor, shape: torch.Size) -> list[Tensor]:
        """Return the indices of a known mask, for each dimension of the shape that it has."""
        with _disable_current_modes():
            found = self._known[mask].expand(shape).nonzero(as_tuple=True)
        return [self._fake_of(mask.device, each) for each in found]

    def follow(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Compute the values of a result that is made of known ones alone, or of nothing."""
        made = _tensors(out)
        few = made and sum(leaf.numel() for leaf in made) <= _MOST and _is_definite(func)
        real = self._computed(func, args, kwargs) if few else None
        if func._schema.is_mutable:
            self._forget(_written(func, args, kwargs or {}))
        if real is not None:
            for fake, values in zip(made, _tensors(real), strict=True):
                self.know(fake, values)

    def _computed(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operation on copies of known values; None where one of its arguments is not."""
        own = _tensors((args, kwargs))
        value_of = _any_values if func.overloadpacket.__name__ in _FILLED else self._value
        known = [value for value in map(value_of, own) if value is not None]
        if len(known) < len(own):
            return None
        with _disable_current_modes():
            copies = iter([value.detach().clone() for value in known])
            given = tree_map_only(Tensor, lambda leaf: next(copies), (args, kwargs or {}))
            given = tree_map(lambda each: "cpu" if _is_device(each) else each, given)
            return func(*given[0], **given[1])

    def _fake_of(self, device: torch.device, real: Tensor) -> Tensor:
        """Return a fake on a device, whose values are known."""
        with self._mode:
            fake = torch.empty_like(real, device=device)
        self.know(fake, real)
        return fake

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


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def _any_values(tensor: Tensor) -> Tensor:
    with _disable_current_modes():
        return torch.empty(tensor.shape, dtype=tensor.dtype)


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
    return _tensors(written)


def _is_definite(func: Any) -> bool:
    """Return whether the values of a result follow from those of the arguments."""
    unset = func.overloadpacket.__name__.startswith(("empty", "new_empty"))
    return not unset and torch.Tag.nondeterministic_seeded not in func.tags


def _is_device(value: object) -> bool:
    return isinstance(value, torch.device)
