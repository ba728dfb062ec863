"""Models of the benchmarks.

They are so small that steps of 50 ms show the cost of a split, as large models do on large devices.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.workloads import Residuals, Workload, classifier, conv_net
from elastic_mbs import count_tokens
from elastic_mbs.cli.demo.gpt import GPT, GPTConfig, token_loss

CPU = torch.device("cpu")


class LastState(nn.Module):
    """A recurrent net, classified by its last output.

    Args:
        rnn: an `nn.LSTM`, or its like.
    """

    def __init__(self, rnn: nn.RNNBase) -> None:
        super().__init__()
        self.rnn = rnn
        self.head = nn.Linear(rnn.hidden_size, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Map (samples, length, features) to (samples, 10)."""
        out: Tensor = self.head(self.rnn(x)[0][:, -1])
        return out


class Residual(nn.Module):
    """A convolution with GroupNorm around which its input goes."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(width, width, 3, padding=1)
        self.norm = nn.GroupNorm(4, width)

    def forward(self, x: Tensor) -> Tensor:
        """Map channels to as many channels."""
        return x + torch.relu(self.norm(self.conv(x)))


class Encoder(nn.Module):
    """A transformer encoder, classified by the mean of its outputs."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(64, 4, 256, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        self.head = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Map (samples, length, 64) to (samples, 10)."""
        out: Tensor = self.head(self.encoder(x).mean(1))
        return out


def conv(samples: int) -> Workload:
    """Return six convolutions with BatchNorm on 16 × 16 images."""
    return classifier("conv net", conv_net(16, 5), torch.randn(samples, 3, 16, 16), samples, CPU)


def gpt(samples: int) -> Workload:
    """Return two blocks on 64 tokens, counted in tokens, the last of which are padding."""
    model = GPT(GPTConfig(context=64, width=64, heads=4, layers=2))
    tokens = torch.randint(0, 256, (samples, 64))
    labels = tokens.roll(-1, 1).masked_fill(
        torch.arange(64) >= 63 - torch.arange(samples)[:, None] % 16, -100
    )
    batch = {"tokens": tokens, "labels": labels}
    return Workload(
        "GPT",
        model,
        lambda piece: token_loss(piece, model),
        batch,
        samples,
        CPU,
        count_tokens("labels"),
    )


def lstm(samples: int) -> Workload:
    """Return two layers over 32 steps."""
    return classifier(
        "LSTM",
        LastState(nn.LSTM(32, 64, 2, batch_first=True)),
        torch.randn(samples, 32, 32),
        samples,
        CPU,
    )


def gru(samples: int) -> Workload:
    """Return two layers over 16 steps, run as operations: on a CPU there is no kernel for it."""
    return classifier(
        "GRU",
        LastState(nn.GRU(32, 64, 2, batch_first=True)),
        torch.randn(samples, 16, 32),
        samples,
        CPU,
    )


def groups(samples: int) -> Workload:
    """Return residual convolutions that can be checkpointed: statistics are of one sample."""
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        *(Residual(16) for _ in range(6)),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(16, 10),
    )
    return classifier("conv net, GroupNorm", model, torch.randn(samples, 3, 16, 16), samples, CPU)


def encoder(samples: int) -> Workload:
    """Return four layers on 32 tokens."""
    return classifier("transformer encoder", Encoder(), torch.randn(samples, 32, 64), samples, CPU)


def mlp(samples: int) -> Workload:
    """Return thirty residual layers: 62 leaves, little work in each."""
    return classifier("deep MLP", Residuals(30, 128), torch.randn(samples, 128), samples, CPU)


def sleeper(samples: int, seconds: float) -> Workload:
    """Return a few layers whose loss sleeps.

    A batch in one piece takes `seconds`, and each piece costs 5 % of that besides its samples.
    """
    workload = classifier("sleeping", Residuals(4, 64), torch.randn(samples, 64), samples, CPU)

    def loss_fn(piece: Any) -> Tensor:
        time.sleep(seconds * (0.05 + 0.95 * len(piece[0]) / samples))
        return workload.loss_fn(piece)

    return replace(workload, loss_fn=loss_fn)


MODELS: Mapping[str, tuple[Callable[[int], Workload], int]] = {
    "conv": (conv, 120),
    "gpt": (gpt, 48),
    "lstm": (lstm, 360),
    "mlp": (mlp, 384),
}
"""Name → maker of a workload, and the samples of a batch.

A step in three pieces takes about 50 ms on one quiet core.
"""
