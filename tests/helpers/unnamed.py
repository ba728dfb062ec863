"""Steps whose loss function uses more than the model that is given, and their twins by hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

F64 = torch.float64


@dataclass
class Step:
    """A step whose loss function uses more than the model that is given."""

    model: nn.Module
    loss_fn: Callable[[Any], Tensor]
    others: list[Any] = field(default_factory=list)  # modules and generators
    call: int = 0

    def zero_grad(self) -> None:
        """Empty the gradients of parameters, as an optimizer does."""
        for each in (self.model, *self.others):
            if isinstance(each, nn.Module):
                each.zero_grad()

    def state(self) -> list[Any]:
        """Return all that a call can change: tensors, and everything else as text."""
        found: list[Any] = [parameter.grad for parameter in self.model.parameters()]
        for each in (self.model, *self.others):
            if isinstance(each, nn.Module):
                found += [tensor for module in each.modules() for tensor in _tensors(module)]
                found += [repr(_rest(module)) for module in each.modules()]
            elif isinstance(each, torch.Generator):
                found.append(each.get_state())
            else:
                found.append(repr(getattr(each, "bit_generator", each).state))
        return found


def _tensors(module: nn.Module) -> list[Tensor | None]:
    buffers = list(module._buffers.values())
    own = [value for value in vars(module).values() if isinstance(value, Tensor)]
    gradients = [None if buffer is None else buffer.grad for buffer in buffers]
    return [*module._parameters.values(), *buffers, *gradients, *own]


def _rest(module: nn.Module) -> dict[str, Any]:
    kinds = (int, float, list, dict)
    return {
        name: value
        for name, value in vars(module).items()
        if isinstance(value, kinds) and not name.startswith("_")
    }


def same(one: list[Any], other: list[Any]) -> bool:
    """Return whether both states are the same, up to rounding."""
    return all(
        torch.allclose(a, b, rtol=1e-12, atol=1e-14)
        if isinstance(a, Tensor) and isinstance(b, Tensor)
        else a is None and b is None
        if a is None or b is None
        else bool(a == b)
        for a, b in zip(one, other, strict=True)
    )


def by_hand(step: Step, partition: Any, batch: Any) -> None:
    """Run one call as an undisturbed loop over the same pieces."""
    step.call += 1
    for start, stop in partition:
        piece = tuple(part[start:stop] for part in batch)
        (step.loss_fn(piece) * ((stop - start) / len(batch[0]))).backward()


class Metric(nn.Module):
    """A metric as torchmetrics has them: attributes that are no buffers, and lists."""

    def __init__(self, *, in_place: bool) -> None:
        super().__init__()
        self.in_place = in_place
        self.total, self.updates = torch.zeros((), dtype=F64), 0
        self.items: list[float] = []
        self.by_class: dict[int, int] = {}

    def forward(self, scores: Tensor, labels: Tensor) -> None:
        self.updates += 1
        right = (scores.detach().argmax(1) == labels).double().sum()
        if self.in_place:
            self.total += right
        else:
            self.total = self.total + right
        self.items.append(float(right))
        for label in labels.tolist():
            self.by_class[label] = self.by_class.get(label, 0) + 1
