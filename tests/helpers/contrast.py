"""A loss that compares each sample with all others, and its gradient by hand."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from stress.reference.by_hand import joined
from tests.helpers.steps import FailOn, grads, mlp


def samples(n: int = 8) -> Tensor:
    return torch.randn(n, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


class Contrast:
    """A contrastive loss with a learned temperature outside the model."""

    def __init__(self, *layers: nn.Module) -> None:
        self.model = nn.Sequential(*mlp(), *layers).double()
        self.temperature = torch.tensor(0.5, dtype=torch.float64, requires_grad=True)
        # Lengths: a piece that was embedded positive, a batch at its loss negative.
        self.sizes: list[int] = []

    @property
    def leaves(self) -> list[Tensor]:
        return [*self.model.parameters(), self.temperature]

    def embed(self, x: Tensor) -> Tensor:
        self.sizes.append(len(x))
        return functional.normalize(self.model(x), dim=1)

    def over(self, z: Tensor) -> Tensor:
        self.sizes.append(-len(z))
        return ((z @ z.T) / self.temperature).tril(-1).exp().mean()

    def zero(self) -> None:
        self.sizes.clear()
        for leaf in self.leaves:
            leaf.grad = None

    def by_hand(self, x: Tensor, pieces: Any = None) -> list[Tensor | None]:
        """Return the gradients of the loss over the pieces' embeddings, each with its graph."""
        before = [leaf.grad for leaf in self.leaves]
        self.zero()
        self.over(
            joined([self.embed(x[start:stop]) for start, stop in pieces or [(0, len(x))]])
        ).backward()
        found = grads(self.leaves)
        self.zero()
        for leaf, grad in zip(self.leaves, before, strict=True):
            leaf.grad = grad
        return found

    def embed_failing(self, fails: FailOn) -> Callable[[Tensor], Tensor]:
        """Return `embed` with a failure at its end."""

        def embed(x: Tensor) -> Tensor:
            z = self.embed(x)
            fails()
            return z

        return embed
