"""Sharded models for jobs of many processes, and how their gradients are compared."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

from stress.ranks.shards import full


class Block(nn.Module):
    """A residual block, whose activations can be computed again in backward."""

    checkpointed = False

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.wide = nn.Linear(width, 2 * width)
        self.narrow = nn.Linear(2 * width, width)

    def inner(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.narrow(torch.tanh(self.wide(self.norm(x))))
        return out

    def forward(self, x: Tensor) -> Tensor:
        if self.checkpointed:
            out: Tensor = checkpoint(self.inner, x, use_reentrant=False)
            return out
        return self.inner(x)


class Net(nn.Module):
    """Blocks between two layers. Its sizes divide by no number of ranks, but for a few."""

    def __init__(
        self, width: int = 8, blocks: int = 2, *, tied: bool = False, recurrent: bool = False
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(4, width)
        self.memory = nn.LSTM(width, width, batch_first=True) if recurrent else None
        self.blocks = nn.ModuleList([Block(width) for _ in range(blocks)])
        self.middle = nn.Linear(width, width)
        self.again = nn.Linear(width, width)
        if tied:
            self.again.weight = self.middle.weight
        self.last = nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if self.memory is not None:
            x = self.memory(x.unsqueeze(1))[0].squeeze(1)
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.last(torch.tanh(self.again(self.middle(x))))
        return out


def sharded(model: nn.Module, **options: Any) -> nn.Module:
    """Apply `fully_shard` to each block of a model, and to the model."""
    for block in model.modules():
        if isinstance(block, Block):
            fully_shard(block, **options)
    fully_shard(model, **options)
    return model


def worst(model: nn.Module, reference: nn.Module) -> float:
    """Return max|Δ|/max|reference| over the gradients; infinite where one is missing."""
    found = 0.0
    for mine, right in zip(model.parameters(), reference.parameters(), strict=True):
        grad = full(mine.grad)
        if grad is None or right.grad is None:
            zero = grad is not None and not grad.any()
            found = max(found, 0.0 if right.grad is None and (grad is None or zero) else torch.inf)
            continue
        scale = float(right.grad.abs().max()) or 1.0
        found = max(found, float((grad - right.grad).abs().max()) / scale)
    return found


def alike(model: nn.Module, reference: nn.Module) -> float:
    """Return the largest difference of the parameters' values."""
    pairs = zip(model.parameters(), reference.parameters(), strict=True)
    differences = [(_values(mine) - right).abs().max() for mine, right in pairs]
    return float(torch.stack(differences).max())


def _values(parameter: Tensor) -> Tensor:
    found = full(parameter.detach())
    assert found is not None
    return found
