"""Everything that a call may change, copied and compared."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..streams import Streams


class WrongOutcomeError(AssertionError):
    """Neither the right gradient nor a typed error with its state."""


def demand(holds: bool, what: str) -> None:
    """Raise a WrongOutcomeError unless `holds`."""
    if not holds:
        raise WrongOutcomeError(what)


@dataclass(frozen=True)
class State:
    """Copies of gradients, parameters, buffers, other state of modules, and random streams."""

    grads: list[Tensor | None]
    parameters: list[Tensor]
    buffers: list[Tensor]
    modules: list[tuple[bool, Any]]  # for each module: training or not, and its own counters
    streams: Streams

    @classmethod
    def of(cls, leaves: Iterable[Tensor], model: nn.Module) -> State:
        leaves = list(leaves)
        return cls(
            [None if leaf.grad is None else leaf.grad.detach().clone() for leaf in leaves],
            [leaf.detach().clone() for leaf in leaves],
            [buffer.detach().clone() for buffer in model.buffers()],
            [(module.training, getattr(module, "own_count", None)) for module in model.modules()],
            Streams.now(),
        )

    def put_back(
        self, leaves: Iterable[Tensor], model: nn.Module, gradients: Sequence[Tensor | None]
    ) -> None:
        """Put everything back.

        Gradients go into the tensors that were there, given in the leaves' order.
        """
        with torch.no_grad():
            for leaf, value, grad, tensor in zip(
                leaves, self.parameters, self.grads, gradients, strict=True
            ):
                leaf.copy_(value)
                leaf.grad = tensor if tensor is None or grad is None else tensor.copy_(grad)
            for buffer, value in zip(model.buffers(), self.buffers, strict=True):
                buffer.copy_(value)
        self.streams.restore()

    def changes(self, now: State) -> list[str]:
        """Return the names of everything that has changed, but for gradients."""
        pairs = {
            "parameters": same_tensors(self.parameters, now.parameters),
            "buffers": same_tensors(self.buffers, now.buffers),
            "modes or counts of modules": self.modules == now.modules,
            "random streams": self.streams.same(now.streams),
        }
        return [f"{name} are not as before" for name, same in pairs.items() if not same]

    def demand_kept(self, now: State, notes: str = "", where: str = "") -> None:
        """Check that an error has left no more behind than it may.

        That is gradients, where its `notes` say that they have to be zeroed. Raises a
        WrongOutcomeError
        otherwise.
        """
        found = self.changes(now)
        for before, after in zip(self.grads, now.grads, strict=True):
            if before is None and after is not None:
                found.append("a gradient that was empty is not empty")
            elif (
                before is not None
                and "zero_grad()" not in notes
                and (after is None or not same_gradients(after, before))
            ):
                found.append("a gradient changed, and the error does not say so")
        demand(not found, f"{where}{', '.join(dict.fromkeys(found))}")

    def demand_rest_of(self, wanted: State, tolerance: float, where: str = "") -> None:
        """Check that buffers, modules and random streams are those of a run without failures.

        Raises a WrongOutcomeError where they differ by more than rounding.
        """
        pairs = zip(self.buffers, wanted.buffers, strict=True)
        same = all(
            torch.allclose(
                a.double(), b.double(), rtol=tolerance, atol=tolerance / 100, equal_nan=True
            )
            for a, b in pairs
        )
        demand(same, f"{where}buffers differ from a run without failures")
        demand(
            self.modules == wanted.modules,
            f"{where}modes or counts of modules differ from a run without failures",
        )
        demand(
            self.streams.same(wanted.streams),
            f"{where}random streams are not where a run without failures leaves them",
        )


def same_tensors(a: Sequence[Tensor], b: Sequence[Tensor]) -> bool:
    return len(a) == len(b) and all(
        x.shape == y.shape and torch.allclose(x, y, rtol=0, atol=0, equal_nan=True)
        for x, y in zip(a, b, strict=True)
    )


def same_gradients(a: Tensor, b: Tensor) -> bool:
    """Return whether two gradients are equal.

    The rows of sparse ones are compared as they are: a GPU adds them up in any order.
    """
    if not (a.is_sparse and b.is_sparse):
        return error_of([a], [b]) == 0
    return same_tensors([a._indices(), a._values()], [b._indices(), b._values()])


def hooks_on(model: nn.Module, leaves: Iterable[Tensor]) -> int:
    """Return the number of hooks on the modules and leaves of a model."""
    count = sum(
        len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()
    )
    return count + sum(
        len(leaf._post_accumulate_grad_hooks or ()) + len(leaf._backward_hooks or ())
        for leaf in leaves
    )


# Largest difference of a gradient, relative to its largest entry, by the narrowest type of the
# parameters: a split sums in another order.
TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-4, torch.float16: 3e-2, torch.bfloat16: 3e-2}


def tolerance_of(model: nn.Module) -> float:
    """Return the rounding allowed in a gradient of this model."""
    return max(
        (TOLERANCES.get(parameter.dtype, 3e-2) for parameter in model.parameters()), default=0.0
    )


def same_state(a: Any, b: Any, tolerance: float = 1e-15) -> bool:
    """Return whether two states of an optimizer are equal.

    Their numbers may differ by `tolerance`, relatively; by default, by the last bit.
    """
    if isinstance(a, Tensor):
        return (
            isinstance(b, Tensor)
            and a.dtype == b.dtype
            and bool(torch.allclose(a, b, rtol=tolerance, atol=0, equal_nan=True))
        )
    if isinstance(a, dict):
        return (
            isinstance(b, dict)
            and a.keys() == b.keys()
            and all(same_state(a[key], b[key], tolerance) for key in a)
        )
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(
            same_state(x, y, tolerance) for x, y in zip(a, b, strict=True)
        )
    return bool(a == b)


def error_of(
    got: Sequence[Tensor | None], wanted: Sequence[Tensor | None], *, floor: float = 0.0
) -> float:
    """Return the largest difference over the leaves, relative to the largest entry of each.

    It is infinite where only one has a gradient, or one is not finite. A leaf's largest entry
    counts as
    at least `floor` of the largest of all.
    """
    pairs = []
    for a, b in zip(got, wanted, strict=True):
        if (a is None) != (b is None):
            return math.inf
        if a is not None and b is not None and a.numel() > 0:
            left, right = a.to_dense().double(), b.to_dense().double()
            pairs.append(((left - right).abs().max().item(), right.abs().max().item()))
    least = floor * max((scale for _, scale in pairs), default=0.0)
    errors = [off / max(own, least) if max(own, least) > 0 else off for off, own in pairs]
    return max(errors, default=0.0) if all(map(math.isfinite, errors)) else math.inf
