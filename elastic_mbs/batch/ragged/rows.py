"""The rows of each sample, where samples have different numbers of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from elastic_mbs.batch.containers import Role, kind_of, own_array
from elastic_mbs.errors import BatchError


@dataclass(frozen=True, eq=False, slots=True)
class Rows:
    """The rows of each sample: sample i has rows `bounds[i]` to `bounds[i + 1]` of `order`."""

    bounds: list[int]  # N + 1
    # the rows sorted by sample, on the host; None where they lie in that order
    order: Tensor | None = None
    # the offsets of the piece that was cut last, by its place
    shared: dict[Any, Tensor] = field(default_factory=dict, repr=False)

    @property
    def samples(self) -> int:
        return len(self.bounds) - 1

    @property
    def total(self) -> int:
        return self.bounds[-1]

    @property
    def lengths(self) -> list[int]:
        return [stop - start for start, stop in zip(self.bounds, self.bounds[1:], strict=False)]

    def cut(self, value: Any, dim: int, start: int, stop: int) -> Any:
        """Return the rows of samples `start` to `stop` of a tensor, an array or a list.

        They keep their order: a view of a tensor where they lie together, else a copy.
        """
        first, last = self.bounds[start], self.bounds[stop]
        if self.order is None:
            if isinstance(value, Tensor):
                return value.narrow(dim, first, last - first)
            part = value[(*(slice(None),) * dim, slice(first, last)) if dim else slice(first, last)]
            return own_array(part.copy()) if kind_of(type(value)).role is Role.ARRAY else part
        rows = self.order[first:last].sort().values
        if isinstance(value, Tensor):
            return value.index_select(dim, rows.to(value.device))
        if kind_of(type(value)).role is Role.ARRAY:
            return own_array(value.take(rows.tolist(), dim))
        return [value[row] for row in rows.tolist()]

    @classmethod
    def of_lengths(cls, lengths: Tensor) -> Rows:
        """Return the rows of samples that lie one after the other."""
        return cls([0, *lengths.cumsum(0).tolist()])

    @classmethod
    def of_index(cls, index: Tensor, samples: int) -> Rows:
        """Return the rows of samples by the number of each row's sample, in any order."""
        bounds = [0, *torch.bincount(index, minlength=samples).cumsum(0).tolist()]
        if bool((index[1:] >= index[:-1]).all()):
            return cls(bounds)
        return cls(bounds, torch.sort(index, stable=True).indices)


def whole_numbers(value: Any, name: str, shape: str = "(R,)") -> Tensor:
    """Return a field of whole numbers, 0 or more, as int64 of shape (R,) on the host.

    Args:
        value: a tensor or array of shape (R,) or (R, 1), or a list. Floats may hold whole numbers.
        name: of the field, for the error.
        shape: that it should have, for the error.

    Raises:
        BatchError: it holds anything else.
    """
    listed = isinstance(value, Tensor | Sequence) or kind_of(type(value)).role is Role.ARRAY
    try:
        found = torch.as_tensor(value, device="cpu") if listed and not _is_text(value) else None
    except torch.OutOfMemoryError:
        raise
    except (TypeError, ValueError, RuntimeError):
        found = None
    if found is None or found.dtype == torch.bool or found.is_complex():
        raise BatchError(f"{name} is {described(value)}: it must hold whole numbers")
    if found.ndim != 1 and tuple(found.shape) != (len(found) if found.ndim else 0, 1):
        raise BatchError(f"{name} is {described(value)}: it must be of shape {shape}")
    numbers = found.detach().reshape(-1).long()
    wrong = (numbers != found.reshape(-1)) | (numbers < 0)
    if bool(wrong.any()):
        raise BatchError(
            f"{name} holds {found.reshape(-1)[wrong][0].item()}: it must hold whole numbers, 0 or "
            "more"
        )
    return numbers


def _is_text(value: Any) -> bool:
    return isinstance(value, str | bytes)


def described(value: Any) -> str:
    """Return a few words on a value of the wrong form."""
    shape = getattr(value, "shape", None)
    if shape is not None:
        return f"a {value.dtype} of shape {tuple(shape)}"
    return f"{value!r:.60}"
