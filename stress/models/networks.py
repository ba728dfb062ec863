"""Small networks, each with something that can go wrong in its own way."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint


class Residual(nn.Module):
    """Convolutions with BatchNorm and a way around."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(2, 4, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(4)
        self.body = nn.Conv2d(4, 4, 3, padding=1)
        self.norm2 = nn.BatchNorm2d(4)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        """Runs it."""
        x = functional.relu(self.norm(self.stem(x)))
        x = x + self.norm2(self.body(x))
        out: Tensor = self.head(x.mean((2, 3)))
        return out


class GPT(nn.Module):
    """A transformer with tied embeddings: with masks, or with activations that are computed again, or neither."""

    def __init__(self, dropout: float = 0.0, reentrant: bool | None = None) -> None:
        super().__init__()
        self.embed = nn.Embedding(12, 6)
        self.norm = nn.LayerNorm(6)
        self.query = nn.Linear(6, 18)
        self.mix = nn.Linear(6, 6)
        self.head = nn.Linear(6, 12, bias=False)
        self.head.weight = self.embed.weight
        self.dropout = dropout
        self.reentrant = reentrant

    def block(self, x: Tensor) -> Tensor:
        """One layer."""
        q, k, v = self.query(self.norm(x)).chunk(3, -1)
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + functional.dropout(self.mix(attended), self.dropout, self.training)

    def forward(self, tokens: Tensor) -> Tensor:
        """Runs it."""
        x = self.embed(tokens)
        for _ in range(2):
            x = self.block(x) if self.reentrant is None else checkpoint(self.block, x, use_reentrant=self.reentrant)
        out: Tensor = self.head(x)
        return out


class EncoderDecoder(nn.Module):
    """Two inputs, one of which looks at the other."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(12, 6)
        self.net = nn.Transformer(6, 2, 1, 1, 8, dropout=0.0, batch_first=True)
        self.head = nn.Linear(6, 12)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        """Runs it."""
        out: Tensor = self.head(self.net(self.embed(source), self.embed(target)))
        return out


class Recurrent(nn.Module):
    """A recurrent layer and a head."""

    def __init__(self, kind: type[nn.GRU] | type[nn.LSTM]) -> None:
        super().__init__()
        self.net = kind(4, 6, batch_first=True)
        self.head = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        """Runs it."""
        out: Tensor = self.head(self.net(x)[0][:, -1])
        return out


class Experts(nn.Module):
    """Which expert a sample meets depends on the sample, and one layer is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(6, 3)
        self.experts = nn.ModuleList(nn.Linear(6, 4) for _ in range(3))
        self.unused = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        """Runs it."""
        choice = self.gate(x).softmax(-1)
        best = choice.argmax(-1)
        out = torch.zeros(x.shape[0], 4, dtype=x.dtype)
        for index, expert in enumerate(self.experts):
            rows = (best == index).nonzero()[:, 0]
            if len(rows):
                out = out.index_add(0, rows, expert(x[rows]) * choice[rows, index, None])
        return out


class Recompute(torch.autograd.Function):
    """Recomputes its module in backward and calls backward by itself, as offloaded checkpointing and reversible blocks do."""

    @staticmethod
    def forward(ctx: Any, module: nn.Module, x: Tensor) -> Tensor:
        """Runs the module without a graph."""
        ctx.module = module
        ctx.save_for_backward(x)
        with torch.no_grad():
            out: Tensor = module(x)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor | None]:
        """Runs it again, and its backward."""
        (x,) = ctx.saved_tensors
        x = x.detach().requires_grad_()
        with torch.enable_grad():
            out = ctx.module(x)
        torch.autograd.backward(out, grad)
        return None, x.grad


class Hidden(nn.Module):
    """A block that calls backward inside its backward."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(6, 6)
        self.block = nn.Sequential(nn.Linear(6, 6), nn.Tanh())
        self.head = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        """Runs it."""
        out: Tensor = self.head(Recompute.apply(self.block, self.stem(x)))  # type: ignore[no-untyped-call]  # torch leaves it untyped
        return out


class SparseBag(nn.Module):
    """An embedding whose gradient is sparse."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(12, 4, sparse=True)
        self.head = nn.Linear(4, 4)

    def forward(self, tokens: Tensor) -> Tensor:
        """Runs it."""
        out: Tensor = self.head(self.embed(tokens).mean(1))
        return out


class HostMasks(nn.Module):
    """Masks from Python's and numpy's streams."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        """Runs it."""
        import numpy as np

        mask = torch.from_numpy(np.random.rand(x.shape[0], 8))  # the legacy stream is what such models use
        scale = random.random() + 0.5
        out: Tensor = self.second(torch.tanh(self.first(x)) * mask * scale)
        return out
