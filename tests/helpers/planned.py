"""Models of eight kinds, each with a loss and a batch of any length, for plans and their peaks."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from elastic_mbs import MemoryBudget
from elastic_mbs.cli.demo.gpt import GPT, GPTConfig

Subject = tuple[nn.Module, Callable[[Any], Tensor], tuple[Tensor, Tensor]]


def mlp(samples: int) -> Subject:
    hidden = [layer for _ in range(4) for layer in (nn.Linear(128, 128), nn.Tanh())]
    model = nn.Sequential(nn.Linear(64, 128), nn.Tanh(), *hidden, nn.Linear(128, 10))
    rows = torch.randn(samples, 32, 64), torch.randint(0, 10, (samples, 32))
    return model, lambda b: F.cross_entropy(model(b[0]).flatten(0, 1), b[1].flatten()), rows


def cnn(samples: int) -> Subject:
    blocks = [
        layer
        for width in (3, 16, 16)
        for layer in (nn.Conv2d(width, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU())
    ]
    model = nn.Sequential(
        *blocks, nn.Dropout(0.1), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10)
    )
    return (
        model,
        lambda b: F.cross_entropy(model(b[0]), b[1]),
        (torch.randn(samples, 3, 16, 16), torch.randint(0, 10, (samples,))),
    )


def gpt(samples: int, *, checkpointed: bool = False) -> Subject:
    model = GPT(GPTConfig(vocabulary=64, context=32, width=64, heads=2, layers=2))
    for block in model.blocks if checkpointed else ():
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    rows = torch.randint(0, 64, (2, samples, 32))
    return (
        model,
        lambda b: F.cross_entropy(model(b[0]).flatten(0, 1), b[1].flatten()),
        (rows[0], rows[1]),
    )


def checkpointed_gpt(samples: int) -> Subject:
    return gpt(samples, checkpointed=True)


def recurrent(
    samples: int, rnn: nn.Module, length: int, dtype: torch.dtype = torch.float32
) -> Subject:
    model = nn.ModuleDict({"rnn": rnn, "out": nn.Linear(64, 4)}).to(dtype)
    batch = (
        torch.randn(samples, length, 32, dtype=dtype),
        torch.randn(samples, length, 4, dtype=dtype),
    )

    def loss_fn(b: tuple[Tensor, Tensor]) -> Tensor:
        return F.mse_loss(model["out"](model["rnn"](b[0])[0]), b[1])

    return model, loss_fn, batch


def lstm(samples: int) -> Subject:
    # oneDNN has no LSTM for float64, so torch runs plain operations
    return recurrent(samples, nn.LSTM(32, 64, 2, batch_first=True), 6, torch.float64)


def gru(samples: int) -> Subject:
    return recurrent(samples, nn.GRU(32, 64, 2, batch_first=True), 5)


def autoencoder(samples: int) -> Subject:
    model = nn.Sequential(nn.Linear(256, 32), nn.Tanh(), nn.Linear(32, 256))
    return (
        model,
        lambda b: F.mse_loss(model(b[0]), b[1]),
        (torch.randn(samples, 32, 256), torch.randn(samples, 32, 256)),
    )


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down, self.norm, self.deep = (
            nn.Conv2d(3, 8, 3, padding=1),
            nn.GroupNorm(2, 8),
            nn.Conv2d(8, 16, 3, padding=1),
        )
        self.up, self.out = nn.Conv2d(24, 8, 3, padding=1), nn.Conv2d(8, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        wide = F.relu(self.norm(self.down(x)))
        deep = F.interpolate(
            F.relu(self.deep(F.max_pool2d(wide, 2))), scale_factor=2, mode="bilinear"
        )
        out: Tensor = self.out(F.relu(self.up(torch.cat([wide, deep], 1))))
        return out


def unet(samples: int) -> Subject:
    model = UNet()
    return (
        model,
        lambda b: F.binary_cross_entropy_with_logits(model(b[0]), b[1]),
        (torch.randn(samples, 3, 16, 16), torch.rand(samples, 1, 16, 16)),
    )


def peak_of(budget: MemoryBudget, run: Callable[[], object]) -> int:
    """Return the bytes at the highest point of a run."""
    budget.reset_peak()
    run()
    return budget.peak


SUBJECTS = (mlp, cnn, gpt, checkpointed_gpt, lstm, gru, unet, autoencoder)
