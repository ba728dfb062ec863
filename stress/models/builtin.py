"""Models in float64 whose activations take far more memory than their parameters.

On a GPU they are `big`: a sample's activation takes megabytes, or failures would be lost in the
allocator's segments of 20 MiB and in workspaces. None has more work than a CPU does in seconds,
because a simulated GPU computes on one.
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

from .layers import Made
from .subject import Subject

SAMPLES = 32  # in a batch
_IGNORED = -100
_ADAMW: Callable[[Iterable[Tensor]], torch.optim.Optimizer] = partial(torch.optim.AdamW, lr=1e-3)
_MOMENTUM: Callable[[Iterable[Tensor]], torch.optim.Optimizer] = partial(
    torch.optim.SGD, lr=0.05, momentum=0.9
)


def _subject(
    name: str,
    model: nn.Module,
    draw: Callable[[torch.Generator, int], Any],
    loss: Callable[[nn.Module, Any], Any],
    optimizer: Callable[[Iterable[Tensor]], torch.optim.Optimizer] = _ADAMW,
    count: Any = None,
) -> Subject:
    """Return a subject whose batches come from their number.

    They do not depend on the order in which they are asked for: a resumed run sees the same ones.
    """
    model.double()

    def batch(step: int) -> Any:
        return draw(torch.Generator().manual_seed(1_000_003 * (step + 1)), step)

    return Subject(
        model,
        lambda piece: loss(model, piece),
        batch,
        optimizer,
        {} if count is None else {"count": count},
        name,
    )


def _labelled(
    classes: int, *shape: int, rows: int = 0
) -> Callable[[torch.Generator, int], tuple[Tensor, Tensor]]:
    """Return a function that draws inputs of a shape, with labels.

    There is one label for each sample, or one for each of its rows.
    """

    def draw(stream: torch.Generator, step: int) -> tuple[Tensor, Tensor]:
        x = torch.randn(SAMPLES, *shape, generator=stream, dtype=torch.float64)
        return x, torch.randint(
            0, classes, (SAMPLES, rows) if rows else (SAMPLES,), generator=stream
        )

    return draw


def _cross_entropy(model: nn.Module, piece: tuple[Tensor, Tensor]) -> Tensor:
    scores, labels = model(piece[0]), piece[1]
    return (
        F.cross_entropy(scores.flatten(0, 1), labels.flatten())
        if labels.dim() > 1
        else F.cross_entropy(scores, labels)
    )


def wide(*, big: bool = False) -> Subject:
    """Return the model of most scenarios: few weights and large activations.

    Memory then depends on the micro-batch, and there is little work.
    """

    def run(m: Any, x: Tensor) -> Any:
        return m.last(torch.tanh(torch.sin(torch.tanh(m.first(x))))).mean(1)

    model = Made(run, first=nn.Linear(8, 8192), last=nn.Linear(8192, 4))
    return _subject("wide", model, _labelled(4, 128 if big else 1, 8), _cross_entropy, _MOMENTUM)


def adam(*, big: bool = False) -> Subject:
    """Return a model with more weights than activations, under AdamW.

    Its state is twice the weights, and its step takes as much again.
    """
    width = 2048 if big else 192
    layers = [layer for _ in range(6) for layer in (nn.Linear(width, width), nn.Tanh())]
    optimizer = partial(torch.optim.AdamW, lr=1e-3, foreach=True)
    return _subject(
        "adam",
        nn.Sequential(*layers, nn.Linear(width, 8)),
        _labelled(8, width),
        _cross_entropy,
        optimizer,
    )


def mlp(*, big: bool = False) -> Subject:
    """Return linear layers on long rows: the plain case."""
    rows, width = (1024, 256) if big else (32, 512)
    model = nn.Sequential(
        nn.Linear(64, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 10)
    )
    return _subject("mlp", model, _labelled(10, rows, 64, rows=rows), _cross_entropy)


def cnn(*, big: bool = False) -> Subject:
    """Return convolutions with BatchNorm and dropout.

    The first mask and buffers have changed when the largest activations are yet to come.
    """
    channels = 16
    side = 32 if big else 24
    # Images of that size would take longer to draw than to train on.
    layers: list[nn.Module] = [nn.Upsample(scale_factor=2)] if big else []
    for width in (3, channels, channels):
        layers += [
            nn.Conv2d(width, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU(),
        ]
        layers += [nn.Dropout(0.1)] if width == 3 else []
    model = nn.Sequential(
        *layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.1), nn.Linear(channels, 10)
    )
    return _subject("cnn", model, _labelled(10, 3, side, side), _cross_entropy, _MOMENTUM)


def heads(*, big: bool = False) -> Subject:
    """Return two losses with counts of their own, over branches whose backwards are ready together.

    When one fails, the other waits in autograd's queue.
    """
    rows, width = (1024, 256) if big else (16, 128)

    def run(m: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        shared = m.trunk(x)
        return m.words(shared), m.rows(shared).mean((1, 2))

    trunk = nn.Sequential(nn.Linear(16, width), nn.Tanh(), nn.Dropout(0.1))
    branches = {
        name: nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, out))
        for name, out in (("words", 10), ("rows", 1))
    }

    def draw(stream: torch.Generator, step: int) -> dict[str, Tensor]:
        labels = torch.randint(0, 10, (SAMPLES, rows), generator=stream)
        labels[torch.arange(rows) >= torch.randint(1, rows + 1, (SAMPLES, 1), generator=stream)] = (
            _IGNORED
        )
        x = torch.randn(SAMPLES, rows, 16, generator=stream, dtype=torch.float64)
        return {
            "x": x,
            "labels": labels,
            "figures": torch.randn(SAMPLES, generator=stream, dtype=torch.float64),
        }

    def loss(model: nn.Module, piece: dict[str, Tensor]) -> dict[str, Tensor]:
        words, figures = model(piece["x"])
        said = F.cross_entropy(
            words.flatten(0, 1), piece["labels"].flatten(), ignore_index=_IGNORED
        )
        return {"words": said, "figures": F.mse_loss(figures, piece["figures"])}

    return _subject(
        "heads",
        Made(run, trunk=trunk, **branches),
        draw,
        loss,
        count={"words": count_tokens("labels"), "figures": None},
    )


def gpt(
    *, big: bool = False, name: str = "gpt", length: Callable[[int], int] | None = None
) -> Subject:
    """Return the demo's GPT, made small, counted in tokens."""
    width, heads = (128, 4) if big else (32, 2)

    def draw(stream: torch.Generator, step: int) -> dict[str, Tensor]:
        tokens = length(step) if length is not None else 256 if big else 64
        rows = torch.randint(0, 64, (SAMPLES, tokens), generator=stream)
        labels = rows.roll(-1, 1)
        # Samples differ in length, and are padded.
        ends = torch.randint(1, tokens, (SAMPLES, 1), generator=stream)
        labels[torch.arange(tokens) >= ends] = _IGNORED
        return {"tokens": rows, "labels": labels}

    def loss(model: nn.Module, piece: dict[str, Tensor]) -> Tensor:
        return F.cross_entropy(
            model(piece["tokens"]).flatten(0, 1), piece["labels"].flatten(), ignore_index=_IGNORED
        )

    model = GPT(GPTConfig(vocabulary=64, context=256, width=width, heads=heads, layers=2))
    return _subject(name, model, draw, loss, count=count_tokens("labels"))


def gpt_bursts(*, big: bool = False) -> Subject:
    """Return the same GPT with bursts of inputs four times as long."""
    return gpt(big=big, name="gpt_bursts", length=lambda step: 256 if step % 10 in (6, 7) else 64)


BUILTIN: dict[str, Callable[..., Subject]] = {
    make.__name__: make for make in (wide, mlp, cnn, heads, gpt, gpt_bursts, adam)
}
