"""A linear layer whose output is put off, and the gradients of what is computed from it later."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.weak import WeakIdKeyDictionary

from elastic_mbs.errors import ReplayUnsafeError

WAY_OUT = 'which cannot be put off: leave "logits" out of RecoveryOptions(escalate=...)'

Step = Callable[[Tensor], Tensor]
LogitsOf = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""Input, weight and bias of a head → its logits, of shape (…, classes)."""


class OtherLayers:
    """The linear layers whose output was read by something else than a cross-entropy."""

    def __init__(self) -> None:
        self._weights = WeakIdKeyDictionary()

    def add(self, weight: Tensor) -> None:
        """Leave the layer with this weight alone from now on."""
        self._weights[weight] = True

    def __contains__(self, weight: Tensor) -> bool:
        return weight in self._weights


@dataclass(frozen=True)
class Head:
    """A linear layer that was put off, and the elementwise steps after it.

    Attributes:
        hidden: its input, of shape (…, features).
        weight: of shape (classes, features).
        bias: of shape (classes,), or None.
        steps: functions of the logits, of no parameters.
        autocast: the type of autocast where the layer was called; None where it was off.
        others: the layers that are left alone.
        classes_first: the last two dimensions of the logits have changed places.
    """

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    steps: tuple[Step, ...]
    autocast: torch.dtype | None
    others: OtherLayers
    classes_first: bool = False
    versions: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not self.versions:
            object.__setattr__(self, "versions", self._versions())

    def _versions(self) -> tuple[int, ...]:
        return tuple(x._version for x in (self.hidden, self.weight, self.bias) if x is not None)

    def check(self) -> None:
        """Refuse to compute logits whose inputs were edited since the layer was called.

        Raises:
            ReplayUnsafeError: an input has changed.
        """
        if self._versions() != self.versions:
            raise ReplayUnsafeError(
                f"the input or the weight of a linear layer with {self.weight.shape[0]} outputs "
                f"was edited in place after the layer was called, {WAY_OUT}"
            )

    def with_rows(self, hidden: Tensor) -> Head:
        """Return the head of other rows of the same input."""
        self.check()
        return replace(self, hidden=hidden, versions=())

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the logits."""
        *leading, rows = self.hidden.shape[:-1]
        classes = self.weight.shape[0]
        return (*leading, classes, rows) if self.classes_first else (*leading, rows, classes)

    @property
    def cast(self) -> torch.dtype | None:
        """The type in which the layer runs under autocast, which leaves doubles alone."""
        return None if self.weight.dtype is torch.float64 else self.autocast

    # Functions and no methods: a graph that keeps one does not keep the head's input with it.
    @property
    def rows(self) -> LogitsOf:
        """The function that gives the logits of some rows, under the autocast of the call."""
        return partial(_logits, self.steps, self.autocast)

    @property
    def whole(self) -> LogitsOf:
        """The function that gives all logits, in their shape."""
        return partial(_shaped, self.rows, self.classes_first)


def _logits(
    steps: Sequence[Step],
    autocast: torch.dtype | None,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
) -> Tensor:
    with torch.autocast(hidden.device.type, dtype=autocast, enabled=autocast is not None):
        found = functional.linear(hidden, weight, bias)
        for step in steps:
            found = step(found)
    return found


def _shaped(
    rows: LogitsOf, classes_first: bool, hidden: Tensor, weight: Tensor, bias: Tensor | None
) -> Tensor:
    found = rows(hidden, weight, bias)
    return found.transpose(-1, -2) if classes_first else found


def leaves_of(inputs: Sequence[Tensor | None], asked: Sequence[bool]) -> list[Any]:
    """Return these tensors outside of their graph, each with a gradient where one is asked for."""
    return [
        None if each is None else each.detach().requires_grad_(wanted)
        for each, wanted in zip(inputs, asked, strict=False)
    ]


def gradients_of(
    out: Tensor, inputs: Sequence[Tensor | None], grad: Tensor | None = None
) -> list[Tensor | None]:
    """Return the gradients of the inputs that have one.

    They have a graph of their own where gradients of gradients are asked for.
    """
    wanted = [each is not None and each.requires_grad for each in inputs]
    chosen: Any = [each for each, asked in zip(inputs, wanted, strict=True) if asked]
    double = torch.is_grad_enabled()
    found = iter(torch.autograd.grad(out, chosen, grad, create_graph=double) if chosen else ())
    return [next(found) if asked else None for asked in wanted]
