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
    kept: Sequence[Any] = ()  # the same, with copies of the tensors
    versions: Sequence[int] = ()  # of the tensors

    @classmethod
    def of(cls, optimizers: Iterable[Optimizer]) -> Rates:
        """Return the learning rates of these optimizers as they are now."""
        return cls(list(chain.from_iterable(map(_GROUPS, optimizers)))).now()

    def now(self) -> Rates:
        """Return the rates of the same groups as they are now."""
        values = _rates(self.groups)
        kept = [each.detach().clone() if isinstance(each, Tensor) else each for each in values]
        return Rates(self.groups, values, kept, _versions(values))

    def change(self) -> str | None:
        """Return a rate that is another one now, as text: before and now."""
        now = _rates(self.groups)
        if now == self.values and _versions(now) == self.versions:
            return None
        for before, version, value, kept in zip(
            self.values, self.versions, now, self.kept, strict=True
        ):
            if value is not before or _versions([value]) != [version]:
                return f"{_text(kept)} to {_text(value)}"
        return None

    def put_back(self) -> None:
        """Set every rate as it was."""
        for group, value, kept in zip(self.groups, self.values, self.kept, strict=True):
            if isinstance(value, Tensor):
                value.data.copy_(kept)
            if "lr" in group:
                group["lr"] = value


def _rates(groups: Sequence[dict[str, Any]]) -> list[Any]:
    return list(map(dict.get, groups, repeat("lr")))


def _versions(values: Iterable[Any]) -> list[int]:
    return list(map(getattr, values, repeat("_version"), repeat(0)))


def _text(rate: Any) -> str:
    return f"{float(rate):.6g}" if isinstance(rate, float | int | Tensor) else str(rate)
