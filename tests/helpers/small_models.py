"""Small models in a user's file, as `--model path.py:factory` takes them."""

import torch
from torch import Tensor, nn
from torch.nn import functional

from elastic_mbs import count_tokens
from stress.models.subject import Subject

SAMPLES, ROWS = 16, 32


class Branched(nn.Module):
    """A model with state that a rollback can miss: two branches, a mask, own statistics."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first, self.mask = nn.Linear(8, 256), nn.Dropout(0.2)
        self.a, self.b = (
            nn.Sequential(nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 2)) for _ in range(2)
        )
        self.register_buffer("mean", torch.zeros(256))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.mask(torch.tanh(self.first(x)))
        self.mean = 0.9 * self.mean + 0.1 * hidden.detach().mean((0, 1))
        hidden = hidden - self.mean
        scores: Tensor = self.a(hidden) + self.b(hidden)
        return scores


class Flat(nn.Module):
    """A model that takes no more memory for a batch than for a sample."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1 << 14, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return (self.weight.sin().mean() * x).mean()


def branched() -> Subject:
    """Return a subject with masks and statistics."""
    return _trained(Branched().double())


def plain() -> Subject:
    """Return a subject with independent samples of unequal counts."""
    return _trained(
        nn.Sequential(
            nn.Linear(8, 256), nn.Tanh(), nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 2)
        ).double()
    )


def tiny() -> Subject:
    """Return a subject so small that thousands of steps take seconds."""
    model = nn.Sequential(
        nn.Linear(4, 32), nn.Tanh(), nn.BatchNorm1d(32), nn.Linear(32, 2)
    ).double()
    batch = torch.randn(16, 4, dtype=torch.float64), torch.randint(0, 2, (16,))
    return Subject(model, lambda b: functional.cross_entropy(model(b[0]), b[1]), [batch])


def flat() -> Subject:
    """Return a subject on which the stress tool cannot show anything."""
    model = Flat()
    return Subject(model, model, [torch.ones(SAMPLES)], name="flat")


def _trained(model: nn.Module) -> Subject:
    data = [
        (torch.randn(SAMPLES, ROWS, 8, dtype=torch.float64), torch.randint(0, 2, (SAMPLES, ROWS)))
        for _ in range(3)
    ]
    for _, labels in data:
        labels[3:, 1:] = -100

    def loss_fn(batch: tuple[Tensor, Tensor]) -> Tensor:
        return functional.cross_entropy(model(batch[0]).transpose(1, 2), batch[1])

    return Subject(
        model,
        loss_fn,
        data,
        lambda parameters: torch.optim.AdamW(parameters),
        {"count": count_tokens(1)},
        "small",
    )
