#!/usr/bin/env python3
"""Goyal et al. (arXiv 1706.02677): large batches with the linear rule and a gradual warm-up.

    python benchmarks/papers/goyal.py

Their claim: k times the batch trains as well with k times the rate. Handwritten digits, a small
net, SGD with momentum, the rate divided by 10 after a third, two thirds and 90 % of the epochs.
Batches of the reference size are compared with batches 16 times as large, in pieces of the
reference size, as if by 16 workers: without the linear rule; with it and no, constant or gradual
warm-up over a sixth of the epochs; and with a loss that is normalised wrongly on purpose, by the
piece, so that the pieces' means are summed.

The reference rate was chosen so that warm-up matters: at 0.02 training comes through without one,
at 0.04 a gradual one is not enough either. Exit code 0 where gradual warm-up is the best of the
large batches and the reference is better by less than 2 points, 3 where not.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from torch.optim.lr_scheduler import ChainedScheduler, ConstantLR, LRScheduler, MultiStepLR

# so that it runs from anywhere, installed or not
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.papers.common import (
    TRAINED_ON,
    accuracy,
    cross_entropy,
    digits,
    options,
    percent,
    perceptron,
    spread,
    write,
)
from elastic_mbs import ElasticMBS, Policy
from elastic_mbs.recipes import BatchSchedule, ElasticBatchSampler, gradual_warmup, linear_scaling

BATCH, K, RATE = 8, 16, 0.03
REFERENCE, PLAIN, NONE, CONSTANT, GRADUAL, WRONG = (
    "reference batch",
    "without the linear rule",
    "no warm-up",
    "constant warm-up",
    "gradual warm-up",
    "gradual, loss normalised wrongly",
)
PAPER = {  # top-1 error on ImageNet, ResNet-50, k = 32
    "data": "ImageNet, ResNet-50, 256 against 8,192 images, top-1 error",
    REFERENCE: 0.2360,
    NONE: 0.2484,
    CONSTANT: 0.2588,
    GRADUAL: 0.2374,
}
Warm = Callable[[torch.optim.Optimizer, int], LRScheduler]
WARM: dict[str, Warm] = {
    CONSTANT: lambda optimizer, steps: ConstantLR(optimizer, factor=1 / K, total_iters=steps),
    GRADUAL: lambda optimizer, steps: gradual_warmup(optimizer, K, steps),
    WRONG: lambda optimizer, steps: gradual_warmup(optimizer, K, steps),
}


def train(kind: str, seed: int, epochs: int) -> dict[str, Any]:
    """Train once; return the loss by epoch, and the accuracy at the end."""
    data, test = digits()
    model = perceptron(seed)
    batch = BATCH if kind == REFERENCE else BATCH * K
    rate = RATE if kind in (REFERENCE, PLAIN) else linear_scaling(RATE, batch, BATCH)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9, weight_decay=5e-4)
    sampler = ElasticBatchSampler(
        TRAINED_ON, BatchSchedule([(0, batch)]), seed=seed, drop_last=True
    )
    steps = len(sampler)
    schedulers: list[LRScheduler] = [
        MultiStepLR(
            optimizer, [round(epochs * share) * steps for share in (1 / 3, 2 / 3, 0.9)], 0.1
        )
    ]
    if kind in WARM:
        schedulers.append(WARM[kind](optimizer, max(1, epochs // 6) * steps))
    scheduler = ChainedScheduler(schedulers)
    losses = []
    with ElasticMBS(
        model,
        micro_batch_size=BATCH,
        reduction="sum" if kind == WRONG else "mean",
        policy=Policy(grow=False),
    ) as mbs:
        for _ in range(epochs):
            total = 0.0
            for indices in sampler:
                result = mbs.backward(
                    partial(cross_entropy, model), (data[0][indices], data[1][indices])
                )
                optimizer.step()
                optimizer.zero_grad()
                scheduler.step()
                total += float(result) / steps / (K if kind == WRONG else 1)
            losses.append(total)
    return {"accuracy": accuracy(model, test), "losses": losses}


def draw(runs: dict[str, list[dict[str, Any]]]) -> Figure:
    """Draw the loss by epoch, of the first seed."""
    figure = Figure(figsize=(9, 3.4), layout="constrained")
    axes = figure.subplots()
    for kind, found in runs.items():
        axes.plot(
            range(1, len(found[0]["losses"]) + 1),
            found[0]["losses"],
            label=kind,
            color="black" if kind == REFERENCE else None,
        )
    axes.set(yscale="log", xlabel="epochs", ylabel="training loss")
    axes.legend(frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
    return figure


def main(arguments: Sequence[str] | None = None) -> int:
    """Train, print the table and write it."""
    given = options(__doc__ or "", "goyal", seeds=5, epochs=30, arguments=arguments)
    kinds = (REFERENCE, PLAIN, NONE, CONSTANT, GRADUAL, WRONG)
    runs = {
        kind: [train(kind, seed, given.epochs) for seed in range(given.seeds)] for kind in kinds
    }
    table = {kind: spread([run["accuracy"] for run in found]) for kind, found in runs.items()}
    print(f"{f'batch {BATCH} against {BATCH * K}':34}{'accuracy':18}the paper (accuracy)")
    for kind, row in table.items():
        theirs: Any = PAPER.get(kind)
        print(f"{kind:34}{percent(row):18}{f'{100 * (1 - theirs):.2f} %' if theirs else '–'}")
    means = {kind: row["mean"] for kind, row in table.items()}
    holds = (
        max((kind for kind in kinds if kind != REFERENCE), key=lambda kind: means[kind]) == GRADUAL
        and means[REFERENCE] - means[GRADUAL] < 0.02
    )
    write(
        given,
        {"holds": holds, "batch": BATCH, "k": K, "rate": RATE, "ours": table, "paper": PAPER},
        draw(runs),
    )
    return 0 if holds else 3


if __name__ == "__main__":
    sys.exit(main())
