"""What the benchmarks train: small enough that steps of 50 ms show what a split costs, as large models do on large devices."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from elastic_mbs import count_tokens
from elastic_mbs.cli.demo.gpt import GPT, GPTConfig, token_loss
from tools.workloads import Residuals, Workload, classifier, conv_net

CPU = torch.device("cpu")


class LastState(nn.Module):
    """An LSTM, classified by its last output.

    Args:
        width: of the hidden state.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(32, width, 2, batch_first=True)
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        """(samples, length, 32) → (samples, 10)."""
        out: Tensor = self.head(self.lstm(x)[0][:, -1])
        return out


def conv(samples: int) -> Workload:
    """Six convolutions with BatchNorm on 16 × 16 images."""
    return classifier("conv net", conv_net(16, 5), torch.randn(samples, 3, 16, 16), samples, CPU)


def gpt(samples: int) -> Workload:
    """Two blocks on 64 tokens; counted in tokens, of which the last are padding."""
    model = GPT(GPTConfig(context=64, width=64, heads=4, layers=2))
    tokens = torch.randint(0, 256, (samples, 64))
    labels = tokens.roll(-1, 1).masked_fill(torch.arange(64) >= 63 - torch.arange(samples)[:, None] % 16, -100)
    batch = {"tokens": tokens, "labels": labels}
    return Workload("GPT", model, lambda piece: token_loss(piece, model), batch, samples, CPU, count_tokens("labels"))


def lstm(samples: int) -> Workload:
    """Two layers over 32 steps."""
    return classifier("LSTM", LastState(64), torch.randn(samples, 32, 32), samples, CPU)


def mlp(samples: int) -> Workload:
    """Thirty residual layers: 62 leaves, little work in each."""
    return classifier("deep MLP", Residuals(30, 128), torch.randn(samples, 128), samples, CPU)


def sleeper(samples: int, seconds: float) -> Workload:
    """A few layers whose loss sleeps: a batch in one piece takes `seconds`, and each piece costs 5 % of that besides its samples."""
    workload = classifier("sleeping", Residuals(4, 64), torch.randn(samples, 64), samples, CPU)

    def loss_fn(piece: Any) -> Tensor:
        time.sleep(seconds * (0.05 + 0.95 * len(piece[0]) / samples))
        return workload.loss_fn(piece)

    return replace(workload, loss_fn=loss_fn)


MODELS: Mapping[str, tuple[Callable[[int], Workload], int]] = {"conv": (conv, 120), "gpt": (gpt, 48), "lstm": (lstm, 360), "mlp": (mlp, 384)}
"""How a workload is made, and the samples of a batch of which a step in three pieces takes about 50 ms on one quiet core."""
