"""Cost of a call beyond the loop by hand, as batches and models grow.

It is in microseconds a call and a piece, with little work in either.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from benchmarks.bench.models import CPU
from benchmarks.bench.report import table
from benchmarks.breakdown import per_call_and_piece
from benchmarks.workloads import classifier

PIECES = 8


@dataclass(frozen=True)
class Scale:
    """A size of batch and model.

    Attributes:
        samples: of the batch.
        leaves: parameters of the model, of ten numbers each.
        per_call: microseconds.
        per_piece: microseconds more for each of eight pieces.
    """

    samples: int
    leaves: int
    per_call: float
    per_piece: float


class Leaves(nn.Module):
    """Many parameters, each with an operation and a gradient of its own."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.leaves = nn.ParameterList(torch.zeros(10) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        """Map (samples, 10) to the same shape."""
        for leaf in self.leaves:
            x = x + leaf
        return x


def rows(quick: bool, rounds: int) -> list[Scale]:
    """Return the figures of batches from 10² to 10⁵ samples, and of models from 10 to 10⁴ leaves.

    The batches are for ten leaves, the models for a hundred samples.
    """
    grid = [
        (10**2, 10),
        (10**3, 10),
        (10**4, 10),
        (10**5, 10),
        (10**2, 10**2),
        (10**2, 10**3),
        (10**2, 10**4),
    ]
    if quick:
        return [_measure(samples, leaves, 5, 0.1) for samples, leaves in grid[:1]]
    return [_measure(samples, leaves, 200 * rounds, 4.0 * rounds) for samples, leaves in grid]


def _measure(samples: int, leaves: int, calls: int, seconds: float) -> Scale:
    workload = classifier(
        "leaves", Leaves(leaves), torch.randn(samples, 10), -(-samples // PIECES), CPU
    )
    loop = per_call_and_piece(workload, calls, seconds)
    return Scale(samples, leaves, loop.per_call, loop.per_piece)


def text(found: Sequence[Scale]) -> str:
    """Return the figures as a table."""
    return table(
        found,
        {
            "samples": lambda row: f"{row.samples:,}",
            "leaves": lambda row: f"{row.leaves:,}",
            "µs a call": lambda row: f"{row.per_call:.0f}",
            "µs a piece": lambda row: f"{row.per_piece:.0f}",
        },
    )
