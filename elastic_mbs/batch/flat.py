"""The batch that most steps have, read without questions: a tensor, or a tuple, list or dict of tensors, one row per sample.

What is read here `elastic_mbs.batch.layout` would read in the same way, at several times the cost.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor


class Flat:
    """Tensors that agree on dim 0, and the container that they came in.

    Attributes:
        tensors: in the container's order.
        keys: their names, indices, or nothing for a batch that is a tensor.
        length: N, the number of samples.
    """

    __slots__ = ("_kind", "keys", "length", "tensors")

    def __init__(self, kind: type, keys: list[Any], tensors: list[Tensor]) -> None:
        self._kind = kind
        self.keys = keys
        self.tensors = tensors
        self.length: int = tensors[0].shape[0]

    def pieces(self, bounds: Iterable[tuple[int, int]]) -> list[Any]:
        """The samples of each (start, stop), as `narrow()` views in new containers of the same type."""
        tensors, kind, found = self.tensors, self._kind, []
        for start, stop in bounds:
            length = stop - start
            parts = [tensor.narrow(0, start, length) for tensor in tensors]
            found.append(
                dict(zip(self.keys, parts, strict=True)) if kind is dict else parts if kind is list else tuple(parts) if kind is tuple else parts[0]
            )
        return found


def flat(batch: Any) -> Flat | None:
    """The batch as `Flat`; None for any other kind, for an empty one, and where lengths disagree: there are questions then."""
    kind = type(batch)
    keys: list[Any]
    if kind is tuple or kind is list:
        keys, tensors = list(range(len(batch))), list(batch)
    elif kind is dict:
        keys, tensors = list(batch), list(batch.values())
    elif kind is Tensor:
        keys, tensors = [], [batch]
    else:
        return None
    length = -1
    for tensor in tensors:
        if type(tensor) is not Tensor or tensor.layout is not torch.strided or tensor.ndim == 0 or tensor.is_nested:
            return None
        rows = tensor.shape[0]
        if length not in (-1, rows):
            return None
        length = rows
    return Flat(kind, keys, tensors) if length > 0 else None


MANY = 7
"""Fields of one shape that a list may have before it looks like samples: ids, masks and labels of a text are some, a picture's crops more."""


def alike(batch: Any) -> str | None:
    """A sentence when a flat batch, taken as fields, looks like a list or tuple of samples: many tensors of one shape and type."""
    if type(batch) is dict or len({(tensor.shape, tensor.dtype) for tensor in batch}) > 1:
        return None
    n, rows = len(batch), batch[0].shape[0]
    kind, shape = type(batch).__name__, tuple(batch[0].shape)
    return (
        f"the batch, a {kind} of tensors, is taken as {n} fields of {rows} samples each; it could also be {n} samples of shape {shape}: "
        "say dims=fields() or dims=items()"
    )
