"""Workloads of the benchmarks, with the accumulation loop that a person would write by hand."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from elastic_mbs import count_tokens
from elastic_mbs.cli.demo.gpt import GPT, GPTConfig, token_loss

PIECES = 6
"""Micro-batches in a step."""

_IGNORED = -100


@dataclass(frozen=True)
class Workload:
    """A model, its loss and one batch on the host.

    Attributes:
        name: name in tables.
        model: on `device`.
        loss_fn: piece → loss, the mean over the piece's samples (or over its tokens, where `count`
            is given).
        batch: a tuple or dict of tensors, pinned where the device is a GPU, as a data loader would
            give it.
        size: samples per piece.
        device: where pieces are moved.
        count: as for `ElasticMBS`.
    """

    name: str
    model: nn.Module
    loss_fn: Callable[[Any], Tensor]
    batch: Any
    size: int
    device: torch.device
    count: Callable[[Any], Any] | None = None

    @property
    def samples(self) -> int:
        """Samples of the batch."""
        return len(
            next(iter(self.batch.values())) if isinstance(self.batch, Mapping) else self.batch[0]
        )

    def piece(self, start: int, stop: int) -> Any:
        """Return samples `start` to `stop`, on the device."""
        if isinstance(self.batch, Mapping):
            return {key: self._move(tensor[start:stop]) for key, tensor in self.batch.items()}
        return tuple(self._move(tensor[start:stop]) for tensor in self.batch)

    def _move(self, tensor: Tensor) -> Tensor:
        return tensor if tensor.device == self.device else tensor.to(self.device, non_blocking=True)

    def by_hand(self) -> list[Tensor]:
        """Run the loop that elastic_mbs stands in for, and return the pieces' losses.

        Each piece's loss weighs its share of the batch's loss terms.
        """
        samples = self.samples
        counts = None if self.count is None else self.count(self.batch).tolist()
        total = samples if counts is None else sum(counts)
        losses = []
        for start in range(0, samples, self.size):
            stop = min(start + self.size, samples)
            terms = stop - start if counts is None else sum(counts[start:stop])
            loss = self.loss_fn(self.piece(start, stop)) * (terms / total)
            losses.append(loss.detach())
            loss.backward()
        return losses


class Residuals(nn.Module):
    """Many small layers one after the other.

    They show the cost of a step per module and per leaf.

    Args:
        layers: each has a Linear with a bias and an activation of its own: two modules and two
            leaves.
        width: features.
    """

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.linears = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.activations = nn.ModuleList(nn.ReLU() for _ in range(layers))
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Map (samples, width) to (samples, 10)."""
        for linear, activation in zip(self.linears, self.activations, strict=True):
            x = x + 0.01 * activation(linear(x))
        out: Tensor = self.head(x)
        return out


def conv_net(channels: int, blocks: int) -> nn.Module:
    """Return convolutions with BatchNorm, as in an image classifier."""
    layers: list[nn.Module] = [
        nn.Conv2d(3, channels, 3, padding=1, bias=False),
        nn.BatchNorm2d(channels),
        nn.ReLU(),
    ]
    for _ in range(blocks):
        layers += [
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU(),
        ]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 10))


def classifier(
    name: str, model: nn.Module, inputs: Tensor, size: int, device: torch.device
) -> Workload:
    """Return a workload that trains `model` to tell ten classes apart by cross-entropy."""
    model = model.to(device)

    def loss_fn(piece: Any) -> Tensor:
        return F.cross_entropy(model(piece[0]), piece[1])

    return Workload(
        name,
        model,
        loss_fn,
        (pinned(inputs, device), pinned(torch.arange(len(inputs)) % 10, device)),
        size,
        device,
    )


def pinned(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a tensor as a data loader gives it for a device: pinned for a GPU."""
    return tensor.pin_memory() if device.type == "cuda" else tensor


def make_mlp(size: int, device: torch.device) -> Workload:
    """Return four wide layers."""
    wide = 4096 if device.type == "cuda" else 512
    model = nn.Sequential(
        nn.Linear(256, wide),
        nn.ReLU(),
        nn.Linear(wide, wide),
        nn.ReLU(),
        nn.Linear(wide, wide),
        nn.ReLU(),
        nn.Linear(wide, 10),
    )
    return classifier("mlp", model, torch.randn(PIECES * size, 256), size, device)


def make_cnn(size: int, device: torch.device) -> Workload:
    """Return eight convolutions with BatchNorm on 32 × 32 images."""
    return classifier(
        "cnn",
        conv_net(128 if device.type == "cuda" else 32, 7),
        torch.randn(PIECES * size, 3, 32, 32),
        size,
        device,
    )


def make_gpt(size: int, device: torch.device) -> Workload:
    """Return the demo's GPT on sequences of 128 tokens.

    It is counted in tokens, the last of which are padding.
    """
    width, layers = (512, 8) if device.type == "cuda" else (128, 4)
    model = GPT(GPTConfig(context=128, width=width, heads=4, layers=layers)).to(device)
    samples = PIECES * size
    length = 128
    tokens = torch.randint(0, 256, (samples, length))
    labels = tokens.roll(-1, 1)
    for row in range(samples):
        labels[row, length - 1 - row % 32 :] = _IGNORED
    batch = {"tokens": pinned(tokens, device), "labels": pinned(labels, device)}
    return Workload(
        "gpt",
        model,
        lambda piece: token_loss(piece, model),
        batch,
        size,
        device,
        count_tokens("labels"),
    )


def make_deep(size: int, device: torch.device) -> Workload:
    """Return a thousand modules and a thousand leaves, as in a large model: little work in each."""
    return classifier("deep", Residuals(500, 64), torch.randn(PIECES * size, 64), size, device)


def make_small(size: int, device: torch.device) -> Workload:
    """Return 26 leaves with little work in each, in up to 16 pieces.

    The cost of a call and of a piece is measured on it.
    """
    layers: list[nn.Module] = [layer for _ in range(12) for layer in (nn.Linear(16, 16), nn.ReLU())]
    return classifier(
        "small", nn.Sequential(*layers, nn.Linear(16, 10)), torch.randn(16 * size, 16), size, device
    )


def make_tiny(size: int, device: torch.device) -> Workload:
    """Return a workload with next to no work: the loop remains."""
    return classifier("tiny", nn.Linear(8, 10), torch.randn(PIECES * size, 8), size, device)


def make_cold(size: int, device: torch.device) -> Workload:
    """Return `tiny` with a sweep through more memory than the processor's caches hold.

    Each forward sweeps, as real work does.
    """
    tiny = make_tiny(size, device)
    memory = torch.zeros(16 * 2**20)

    def loss_fn(piece: Any) -> Tensor:
        memory.add_(1.0)
        return tiny.loss_fn(piece)

    return replace(tiny, name="cold", loss_fn=loss_fn)


def make_norms(size: int, device: torch.device) -> Workload:
    """Return two hundred BatchNorms with six hundred buffers."""
    layers: list[nn.Module] = [
        layer for _ in range(200) for layer in (nn.Linear(16, 16), nn.BatchNorm1d(16))
    ]
    return classifier(
        "norms",
        nn.Sequential(*layers, nn.Linear(16, 10)),
        torch.randn(PIECES * size, 16),
        size,
        device,
    )


MAKERS: Mapping[str, Callable[[int, torch.device], Workload]] = {
    "mlp": make_mlp,
    "cnn": make_cnn,
    "gpt": make_gpt,
    "deep": make_deep,
    "small": make_small,
    "tiny": make_tiny,
    "cold": make_cold,
    "norms": make_norms,
}
"""Name → maker of a workload: (samples per piece, device) → workload."""


def seconds_by_hand(workload: Workload, steps: int = 3) -> float:
    """Return the duration of the fastest of a few steps of the loop by hand."""
    best = float("inf")
    for _ in range(steps + 1):
        workload.model.zero_grad()
        wait(workload.device)
        began = time.perf_counter()
        workload.by_hand()
        wait(workload.device)
        best = min(best, time.perf_counter() - began)
    return best


def calibrated(name: str, device: torch.device, seconds: float, start: int = 4) -> Workload:
    """Return the workload with pieces so large that a step takes at least `seconds`.

    Args:
        name: one of `MAKERS`.
        device: where it is trained.
        seconds: of a step of the loop by hand.
        start: samples per piece to try first.
    """
    workload = MAKERS[name](start, device)
    while (took := seconds_by_hand(workload)) < seconds:
        # A larger piece is faster per sample, so the proportion falls short; at most eight times as
        # much, because small sizes say little.
        factor = min(8.0, max(1.25, 1.1 * seconds / took))
        workload = MAKERS[name](int(workload.size * factor) + 1, device)
    return workload


def with_pieces(workload: Workload, pieces: int) -> Workload:
    """Return the same model on a batch of another number of pieces of the same size.

    There are at most as many pieces as before.
    """
    samples = pieces * workload.size
    if isinstance(workload.batch, Mapping):
        return replace(
            workload, batch={key: tensor[:samples] for key, tensor in workload.batch.items()}
        )
    return replace(workload, batch=tuple(tensor[:samples] for tensor in workload.batch))


def wait(device: torch.device) -> None:
    """Wait until the device has done its work."""
    if device.type == "cuda":  # cuda-only
        torch.cuda.synchronize(device)
