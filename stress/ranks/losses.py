"""The model, the data and the losses of a random job. The reference is one process."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn


class Net(nn.Module):
    """A model with a tied weight and a head that only some steps use."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        extra = {"dropout": nn.Dropout(0.3), "bn": nn.BatchNorm1d(8)}.get(kind, nn.Identity())
        self.body = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), extra, nn.Linear(8, 8), nn.Tanh())
        self.tied = nn.Linear(8, 8)
        inner = self.body[3]
        assert isinstance(inner, nn.Linear)
        self.tied.weight = inner.weight
        self.heads = nn.ModuleList([nn.Linear(8, 2), nn.Linear(8, 2)])

    def forward(self, x: Tensor, both: bool) -> Tensor:
        hidden = self.tied(self.body(x))
        out: Tensor = self.heads[0](hidden)
        return out + self.heads[1](hidden) if both else out


def data(rank: int, step: int, samples: int | None = None) -> Tensor:
    """Return the batch of one rank: ranks have different ones, of different lengths."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    length = 6 + 3 * rank if samples is None else samples
    return torch.randn(length, 4, dtype=torch.float64, generator=generator)


def counted(x: Tensor) -> Tensor:
    """Return for each sample how many terms it has in a mean over tokens: one or none."""
    return (x[:, 0] > -0.3).long()


class Totals:
    """The counts of all ranks' samples: one loss is a sum over terms / their total."""

    def __init__(self, mode: str, batches: list[Tensor | None]) -> None:
        there = [batch for batch in batches if batch is not None]
        samples = float(sum(len(batch) for batch in there))
        terms = float(sum(int(counted(batch).sum()) for batch in there))
        self.samples = {"mean": samples, "named": samples, "sum": 10.0}.get(mode, math.inf)
        self.terms = terms if mode in ("tokens", "named") and terms else math.inf

    def loss(self, out: Tensor, x: Tensor) -> Tensor:
        each = out.pow(2).mean(1)
        return each.sum() / self.samples + (each * counted(x)).sum() / self.terms


def loss_of(mode: str, out: Tensor, x: Tensor) -> Tensor | dict[str, Tensor]:
    """Return what the user's function returns: a mean, a sum, or two losses."""
    each, valid = out.pow(2).mean(1), counted(x)
    tokens = (each * valid).sum() / valid.sum().clamp(min=1)
    if mode == "named":
        return {"all": each.mean(), "some": tokens}
    return {"mean": each.mean(), "tokens": tokens, "sum": each.sum() / 10}[mode]


# Options of `ElasticMBS` for each mode.
OPTIONS: dict[str, dict[str, Any]] = {
    "mean": {},
    "tokens": {"count": counted},
    "sum": {"reduction": "sum"},
    "named": {"count": {"all": None, "some": counted}},
}
