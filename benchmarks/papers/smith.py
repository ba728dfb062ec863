#!/usr/bin/env python3
"""Smith et al. (arXiv 1711.00489): growing the batch in place of decaying the rate.

    python benchmarks/papers/smith.py

Their claim: it is as good, in fewer updates. Handwritten digits, a small net, SGD with momentum.
The rate is divided by 5 after 30, 60 and 80 % of the epochs, as in the paper, or the batch is
multiplied by 5 instead, up to a tenth of the data, and the rest is decayed; or neither is done,
which shows that it matters. Exit code 0 where the accuracies agree within their spread over the
seeds, 3 where not.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from torch.optim.lr_scheduler import MultiStepLR

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
from elastic_mbs.recipes import BatchSchedule, ElasticBatchSampler

BATCH, RATE = 8, 0.05
DECAY, GROW, NEITHER = "decay the rate", "grow the batch", "neither"
PAPER = {
    "data": "CIFAR-10, Wide ResNet 16-4",
    DECAY: {"updates": 80_000, "accuracy": 0.943},
    GROW: {"updates": 29_000, "accuracy": 0.944},
}


def train(kind: str, seed: int, epochs: int) -> dict[str, Any]:
    """Train once; return updates, loss and size of the batch by epoch, and the accuracy."""
    data, test = digits()
    model = perceptron(seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9, weight_decay=5e-4)
    decay = partial(
        MultiStepLR, milestones=[round(epochs * share) for share in (0.3, 0.6, 0.8)], gamma=0.2
    )
    schedule = (
        BatchSchedule.from_scheduler(decay, BATCH, steps=epochs, samples=TRAINED_ON)
        if kind == GROW
        else BatchSchedule([(0, BATCH)])
    )
    # It has nothing to do where the batch stays.
    scheduler = decay(optimizer) if kind == DECAY else schedule.scheduler(optimizer)
    sampler = ElasticBatchSampler(TRAINED_ON, schedule, seed=seed)
    updates = 0
    by_epoch = []
    with ElasticMBS(model, policy=Policy(grow=False)) as mbs:
        for epoch in range(epochs):
            total = 0.0
            for indices in sampler:
                result = mbs.backward(
                    partial(cross_entropy, model), (data[0][indices], data[1][indices])
                )
                optimizer.step()
                optimizer.zero_grad()
                updates += 1
                total += float(result) * len(indices) / TRAINED_ON
            scheduler.step()
            by_epoch.append((updates, total, schedule.batch(epoch)))
    return {"updates": updates, "accuracy": accuracy(model, test), "by_epoch": by_epoch}


def draw(runs: dict[str, list[dict[str, Any]]]) -> Figure:
    """Draw the loss by epochs and by updates, of the first seed."""
    figure = Figure(figsize=(9, 3.4), layout="constrained")
    axes = figure.subplots(1, 2, sharey=True)
    for kind, found in runs.items():
        updates, losses, _ = zip(*found[0]["by_epoch"], strict=True)
        axes[0].plot(range(1, len(losses) + 1), losses, label=kind)
        axes[1].plot(updates, losses)
    axes[0].set(yscale="log", xlabel="epochs", ylabel="training loss")
    axes[1].set(xlabel="updates")
    axes[0].legend(frameon=False)
    return figure


def main(arguments: Sequence[str] | None = None) -> int:
    """Train, print the table and write it."""
    given = options(__doc__ or "", "smith", seeds=5, epochs=30, arguments=arguments)
    runs = {
        kind: [train(kind, seed, given.epochs) for seed in range(given.seeds)]
        for kind in (DECAY, GROW, NEITHER)
    }
    table = {
        kind: {
            "updates": found[0]["updates"],
            "accuracy": spread([run["accuracy"] for run in found]),
            "batches": _sizes(found[0]),
        }
        for kind, found in runs.items()
    }
    print(f"{'':16}{'updates':>9}  {'accuracy':18}batches          the paper")
    for kind, row in table.items():
        theirs: Any = PAPER.get(kind)
        words = (
            f"{theirs['updates']:,} updates, {100 * theirs['accuracy']:.1f} %" if theirs else "–"
        )
        print(
            f"{kind:16}{row['updates']:9,}  "
            f"{percent(row['accuracy']):18}{row['batches']!s:17}{words}"
        )
    one, other = (table[kind]["accuracy"] for kind in (DECAY, GROW))
    agree = abs(one["mean"] - other["mean"]) <= max(one["deviation"], other["deviation"])
    print(
        f"the two agree {'' if agree else 'NOT '}within their spread; "
        f"{table[DECAY]['updates'] / table[GROW]['updates']:.1f} times fewer updates"
    )
    write(given, {"agree": agree, "ours": table, "paper": PAPER}, draw(runs))
    return 0 if agree else 3


def _sizes(run: dict[str, Any]) -> list[int]:
    return sorted({size for _, _, size in run["by_epoch"]})


if __name__ == "__main__":
    sys.exit(main())
