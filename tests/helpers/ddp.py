"""Models, data and references for jobs of many processes. The reference is one process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn


def net(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2)
    ).double()


def worst(model: nn.Module, reference: nn.Module) -> float:
    """Return max|Δ|/max|reference| over the gradients; infinite where one is missing."""
    found = 0.0
    for mine, right in zip(model.parameters(), reference.parameters(), strict=True):
        if right.grad is None or mine.grad is None:
            same = right.grad is None and mine.grad is None
            zero = mine.grad is not None and not mine.grad.any() and right.grad is None
            found = max(found, 0.0 if same or zero else float("inf"))
            continue
        scale = float(right.grad.abs().max()) or 1.0
        found = max(found, float((mine.grad - right.grad).abs().max()) / scale)
    return found


def joined(batches: Sequence[Tensor | None]) -> Tensor:
    return torch.cat([batch for batch in batches if batch is not None])


class FailingBackward(torch.autograd.Function):
    """The identity, whose backward runs out of memory a given number of times."""

    left = 0

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        if FailingBackward.left > 0:
            FailingBackward.left -= 1
            raise torch.OutOfMemoryError("injected: out of memory in backward")
        return grad


def failing(x: Tensor) -> Tensor:
    """Return `x`, through `FailingBackward`."""
    out: Tensor = FailingBackward.apply(x)  # type: ignore[no-untyped-call]
    return out


def caught(action: Callable[[], Any]) -> str:
    """Return the error of an action in words, or "no error"."""
    try:
        action()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"
