#!/usr/bin/env python3
"""Micro-batch streaming (arXiv 2110.12484): accuracy and time of batches that do not fit.

    python benchmarks/papers/mbs.py

Its claim: they are as accurate as with the memory for them. Handwritten digits and a conv net,
under a memory budget in which 8 samples fit and 16 do not. Batches of 16 to 128 times as many are
trained in pieces that fit, and once more without a budget and whole. BatchNorm normalises groups of
8 samples in both, so they train the same. Times are processor time without a budget, whose counting
takes time, epoch by epoch in turns. Exit code 0 where every batch is trained under the budget, as
accurately as whole but for one sample in a hundred, 3 where not.
"""

from __future__ import annotations

import random
import statistics
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

# so that it runs from anywhere, installed or not
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.papers.common import (
    TRAINED_ON,
    Data,
    accuracy,
    cross_entropy,
    digits,
    options,
    percent,
    spread,
    write,
)
from elastic_mbs import ElasticMBS, MemoryBudget, Policy
from elastic_mbs.recipes import BatchSchedule, ElasticBatchSampler, convert_ghost_batchnorm

FITS = 8
TIMES = (1, 16, 32, 64, 128)
RATE, ROUNDS = 0.1, 5
PAPER = {
    "largest batch in what fits": {
        "ResNet-50": "16 → 1,024 (64 ×)",
        "ResNet-101": "8 → 1,024 (128 ×)",
        "AmoebaNet-D": "32 → 1,024 (32 ×)",
    },
    "U-Net": "4 → 512 (128 ×)",
    "seconds of an epoch, ResNet-50 on CIFAR-10, the authors' log": {
        "without": "65 to 73",
        "with": 74,
        "with their BatchNorm": 93,
    },
}


class Training:
    """A net in training on the digits.

    A batch is a vector of indices, so that the samples of a piece are fetched when its turn comes.
    """

    def __init__(self, seed: int, batch: int, data: Data) -> None:
        torch.manual_seed(seed)
        layers: list[nn.Module] = []
        for width, channels, stride in ((1, 32, 1), (32, 32, 2)):
            layers += [
                nn.Conv2d(width, channels, 3, stride, 1, bias=False),
                nn.BatchNorm2d(channels),
                nn.ReLU(),
            ]
        self.model = convert_ghost_batchnorm(
            nn.Sequential(*layers, nn.Flatten(), nn.Linear(512, 10)), FITS
        )
        self.data = data
        self.optimizer = torch.optim.SGD(
            self.model.parameters(), lr=RATE, momentum=0.9, weight_decay=5e-4
        )
        self.sampler = ElasticBatchSampler(TRAINED_ON, BatchSchedule([(0, batch)]), seed=seed)

    def loss(self, indices: Tensor) -> Tensor:
        return cross_entropy(self.model, (self.data[0][indices], self.data[1][indices]))

    def step(self, indices: Tensor, mbs: ElasticMBS | None) -> None:
        """Make one update, whole or in pieces."""
        if mbs is None:
            self.loss(indices).backward()
        else:
            mbs.backward(self.loss, indices)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def epoch(self, mbs: ElasticMBS | None) -> float:
        """Make one epoch; return its processor time, which neighbours disturb less."""
        began = time.process_time()
        for indices in self.sampler:
            self.step(torch.tensor(indices), mbs)
        return time.process_time() - began


def peak(samples: int, data: Data) -> int:
    """Return the bytes at the peak of the second step on so many samples, whole."""
    one = Training(0, samples, data)
    with MemoryBudget("4GiB", track=(one.model, one.data)) as budget:
        for _ in range(2):  # the optimizer's state is made in the first
            one.step(torch.arange(samples), None)
        return int(budget.peak)


def fits(samples: int, limit: int, data: Data) -> bool:
    """Return whether a batch can be trained whole."""
    one = Training(0, samples, data)
    try:
        with MemoryBudget(limit, track=(one.model, one.data)):
            for _ in range(2):
                one.step(torch.arange(samples), None)
    except torch.OutOfMemoryError:
        return False
    return True


def streamed(
    seed: int, batch: int, epochs: int, limit: int, train: Data, test: Data
) -> dict[str, Any]:
    """Train under the budget."""
    one = Training(seed, batch, train)
    with MemoryBudget(limit, track=(one.model, one.data)) as budget, ElasticMBS(one.model) as mbs:
        for _ in range(epochs):
            one.epoch(mbs)
        size = mbs.last_result.micro_batch_size if mbs.last_result else 0
        found = {"micro_batch": size, "ooms": mbs.stats.ooms, "peak": int(budget.peak)}
    return {**found, "accuracy": accuracy(one.model, test)}


def whole(seed: int, batch: int, epochs: int, train: Data, test: Data) -> float:
    """Return the accuracy without a budget."""
    one = Training(seed, batch, train)
    for _ in range(epochs):
        one.epoch(None)
    return accuracy(one.model, test)


def seconds(batch: int, rounds: int, data: Data) -> dict[str, float]:
    """Return the seconds of an epoch without streaming and with it.

    Also streaming against whole batches and against the batch that fits: medians of epochs in
    turns.
    """
    one, fitting, stream = Training(0, batch, data), Training(0, FITS, data), random.Random(0)
    with ElasticMBS(one.model, micro_batch_size=FITS, policy=Policy(grow=False)) as mbs:
        kinds = {
            "fits": partial(fitting.epoch, None),
            "without": partial(one.epoch, None),
            "with": partial(one.epoch, mbs),
        }
        turns = [
            {kind: kinds[kind]() for kind in stream.sample(list(kinds), len(kinds))}
            for _ in range(rounds + 1)
        ][1:]
    found = {kind: statistics.median(turn[kind] for turn in turns) for kind in kinds}
    against = {
        name: statistics.median(turn["with"] / turn[kind] for turn in turns)
        for name, kind in (("whole", "without"), ("what_fits", "fits"))
    }
    return found | {f"against_{name}": ratio for name, ratio in against.items()}


def row(times: int, limit: int, epochs: int, seeds: int, train: Data, test: Data) -> dict[str, Any]:
    """Return the figures of one size of the batch."""
    batch = FITS * times
    runs = [streamed(seed, batch, epochs, limit, train, test) for seed in range(seeds)]
    return {
        "batch": batch,
        "times": times,
        "fits": fits(batch, limit, train),
        "micro_batch": runs[0]["micro_batch"],
        "ooms": runs[0]["ooms"],
        "streamed": spread([run["accuracy"] for run in runs]),
        "whole": spread([whole(seed, batch, epochs, train, test) for seed in range(seeds)]),
        "seconds": seconds(batch, ROUNDS, train),
    }


def draw(rows: Sequence[dict[str, Any]]) -> Figure:
    """Draw accuracy and time by the size of the batch."""
    figure = Figure(figsize=(9, 3.4), layout="constrained")
    left, right = figure.subplots(1, 2)
    batches = [each["batch"] for each in rows]
    for kind, words, style in (
        ("whole", "whole, without a limit", "o-"),
        ("streamed", "streamed, under the budget", "x--"),
    ):
        left.plot(batches, [each[kind]["mean"] for each in rows], style, label=words)
    for kind in ("without", "with"):
        right.plot(
            batches, [each["seconds"][kind] for each in rows], "o-", label=f"{kind} streaming"
        )
    for axes in (left, right):
        axes.axvline(FITS, color="grey", linestyle=":", label="what fits")
        axes.set(xscale="log", xlabel="batch")
        axes.legend(frameon=False)
    left.set_ylabel("accuracy")
    right.set_ylabel("seconds of an epoch")
    right.set_ylim(0)
    return figure


def main(arguments: Sequence[str] | None = None) -> int:
    """Train, print the table and write it."""
    given = options(__doc__ or "", "mbs", seeds=3, epochs=8, arguments=arguments)
    train, test = digits()
    limit = (peak(FITS, train) + peak(2 * FITS, train)) // 2
    print(
        f"budget: {limit / 2**20:.2f} MiB, in which {FITS} samples fit; seconds of an epoch, and "
        "streamed against whole and against what fits"
    )
    print(f"{'batch':>6}{'×':>5}  fits  {'whole':17}{'streamed':17}{'whole':>9}{'streamed':>10}")
    rows = list(
        map(
            partial(
                row, limit=limit, epochs=given.epochs, seeds=given.seeds, train=train, test=test
            ),
            TIMES,
        )
    )
    for each in rows:
        spent = each["seconds"]
        sizes = (
            f"{each['batch']:6}{each['times']:5}  {'yes' if each['fits'] else 'no':4}  "
            f"{percent(each['whole']):17}{percent(each['streamed']):17}"
        )
        ratios = f"{spent['against_whole']:.2f} ×, {spent['against_what_fits']:.2f} ×"
        print(f"{sizes}{spent['without']:9.2f}{spent['with']:10.2f}   {ratios}")
    print(f"the paper: {PAPER}")
    holds = (
        all(abs(each["whole"]["mean"] - each["streamed"]["mean"]) <= 0.01 for each in rows)
        and [each["fits"] for each in rows].count(True) == 1
    )
    write(given, {"holds": holds, "budget_bytes": limit, "ours": rows, "paper": PAPER}, draw(rows))
    return 0 if holds else 3


if __name__ == "__main__":
    sys.exit(main())
