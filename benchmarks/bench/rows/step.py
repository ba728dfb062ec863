"""`mbs.optimizer_step` against `optimizer.step()`, on one process."""

from __future__ import annotations

import copy
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from benchmarks.bench.report import table
from benchmarks.bench_overhead import Estimate, median_of
from elastic_mbs import ElasticMBS

WIDTHS = (64, 512)
OPTIMIZERS: dict[str, tuple[Callable[..., torch.optim.Optimizer], dict[str, Any]]] = {
    "SGD": (torch.optim.SGD, {}),
    "AdamW, foreach": (torch.optim.AdamW, {"foreach": True}),
    "AdamW, fused": (torch.optim.AdamW, {"fused": True}),
}


@dataclass(frozen=True)
class Step:
    """A step of one optimizer.

    Attributes:
        optimizer: its name.
        parameters: how many numbers it steps.
        pairs: steps of each kind.
        plain: seconds of `optimizer.step()`, median.
        guarded: seconds of `mbs.optimizer_step`, median.
        ratio: guarded / plain - 1, of each pair.
        control: the same for a second plain step: the reading where nothing differs.
    """

    optimizer: str
    parameters: int
    pairs: int
    plain: float
    guarded: float
    ratio: Estimate
    control: Estimate


def rows(quick: bool, rounds: int) -> list[Step]:
    """Return the figures of all optimizers and sizes."""
    pairs = 10 if quick else 200 * rounds
    return [measure(name, width, pairs) for width in WIDTHS for name in OPTIMIZERS]


def measure(name: str, width: int, pairs: int) -> Step:
    """Return the figures of one optimizer; each kind of step has a model of its own."""
    kind, options = OPTIMIZERS[name]
    layers = [nn.Linear(width, width) for _ in range(3)]
    model = nn.Sequential(*layers)
    kinds = ("plain", "guarded", "control")
    optimizers = {
        each: kind(copy.deepcopy(model).parameters(), lr=1e-4, **options) for each in kinds
    }
    for optimizer in optimizers.values():
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = torch.randn_like(parameter)
    rng = random.Random(0)
    found: list[dict[str, float]] = []
    with ElasticMBS(model) as mbs:
        make: dict[str, Callable[[], object]] = {
            each: optimizer.step for each, optimizer in optimizers.items()
        }
        make["guarded"] = lambda: mbs.optimizer_step(optimizers["guarded"])
        for each in kinds:
            make[each]()  # makes the state
        for _ in range(pairs):
            took = dict[str, float]()
            for each in rng.sample(kinds, len(kinds)):
                began = time.perf_counter()
                make[each]()
                took[each] = time.perf_counter() - began
            found.append(took)
    return Step(
        name,
        sum(parameter.numel() for parameter in model.parameters()),
        pairs,
        statistics.median(took["plain"] for took in found),
        statistics.median(took["guarded"] for took in found),
        median_of([took["guarded"] / took["plain"] - 1 for took in found]),
        median_of([took["control"] / took["plain"] - 1 for took in found]),
    )


def text(found: Sequence[Step]) -> str:
    """Return the figures as a table."""
    return table(
        found,
        {
            "optimizer": lambda row: row.optimizer,
            "parameters": lambda row: f"{row.parameters:,}",
            "optimizer.step()": lambda row: f"{1e3 * row.plain:.2f} ms",
            "mbs.optimizer_step": lambda row: f"{1e3 * row.guarded:.2f} ms",
            "slower, median [95 %]": lambda row: row.ratio,
            "a second plain step": lambda row: row.control,
        },
    )
