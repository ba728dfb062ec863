"""Layers of every kind that can go wrong in its own way, and networks of them.

Each layer maps (samples, positions, width) to the same shape.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

VOCABULARY = 11
CLASSES = 3


@contextmanager
def in_double() -> Iterator[None]:
    """Make tensors in float64 inside the block."""
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(default)


class Recompute(torch.autograd.Function):
    """A module that is computed again in backward, which calls backward by itself.

    Offloaded checkpointing and reversible blocks do so.
    """

    @staticmethod
    def forward(ctx: Any, module: nn.Module, x: Tensor) -> Any:
        ctx.module = module
        ctx.save_for_backward(x)
        with torch.no_grad():
            return module(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor | None]:
        (x,) = ctx.saved_tensors
        x = x.detach().requires_grad_()
        with torch.enable_grad():
            out = ctx.module(x)
        torch.autograd.backward(out, grad)
        return None, x.grad


class Made(nn.Module):
    """A module of parts, whose forward is a function of it and of the input."""

    def __init__(
        self, run: Callable[[Any, Tensor], Any], **parts: nn.Module | nn.Parameter
    ) -> None:
        super().__init__()
        self._run = run
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x: Tensor) -> Any:
        return self._run(self, x)


def _norm(norm: nn.Module) -> Made:
    """Return a norm over the features of each position."""
    return Made(lambda m, x: m.norm(x.flatten(0, 1)).view_as(x), norm=norm)


def _convolution(m: Any, x: Tensor) -> Tensor:
    return F.relu(m.inner(x.transpose(1, 2))).transpose(1, 2)


def _attention(m: Any, x: Tensor) -> Any:
    q, k, v = m.mix(x).chunk(3, -1)
    return x + m.out(F.scaled_dot_product_attention(q, k, v, is_causal=True))


def _masked(m: Any, x: Tensor) -> Any:
    """Mask by Python's stream and by numpy's legacy stream, which such models use."""
    if m.training:
        numpy = sys.modules.get("numpy.random")
        x = (
            x
            * (random.random() + 0.5)
            * (1.0 if numpy is None else torch.from_numpy(numpy.rand(*x.shape)).to(x.device))
        )
    return m.inner(x)


def _contrast(m: Any, x: Tensor) -> Tensor:
    """Compare samples with each other in a way that no graph shows."""
    out: Tensor = m.inner(x)
    return out - 0.5 * out.mean(0, keepdim=True) if m.training else out


def _hidden(m: Any, x: Tensor) -> Any:
    """Call backward inside its backward."""
    return Recompute.apply(m.block, x)  # type: ignore[no-untyped-call]  # torch leaves it untyped


def _block(width: int, *, reentrant: bool, dropout: float = 0.0) -> Made:
    """Return a block with a mask in it, run again in backward."""

    def run(m: Any, x: Tensor) -> Any:
        return checkpoint(
            lambda x: F.dropout(torch.tanh(m.inner(m.inner(x))), dropout, m.training),
            x,
            use_reentrant=reentrant,
        )

    return Made(run, inner=nn.Linear(width, width))


def _recurrent(cell: nn.Module) -> Made:
    return Made(lambda m, x: m.cell(x)[0], cell=cell)


def _experts(m: Any, x: Tensor) -> Tensor:
    """Send each sample to an expert that depends on the sample; one expert is never met."""
    rows = x.flatten(0, 1)
    choice = m.gate(rows).softmax(-1)
    best = choice.argmax(-1)
    out = torch.zeros_like(rows)
    for index, expert in enumerate(m.experts):
        mine = (best == index).nonzero()[:, 0]
        if len(mine):
            out = out.index_add(0, mine, expert(rows[mine]) * choice[mine, index, None])
    return out.view_as(x)


def _routed(width: int) -> Made:
    experts = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
    return Made(_experts, gate=nn.Linear(width, 2), experts=experts, never=nn.Linear(width, width))


class _Running(nn.Module):
    """Statistics in the way that a person writes them.

    Each update makes a new tensor, and there is a number beside it.
    """

    mean: Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(width))
        self.own_count = 0
        self.scale = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.own_count += 1
            self.mean = self.mean * 0.9 + x.detach().mean((0, 1)) * 0.1 / self.own_count
        return (x - self.mean) * self.scale


def flat_gradients(leaves: Sequence[Tensor]) -> Tensor:
    """Give leaves gradients of zeros that are views of one flat buffer, as bucketing does.

    Returns the buffer.
    """
    flat = torch.zeros(
        sum(leaf.numel() for leaf in leaves), dtype=leaves[0].dtype, device=leaves[0].device
    )
    offset = 0
    for leaf in leaves:
        leaf.grad = flat[offset : offset + leaf.numel()].view_as(leaf)
        offset += leaf.numel()
    return flat


@dataclass(frozen=True)
class Layer:
    """A kind of layer."""

    make: Callable[[int], nn.Module]  # makes the layer from the width
    # a sample's result depends neither on the others in its piece nor on chance
    separable: bool = True
    half: bool = False  # runs in bfloat16
    shared: bool = False  # one instance serves all layers of a network


LAYERS: dict[str, Layer] = {
    "linear": Layer(lambda d: nn.Sequential(nn.Linear(d, d), nn.Tanh()), half=True),
    "wide": Layer(
        lambda d: nn.Sequential(nn.Linear(d, 8 * d), nn.GELU(), nn.Linear(8 * d, d, bias=False)),
        half=True,
    ),
    "residual": Layer(
        lambda d: Made(
            lambda m, x: x + m.inner(m.norm(x)), norm=nn.LayerNorm(d), inner=nn.Linear(d, d)
        ),
        half=True,
    ),
    "layernorm": Layer(nn.LayerNorm, half=True),
    "groupnorm": Layer(lambda d: _norm(nn.GroupNorm(1, d))),
    "batchnorm": Layer(lambda d: _norm(nn.BatchNorm1d(d)), separable=False),
    "dropout": Layer(lambda _: nn.Dropout(0.3), separable=False, half=True),
    "conv": Layer(lambda d: Made(_convolution, inner=nn.Conv1d(d, d, 3, padding=1))),
    "attention": Layer(
        lambda d: Made(_attention, mix=nn.Linear(d, 3 * d), out=nn.Linear(d, d)), half=True
    ),
    "gru": Layer(lambda d: _recurrent(nn.GRU(d, d, batch_first=True))),
    "lstm": Layer(lambda d: _recurrent(nn.LSTM(d, d, batch_first=True))),
    "experts": Layer(_routed),
    "tied": Layer(lambda d: nn.Linear(d, d), half=True, shared=True),
    "frozen": Layer(lambda d: nn.Linear(d, d).requires_grad_(False)),
    # Only a sum lies between it and the next layer.
    "shift": Layer(
        lambda d: Made(lambda m, x: x + m.by, by=nn.Parameter(torch.zeros(d))), half=True
    ),
    "checkpoint": Layer(lambda d: _block(d, reentrant=False)),
    "checkpoint dropout": Layer(lambda d: _block(d, reentrant=False, dropout=0.3), separable=False),
    "checkpoint reentrant": Layer(lambda d: _block(d, reentrant=True)),
    "checkpoint tied": Layer(lambda d: _block(d, reentrant=True), shared=True),
    "hidden": Layer(lambda d: Made(_hidden, block=nn.Sequential(nn.Linear(d, d), nn.Tanh()))),
    "spectral": Layer(lambda d: parametrizations.spectral_norm(nn.Linear(d, d)), separable=False),
    "running": Layer(_Running, separable=False),
    "host mask": Layer(lambda d: Made(_masked, inner=nn.Linear(d, d)), separable=False),
    "contrast": Layer(lambda d: Made(_contrast, inner=nn.Linear(d, d)), separable=False),
}


class Network(nn.Module):
    """A stem, layers by name, a head that scores each position, and branches beside it.

    The stem takes `features` numbers, or indices where `features` is 0.
    """

    def __init__(
        self,
        layers: tuple[str, ...],
        width: int,
        *,
        features: int,
        sparse: bool = False,
        tie: bool = False,
        branches: int = 0,
    ) -> None:
        super().__init__()
        self.stem = (
            nn.Linear(features, width)
            if features
            else nn.Embedding(VOCABULARY, width, sparse=sparse)
        )
        shared = {
            name: LAYERS[name].make(width) for name in dict.fromkeys(layers) if LAYERS[name].shared
        }
        self.layers = nn.ModuleList(shared.get(name) or LAYERS[name].make(width) for name in layers)
        self.head = nn.Linear(width, VOCABULARY if tie else CLASSES, bias=not tie)
        if tie:
            self.head.weight = self.stem.weight
        # Their backwards are ready when the head's is, so that an error leaves some leaves with the
        # piece's gradient and others without.
        self.branches = nn.ModuleList(
            nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, CLASSES))
            for _ in range(branches)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return scores of shape (samples, positions, classes)."""
        x = shared = self.stem(x)
        for layer in self.layers:
            x = layer(x)
        out: Tensor = self.head(x)
        for branch in self.branches:
            out = out + branch(shared)
        return out
