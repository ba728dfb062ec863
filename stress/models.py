"""Models to train under stress: in float64, small, and with activations that take far more memory than their parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from elastic_mbs import count_tokens
from elastic_mbs.demo.gpt import GPT, GPTConfig

from .subject import Subject

SAMPLES = 32
"""In a batch."""

_IGNORED = -100


def _adamw(parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3)


def _stream(step: int) -> torch.Generator:
    """Batches come from their number, not from the order in which they are asked for: a resumed run sees the same ones."""
    return torch.Generator().manual_seed(1_000_003 * (step + 1))


class Wide(nn.Module):
    """Few weights and large activations, so that memory is a matter of the micro-batch, and little work: most scenarios train it.

    Args:
        width: bytes of one activation per sample, over 8.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Linear(8, width)
        self.last = nn.Linear(width, 4)

    def forward(self, x: Tensor) -> Tensor:
        """(samples, 8) → (samples, 4)."""
        scores: Tensor = self.last(torch.tanh(torch.sin(torch.tanh(self.first(x)))))
        return scores


def _wide(name: str, samples: int, width: int, optimizer: Callable[[Iterable[Tensor]], torch.optim.Optimizer] | None = None) -> Subject:
    model = Wide(width).double()

    def batch(step: int) -> tuple[Tensor, Tensor]:
        stream = _stream(step)
        return torch.randn(samples, 8, generator=stream, dtype=torch.float64), torch.randint(0, 4, (samples,), generator=stream)

    def loss_fn(piece: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(model(piece[0]), piece[1])

    return Subject(model, loss_fn, batch, name=name) if optimizer is None else Subject(model, loss_fn, batch, optimizer, name=name)


def wide() -> Subject:
    """Two small layers and large activations between them: the quick case."""
    return _wide("wide", SAMPLES, 8192)


def large() -> Subject:
    """The same in the size of a GPU, where blocks and workspaces of libraries are megabytes."""
    return _wide("large", 1024, 16384)


def adam() -> Subject:
    """The opposite: more weights than activations, under AdamW, whose state is twice the weights and whose step takes as much again."""
    layers = [layer for _ in range(6) for layer in (nn.Linear(192, 192), nn.Tanh())]
    model = nn.Sequential(*layers, nn.Linear(192, 8)).double()

    def batch(step: int) -> tuple[Tensor, Tensor]:
        stream = _stream(step)
        return torch.randn(SAMPLES, 192, generator=stream, dtype=torch.float64), torch.randint(0, 8, (SAMPLES,), generator=stream)

    def loss_fn(piece: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(model(piece[0]), piece[1])

    return Subject(model, loss_fn, batch, lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, foreach=True), name="adam")


def mlp() -> Subject:
    """Linear layers on long rows: the plain case."""
    model = nn.Sequential(nn.Linear(64, 512), nn.Tanh(), nn.Linear(512, 512), nn.Tanh(), nn.Linear(512, 10)).double()

    def batch(step: int) -> tuple[Tensor, Tensor]:
        stream = _stream(step)
        return torch.randn(SAMPLES, 32, 64, generator=stream, dtype=torch.float64), torch.randint(0, 10, (SAMPLES, 32), generator=stream)

    def loss_fn(piece: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(model(piece[0]).flatten(0, 1), piece[1].flatten())

    return Subject(model, loss_fn, batch, _adamw, name="mlp")


def cnn() -> Subject:
    """Convolutions with BatchNorm: gradients and buffers depend on how the batch is split."""
    layers: list[nn.Module] = []
    for width in (3, 16, 16):
        layers += [nn.Conv2d(width, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU()]
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10)).double()

    def batch(step: int) -> tuple[Tensor, Tensor]:
        stream = _stream(step)
        return torch.randn(SAMPLES, 3, 24, 24, generator=stream, dtype=torch.float64), torch.randint(0, 10, (SAMPLES,), generator=stream)

    def loss_fn(piece: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(model(piece[0]), piece[1])

    return Subject(model, loss_fn, batch, name="cnn")


def _language(name: str, length: Callable[[int], int]) -> Subject:
    model = GPT(GPTConfig(vocabulary=64, context=256, width=32, heads=2, layers=2)).double()

    def batch(step: int) -> dict[str, Tensor]:
        stream, tokens = _stream(step), length(step)
        rows = torch.randint(0, 64, (SAMPLES, tokens), generator=stream)
        labels = rows.roll(-1, 1)
        ends = torch.randint(1, tokens, (SAMPLES, 1), generator=stream)  # samples of different length, padded
        labels[torch.arange(tokens) >= ends] = _IGNORED
        return {"tokens": rows, "labels": labels}

    def loss_fn(piece: dict[str, Tensor]) -> Tensor:
        return F.cross_entropy(model(piece["tokens"]).flatten(0, 1), piece["labels"].flatten(), ignore_index=_IGNORED)

    return Subject(model, loss_fn, batch, _adamw, {"count": count_tokens("labels")}, name)


def gpt() -> Subject:
    """The demo's GPT, made small, counted in tokens."""
    return _language("gpt", lambda _: 64)


def gpt_bursts() -> Subject:
    """The same, with bursts of inputs four times as long."""
    return _language("gpt_bursts", lambda step: 256 if step % 10 in (6, 7) else 64)


BUILTIN: dict[str, Callable[[], Any]] = {make.__name__: make for make in (wide, mlp, cnn, gpt, gpt_bursts, adam, large)}
"""Models by name."""
