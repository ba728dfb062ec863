"""Layers of every kind that can go wrong in its own way, each from (samples, positions, width) to the same shape, and networks of them."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from .networks import Recompute

VOCABULARY = 11
CLASSES = 3


class _Norm(nn.Module):
    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.norm(x.flatten(0, 1)).view_as(x)
        return out


class _Convolution(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = nn.Conv1d(width, width, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = F.relu(self.conv(x.transpose(1, 2))).transpose(1, 2)
        return out


class _Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.mix, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.mix(x).chunk(3, -1)
        out: Tensor = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True))
        return out


class _Recurrent(nn.Module):
    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.net(x)[0]
        return out


class _Experts(nn.Module):
    """Which expert a sample meets depends on the sample, and one is never met."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, 2)
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
        self.never = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, 1)
        choice = self.gate(rows).softmax(-1)
        best = choice.argmax(-1)
        out = torch.zeros_like(rows)
        for index, expert in enumerate(self.experts):
            mine = (best == index).nonzero()[:, 0]
            if len(mine):
                out = out.index_add(0, mine, expert(rows[mine]) * choice[mine, index, None])
        return out.view_as(x)


class _Block(nn.Module):
    """A block with a mask in it, run again in backward."""

    def __init__(self, width: int, *, reentrant: bool, dropout: float) -> None:
        super().__init__()
        self.inner, self.reentrant, self.dropout = nn.Linear(width, width), reentrant, dropout

    def _run(self, x: Tensor) -> Tensor:
        return F.dropout(torch.tanh(self.inner(self.inner(x))), self.dropout, self.training)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = checkpoint(self._run, x, use_reentrant=self.reentrant)
        return out


class _Hidden(nn.Module):
    """Calls backward inside its backward."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(width, width), nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = Recompute.apply(self.block, x)  # type: ignore[no-untyped-call]  # torch leaves it untyped
        return out


class _Running(nn.Module):
    """Statistics as a person writes them: a new tensor each time, and a number beside it."""

    mean: Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(width))
        self.count = 0
        self.scale = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.count += 1
            self.mean = self.mean * 0.9 + x.detach().mean((0, 1)) * 0.1 / self.count
        return (x - self.mean) * self.scale


class _HostMask(nn.Module):
    """Draws from Python's stream."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x)
        return out * (random.random() + 0.5) if self.training else out


class _Contrast(nn.Module):
    """Samples compared with each other in a way that no graph shows."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x)
        return out - 0.5 * out.mean(0, keepdim=True) if self.training else out


class _Residual(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.inner(x)
        return out


class _Shift(nn.Module):
    """Only a sum lies between this leaf and what follows."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.by = nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.by


@dataclass(frozen=True)
class Layer:
    """A kind of layer.

    Attributes:
        make: from the width.
        separable: what a sample gives does not depend on the others in its piece, nor on chance.
        half: runs in bfloat16.
        hidden_mixing: samples depend on each other in a way that torch does not show, which asks for replay="isolate".
    """

    make: Callable[[int], nn.Module]
    separable: bool = True
    half: bool = False
    hidden_mixing: bool = False


def _frozen(width: int) -> nn.Module:
    return nn.Linear(width, width).requires_grad_(False)


LAYERS: dict[str, Layer] = {
    "linear": Layer(lambda d: nn.Sequential(nn.Linear(d, d), nn.Tanh()), half=True),
    "wide": Layer(lambda d: nn.Sequential(nn.Linear(d, 8 * d), nn.GELU(), nn.Linear(8 * d, d, bias=False)), half=True),
    "residual": Layer(lambda d: _Residual(nn.Sequential(nn.LayerNorm(d), nn.Linear(d, d))), half=True),
    "layernorm": Layer(nn.LayerNorm, half=True),
    "groupnorm": Layer(lambda d: _Norm(nn.GroupNorm(1, d))),
    "batchnorm": Layer(lambda d: _Norm(nn.BatchNorm1d(d)), separable=False),
    "dropout": Layer(lambda _: nn.Dropout(0.3), separable=False, half=True),
    "conv": Layer(_Convolution),
    "attention": Layer(_Attention, half=True),
    "gru": Layer(lambda d: _Recurrent(nn.GRU(d, d, batch_first=True))),
    "lstm": Layer(lambda d: _Recurrent(nn.LSTM(d, d, batch_first=True))),
    "experts": Layer(_Experts),
    "tied": Layer(lambda _: nn.Identity(), half=True),
    "frozen": Layer(_frozen),
    "shift": Layer(_Shift, half=True),
    "checkpoint": Layer(lambda d: _Block(d, reentrant=False, dropout=0.0)),
    "checkpoint dropout": Layer(lambda d: _Block(d, reentrant=False, dropout=0.3), separable=False),
    "checkpoint reentrant": Layer(lambda d: _Block(d, reentrant=True, dropout=0.0)),
    "hidden": Layer(_Hidden),
    "spectral": Layer(lambda d: parametrizations.spectral_norm(nn.Linear(d, d)), separable=False),
    "running": Layer(_Running, separable=False),
    "host mask": Layer(_HostMask, separable=False),
    "contrast": Layer(_Contrast, separable=False, hidden_mixing=True),
}
"""Kinds of layers by name. All "tied" ones of a network are one and the same."""


class Network(nn.Module):
    """A stem, the layers, and a head that scores each position.

    Args:
        layers: by name.
        width: of them.
        features: of a position; 0 where the input is indices.
        sparse: whether the embedding's gradient is sparse.
        branches: further heads beside the layers. All of their backwards are ready when the head's is, so that an error leaves some leaves with the
            piece's gradient and others without.
    """

    def __init__(self, layers: tuple[str, ...], width: int, *, features: int, sparse: bool = False, branches: int = 0) -> None:
        super().__init__()
        self.stem = nn.Linear(features, width) if features else nn.Embedding(VOCABULARY, width, sparse=sparse)
        shared = nn.Linear(width, width) if "tied" in layers else None
        self.layers = nn.ModuleList(shared if shared is not None and name == "tied" else LAYERS[name].make(width) for name in layers)
        self.head = nn.Linear(width, CLASSES)
        self.branches = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, CLASSES)) for _ in range(branches))

    def forward(self, x: Tensor) -> Tensor:
        """Scores of shape (samples, positions, CLASSES)."""
        x = shared = self.stem(x)
        for layer in self.layers:
            x = layer(x)
        out: Tensor = self.head(x)
        for branch in self.branches:
            out = out + branch(shared)
        return out
