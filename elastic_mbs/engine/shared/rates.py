"""Learning rates of the optimizers that train a model, at one moment.

Optimizers are known from their steps. A rate that each piece sets to the same value is the user's
way to set it. One that moves after the first piece moves as often as memory makes pieces.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain, repeat
from operator import attrgetter
from typing import Any, NamedTuple

from torch import Tensor
from torch.optim import Optimizer

_GROUPS = attrgetter("param_groups")


class Rates(NamedTuple):
    """The learning rates of groups of parameters, as columns."""

    groups: Sequence[dict[str, Any]] = ()
    values: Sequence[Any] = ()  # numbers, or tensors that hold one
    tensors: Sequence[tuple[Tensor, Tensor, int]] = ()  # these, their copies and their versions

    @classmethod
    def of(cls, optimizers: Iterable[Optimizer]) -> Rates:
        """Return the learning rates of these optimizers as they are now."""
        groups = list(chain.from_iterable(map(_GROUPS, optimizers)))
        values = list(map(dict.get, groups, repeat("lr")))
        tensors = [
            (each, each.detach().clone(), each._version)
            for each in values
            if isinstance(each, Tensor)
        ]
        return cls(groups, values, tensors)

    def change(self) -> str | None:
        """Return a rate that is another one now, as text: before and now."""
        now = list(map(dict.get, self.groups, repeat("lr")))
        if now != self.values:
            for before, value in zip(self.values, now, strict=True):
                if value is not before and value != before:
                    return f"{_text(before)} to {_text(value)}"
        for tensor, kept, version in self.tensors:
            if tensor._version != version:
                return f"{_text(kept)} to {_text(tensor)}"
        return None

    def put_back(self) -> None:
        """Set every rate as it was."""
        for tensor, kept, _ in self.tensors:
            tensor.data.copy_(kept)
        for group, value in zip(self.groups, self.values, strict=True):
            if "lr" in group:
                group["lr"] = value


def _text(rate: Any) -> str:
    return f"{float(rate):.6g}" if isinstance(rate, float | int | Tensor) else str(rate)
