"""Models to train under stress: in float64, and with activations that take far more memory than their parameters.

Each comes in two sizes with the same number of samples. On the CPU it is small. On a GPU one sample's activation takes megabytes, because torch's
allocator takes memory from the device in segments of 2 and of 20 MiB, and libraries have workspaces: limits and failures would be lost in them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from elastic_mbs import count_tokens
from elastic_mbs.cli.demo.gpt import GPT, GPTConfig

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
        width: bytes of one activation per row, over 8.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Linear(8, width)
        self.last = nn.Linear(width, 4)

    def forward(self, x: Tensor) -> Tensor:
        """(samples, rows, 8) → (samples, 4)."""
        scores: Tensor = self.last(torch.tanh(torch.sin(torch.tanh(self.first(x))))).mean(1)
        return scores


def wide(*, big: bool = False) -> Subject:
    """Two small layers and large activations between them: the quick case."""
    rows = 256 if big else 1
    model = Wide(8192).double()

    def batch(step: int) -> tuple[Tensor, Tensor]:
        stream = _stream(step)
        return torch.randn(SAMPLES, rows, 8, generator=stream, dtype=torch.float64), torch.randint(0, 4, (SAMPLES,), generator=stream)

    def loss_fn(piece: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(model(piece[0]), piece[1])

    return Subject(model, loss_fn, batch, name="wide")


def adam(*, big: bool = False) -> Subject:
    """The opposite: more weights than activations, under AdamW, whose state is twice the weights and whose step takes as much again."""
    width = 2048 if big else 192
    layers = [layer for _ in range(6) for layer in (nn.Linear(width, width), nn.Tanh())]
    model = nn.Sequential(*layers, nn.Linear(width, 8)).double()

    def batch(step: int) -> tuple[Tensor, Tensor]:
        stream = _stream(step)
        return torch.randn(SAMPLES, width, generator=stream, dtype=torch.float64), torch.randint(0, 8, (SAMPLES,), generator=stream)

    def loss_fn(piece: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(model(piece[0]), piece[1])

    return Subject(model, loss_fn, batch, lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, foreach=True), name="adam")


def mlp(*, big: bool = False) -> Subject:
    """Linear layers on long rows: the plain case."""
    rows, width = (1024, 2048) if big else (32, 512)
    model = nn.Sequential(nn.Linear(64, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 10)).double()

    def batch(step: int) -> tuple[Tensor, Tensor]:
        stream = _stream(step)
        return torch.randn(SAMPLES, rows, 64, generator=stream, dtype=torch.float64), torch.randint(0, 10, (SAMPLES, rows), generator=stream)

    def loss_fn(piece: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(model(piece[0]).flatten(0, 1), piece[1].flatten())

    return Subject(model, loss_fn, batch, _adamw, name="mlp")


def cnn(*, big: bool = False) -> Subject:
    """Convolutions with BatchNorm and dropout: gradients, buffers and masks depend on how the batch is split.

    The first mask is drawn and the first buffers have moved when the largest activations are yet to come: what fails there has to be undone.
    """
    channels, side = (32, 32) if big else (16, 24)
    layers: list[nn.Module] = [nn.Upsample(scale_factor=8)] if big else []  # images of that size would take longer to draw than to train on
    for width in (3, channels, channels):
        layers += [nn.Conv2d(width, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels), nn.ReLU()]
        layers += [nn.Dropout(0.1)] if width == 3 else []
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.1), nn.Linear(channels, 10)).double()

    def batch(step: int) -> tuple[Tensor, Tensor]:
        stream = _stream(step)
        return torch.randn(SAMPLES, 3, side, side, generator=stream, dtype=torch.float64), torch.randint(0, 10, (SAMPLES,), generator=stream)

    def loss_fn(piece: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(model(piece[0]), piece[1])

    return Subject(model, loss_fn, batch, name="cnn")


class Heads(nn.Module):
    """A trunk with a mask and two branches, whose backwards are ready at the same time: where one fails, the other waits in autograd's queue.

    Args:
        width: of the trunk and of each branch.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(16, width), nn.Tanh(), nn.Dropout(0.1))
        self.words = nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 10))
        self.rows = nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 1))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """(samples, rows, 16) → scores of each row, (samples, rows, 10), and a figure per sample."""
        shared = self.trunk(x)
        return self.words(shared), self.rows(shared).mean((1, 2))


def heads(*, big: bool = False) -> Subject:
    """Two losses with counts of their own, over two branches: words are counted in one and samples in the other."""
    rows, width = (512, 1024) if big else (16, 128)
    model = Heads(width).double()

    def batch(step: int) -> dict[str, Tensor]:
        stream = _stream(step)
        labels = torch.randint(0, 10, (SAMPLES, rows), generator=stream)
        labels[torch.arange(rows) >= torch.randint(1, rows + 1, (SAMPLES, 1), generator=stream)] = _IGNORED
        x = torch.randn(SAMPLES, rows, 16, generator=stream, dtype=torch.float64)
        return {"x": x, "labels": labels, "figures": torch.randn(SAMPLES, generator=stream, dtype=torch.float64)}

    def loss_fn(piece: dict[str, Tensor]) -> dict[str, Tensor]:
        words, figures = model(piece["x"])
        return {
            "words": F.cross_entropy(words.flatten(0, 1), piece["labels"].flatten(), ignore_index=_IGNORED),
            "figures": F.mse_loss(figures, piece["figures"]),
        }

    return Subject(model, loss_fn, batch, _adamw, {"count": {"words": count_tokens("labels"), "figures": None}}, "heads")


def _language(name: str, length: Callable[[int], int], *, big: bool) -> Subject:
    width, heads, longer = (512, 4, 4) if big else (32, 2, 1)
    model = GPT(GPTConfig(vocabulary=64, context=256 * longer, width=width, heads=heads, layers=2)).double()

    def batch(step: int) -> dict[str, Tensor]:
        stream, tokens = _stream(step), longer * length(step)
        rows = torch.randint(0, 64, (SAMPLES, tokens), generator=stream)
        labels = rows.roll(-1, 1)
        ends = torch.randint(1, tokens, (SAMPLES, 1), generator=stream)  # samples of different length, padded
        labels[torch.arange(tokens) >= ends] = _IGNORED
        return {"tokens": rows, "labels": labels}

    def loss_fn(piece: dict[str, Tensor]) -> Tensor:
        return F.cross_entropy(model(piece["tokens"]).flatten(0, 1), piece["labels"].flatten(), ignore_index=_IGNORED)

    return Subject(model, loss_fn, batch, _adamw, {"count": count_tokens("labels")}, name)


def gpt(*, big: bool = False) -> Subject:
    """The demo's GPT, made small, counted in tokens."""
    return _language("gpt", lambda _: 64 if not big else 128, big=big)


def gpt_bursts(*, big: bool = False) -> Subject:
    """The same, with bursts of inputs four times as long."""
    return _language("gpt_bursts", lambda step: 256 if step % 10 in (6, 7) else 64, big=big)


_ALL: tuple[Callable[..., Any], ...] = (wide, mlp, cnn, heads, gpt, gpt_bursts, adam)

BUILTIN: dict[str, Callable[[], Any]] = {make.__name__: make for make in _ALL}
"""Models by name."""

ON_GPU: dict[str, Callable[[], Any]] = {make.__name__: partial(make, big=True) for make in _ALL}
"""The same in the size of a GPU."""
