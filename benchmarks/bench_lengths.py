#!/usr/bin/env python3
"""Speed of pieces by length on text of varying length, against a padded loop by hand.

    python benchmarks/bench_lengths.py [--device cuda] [--samples 64] [--longest 320] [--size 8]
                                       [--json FILE]

The text is Python's own library, cut at its blank lines; a batch is padded to its longest passage.
All loops give the same gradient, and hold at most as much at once as `--size` of the longest
passages. They run on the same batches, in one process, in turns, in an order drawn for each. A
figure is the median of the ratios to the padded loop by hand, with a bootstrap interval; "padded
again" is the method's reading where nothing differs. Pieces and the positions in them, padding
included, are counted: they are the same on a busy machine.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

# so that it runs from anywhere, installed or not
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.bench_overhead import Estimate, environment, keep_freed_memory, median_of
from benchmarks.workloads import wait
from elastic_mbs import ElasticMBS, Policy, count_tokens
from elastic_mbs.cli.demo.gpt import GPT, GPTConfig, token_loss
from elastic_mbs.cli.demo.text import IGNORED, Batch, collate, read_documents

PROMISE = 1.35
"""Smallest speed of by_length, as a multiple of the padded loop's by hand."""
PADDED = "padded by hand"
# Samples of a piece, and the length that they are trimmed to.
Ranges = Iterator[tuple[list[int], int]]
Step = Callable[[Batch], int]  # → pieces


@dataclass(frozen=True)
class Row:
    """A loop's outcome.

    Attributes:
        loop: its name.
        seconds: of a step, median.
        speed: how many times as fast as the padded loop by hand.
        pieces: in a step, mean.
        positions: in the pieces of a step, padding included, mean.
    """

    loop: str
    seconds: float
    speed: Estimate
    pieces: float
    positions: float


def make_batches(count: int, samples: int, longest: int, seed: int) -> list[Batch]:
    """Return batches of real text with a mask, as a data loader would give them."""
    documents = read_documents(None, count=count * samples, longest=longest, seed=seed)
    batches = [
        collate(documents[start : start + samples]) for start in range(0, len(documents), samples)
    ]
    return [{**batch, "mask": (batch["labels"] != IGNORED).long()} for batch in batches]


def padding(batches: Sequence[Batch]) -> float:
    """Return the fraction of all positions that is padding."""
    return 1 - sum(int(batch["mask"].sum()) for batch in batches) / sum(
        batch["mask"].numel() for batch in batches
    )


def in_order(lengths: list[int], size: int, width: int) -> Ranges:
    """Yield pieces of `size` samples, padded as they come."""
    return (
        (list(range(start, min(start + size, len(lengths)))), width)
        for start in range(0, len(lengths), size)
    )


def sorted_by_hand(lengths: list[int], size: int, width: int) -> Ranges:
    """Yield pieces of `size` samples in order of length, trimmed."""
    order = sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True)
    return (
        (order[start : start + size], lengths[order[start]]) for start in range(0, len(order), size)
    )


def by_tokens(lengths: list[int], size: int, width: int) -> Ranges:
    """Yield trimmed pieces with at most the tokens of `size` of the longest samples."""
    order = sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True)
    while order:
        length = lengths[order[0]]
        taken = size * max(lengths) // length
        yield order[:taken], length
        order = order[taken:]


class Loops:
    """The loops over one model: functions of a batch on the host that return its pieces.

    Args:
        model: the model.
        size: samples of a piece.
        longest: tokens of the longest sample.
        device: the model's.
        stack: closes the runtimes.
    """

    def __init__(
        self, model: GPT, size: int, longest: int, device: torch.device, stack: ExitStack
    ) -> None:
        self.model = model
        self.size = size
        self.device = device
        self.positions = 0  # that the model has seen so far
        new = partial(ElasticMBS, model, count=count_tokens("labels"))
        fixed = partial(new, micro_batch_size=size, policy=Policy(grow=False))
        budget = Policy(grow=False, max_tokens=size * longest)
        plain = stack.enter_context(fixed())
        by_length = stack.enter_context(fixed(pieces="by_length", length="mask"))
        tokens = stack.enter_context(new(pieces="by_length", length="mask", policy=budget))
        self.steps: dict[str, Step] = {
            PADDED: lambda batch: self.by_hand(batch, in_order),
            "padded again": lambda batch: self.by_hand(batch, in_order),
            "elastic": lambda batch: len(plain.backward(self.loss, batch).partition),
            "by_length": lambda batch: len(by_length.backward(self.loss, batch).partition),
            "max_tokens": lambda batch: len(tokens.backward(self.loss, batch).partition),
            "sorted, trimmed by hand": lambda batch: self.by_hand(batch, sorted_by_hand),
            "and cut by tokens": lambda batch: self.by_hand(batch, by_tokens),
        }

    def loss(self, piece: Batch) -> Tensor:
        self.positions += piece["labels"].numel()
        return token_loss(piece, self.model)

    def by_hand(self, batch: Batch, cut: Callable[[list[int], int, int], Ranges]) -> int:
        """Make a step in which each piece's loss weighs its share of the batch's tokens."""
        lengths = batch["mask"].sum(1).tolist()
        total = sum(lengths)
        pieces = 0
        for samples, length in cut(lengths, self.size, batch["mask"].shape[1]):
            piece = {
                name: tensor[samples, :length].to(self.device, non_blocking=True)
                for name, tensor in batch.items()
            }
            (self.loss(piece) * (sum(lengths[i] for i in samples) / total)).backward()
            pieces += 1
        return pieces


def compare(loops: Loops, batches: Sequence[Batch], rounds: int, seed: int = 0) -> list[Row]:
    """Run all loops on each batch in turns, `rounds` times after a first uncounted time."""
    rng = random.Random(seed)
    took: dict[str, list[float]] = {name: [] for name in loops.steps}
    pieces: dict[str, list[int]] = {name: [] for name in loops.steps}
    positions: dict[str, list[int]] = {name: [] for name in loops.steps}
    for turn in range(rounds + 1):
        for batch in batches:
            for name in rng.sample(list(loops.steps), len(loops.steps)):
                loops.model.zero_grad()
                wait(loops.device)
                seen = loops.positions
                began = time.perf_counter()
                cut = loops.steps[name](batch)
                wait(loops.device)
                if turn:
                    took[name].append(time.perf_counter() - began)
                    pieces[name].append(cut)
                    positions[name].append(loops.positions - seen)
    return [
        Row(
            name,
            statistics.median(seconds),
            median_of([padded / own for padded, own in zip(took[PADDED], seconds, strict=True)]),
            statistics.mean(pieces[name]),
            statistics.mean(positions[name]),
        )
        for name, seconds in took.items()
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print; return 1 where by_length is slower than promised for sure."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cpu", help="cpu (default) or cuda")
    parser.add_argument("--samples", type=int, default=64, help="of a batch")
    parser.add_argument("--longest", type=int, default=320, help="bytes of the longest passage")
    parser.add_argument(
        "--size", type=int, default=8, help="of the longest passages that a piece may take"
    )
    parser.add_argument("--width", type=int, default=128, help="of the model")
    parser.add_argument("--layers", type=int, default=4, help="of the model")
    parser.add_argument("--batches", type=int, default=6, help="different ones")
    parser.add_argument("--rounds", type=int, default=4, help="over all batches")
    parser.add_argument("--threads", type=int, default=1, help="torch's threads on the CPU")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    options = parser.parse_args(arguments)
    device = torch.device(options.device)
    keep_freed_memory()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    batches = make_batches(options.batches, options.samples, options.longest, seed=0)
    model = GPT(GPTConfig(context=options.longest, width=options.width, layers=options.layers)).to(
        device
    )
    with ExitStack() as stack:
        loops = Loops(model, options.size, options.longest, device, stack)
        rows = compare(loops, batches, options.rounds)
    print(
        f"{options.samples} passages of up to {options.longest} bytes, "
        f"{100 * padding(batches):.0f} % padding, pieces worth {options.size} of them"
    )
    for row in rows:
        speed = f"{row.speed.median:.3f} × [{row.speed.low:.3f}, {row.speed.high:.3f}]"
        counted = f"{row.pieces:5.1f} pieces  {row.positions:8.0f} positions"
        print(f"  {row.loop:24} {1e3 * row.seconds:8.1f} ms  {counted}  {speed}")
    if options.json is not None:
        settings = {name: value for name, value in vars(options).items() if name != "json"}
        report = {
            "environment": environment(device),
            "settings": settings,
            "padding": padding(batches),
            "loops": [asdict(row) for row in rows],
        }
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    return int(next(row for row in rows if row.loop == "by_length").speed.high < PROMISE)


if __name__ == "__main__":
    sys.exit(main())
