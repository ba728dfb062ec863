#!/usr/bin/env python3
"""The longest sequence that trains in a given memory, and the time of a step at each length.

    python benchmarks/longest.py [--budget-mib 256] [--rounds 3] [--lengths N …] [--json FILE]

A language model trains on one sequence, on a CPU under a `MemoryBudget`, which counts bytes: of
weights, gradients and everything that a step makes. So a busy machine gives the same lengths. Each
way starts from an empty gradient. Its length is doubled until it does not fit, and then halved in
between. At the longest length of each way, or at the lengths given, all that can train it are timed
in turns, in processor time; ours after autotuning, and a call. torch's own chunked loss
is one operation, so what it takes inside is not counted, to its advantage.

Attention is causal and within windows, as in most layers of the newer models, so time is linear in
the length and a CPU is enough.
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

# so that it runs from anywhere, installed or not
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from elastic_mbs import (
    ElasticMBS,
    MemoryBudget,
    MemoryOptions,
    Policy,
    RecoveryOptions,
)
from elastic_mbs.errors import MicroBatchFloorError
from elastic_mbs.escalation.autotune import TURNS

WORDS, WIDTH, HEADS, LAYERS, WINDOW = 8192, 128, 4, 4, 256
ROWS = 1024  # of a chunk, where torch has no chunked loss of its own
STEPS = 3  # of which the quickest counts, in each turn
MIB = 2**20

Step = Callable[[Tensor], object]


# ---------------------------------------------------------------------- the model


class Block(nn.Module):
    """Attention within windows and an MLP, each after a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return x of shape (windows, positions, width) after attention and MLP."""
        q, k, v = self.qkv(self.before(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        found = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(found.transpose(1, 2).flatten(2))
        added: Tensor = x + self.mlp(self.between(x))
        return added


class GPT(nn.Module):
    """A language model of such blocks, over one sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.places = nn.Embedding(WINDOW, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)

    def hidden(self, ids: Tensor, *, again: bool = False) -> Tensor:
        """Return the input of the head, of shape (positions, width).

        Args:
            ids: of shape (1, positions), a multiple of the window.
            again: each block runs again in backward.
        """
        x = self.words(ids.view(-1, WINDOW)) + self.places.weight
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if again else block(x)
        found: Tensor = self.norm(x).flatten(0, 1)
        return found

    def forward(self, ids: Tensor) -> Tensor:
        """Return logits of shape (positions, words)."""
        logits: Tensor = self.head(self.hidden(ids))
        return logits


def shifted(ids: Tensor) -> Tensor:
    """Return the next word of each position; the last one has none."""
    return functional.pad(ids.flatten()[1:], (0, 1), value=-100)


# ---------------------------------------------------------------------- the ways


def whole_loss(model: GPT, hidden: Tensor, ids: Tensor) -> Tensor:
    """Return the loss, with all logits at once."""
    return functional.cross_entropy(model.head(hidden), shifted(ids))


def chunked_loss(model: GPT, hidden: Tensor, ids: Tensor) -> Tensor:
    """Return the loss, with logits in chunks: by torch where it can, else by hand."""
    options = getattr(nn, "LinearCrossEntropyOptions", None)
    if options is not None:
        loss: Tensor = functional.linear_cross_entropy(
            hidden, model.head.weight, shifted(ids), options=options()
        )
        return loss

    def loss_of(rows: Tensor, own: Tensor) -> Tensor:
        return functional.cross_entropy(model.head(rows), own, reduction="sum")

    target = shifted(ids)
    chunks = zip(hidden.split(ROWS), target.split(ROWS), strict=True)
    parts = [checkpoint(loss_of, rows, own, use_reentrant=False) for rows, own in chunks]
    total: Tensor = torch.stack(parts).sum() / (target != -100).sum()
    return total


@contextmanager
def by_hand(model: GPT, loss: Callable[..., Tensor], *, again: bool) -> Iterator[Step]:
    """Give a step of plain torch."""

    def step(ids: Tensor) -> None:
        loss(model, model.hidden(ids, again=again), ids).backward()

    yield step


@contextmanager
def elastic(model: GPT, *, tunes: bool = False) -> Iterator[Step]:
    """Give our step, of the plain model and the plain loss.

    Args:
        model: the model.
        tunes: steps in each way come before the first one, and the fastest way stays.
    """

    def loss_of(ids: Tensor) -> Tensor:
        return functional.cross_entropy(model(ids), shifted(ids))

    with ElasticMBS(
        model,
        policy=Policy(grow=False),
        memory=MemoryOptions(wait_for_memory=0, monitor_interval=0),
        recovery=RecoveryOptions(escalate="auto"),
    ) as mbs:

        def tune(ids: Tensor) -> None:
            """Let every way that fits take its turns."""
            report = mbs.plan(loss_of, ids, autotune=True)
            for _ in range(TURNS * sum(way.largest > 0 for way in report.ways)):
                mbs.backward(loss_of, ids)

        first = [tune] if tunes else []

        def step(ids: Tensor) -> None:
            while first:
                first.pop()(ids)
            mbs.backward(loss_of, ids)

        yield step


OURS = "elastic-mbs"
WAYS: Mapping[str, Callable[[GPT], Any]] = {
    "stock": lambda model: by_hand(model, whole_loss, again=False),
    "chunked loss": lambda model: by_hand(model, chunked_loss, again=False),
    "checkpointed": lambda model: by_hand(model, whole_loss, again=True),
    "checkpointed, chunked loss": lambda model: by_hand(model, chunked_loss, again=True),
    OURS: elastic,
}


# ---------------------------------------------------------------------- lengths and times


@dataclass(frozen=True)
class Longest:
    """The longest sequence of one way.

    Attributes:
        way: its name.
        length: in tokens; 0 where the shortest does not fit.
        peak: bytes of its step.
    """

    way: str
    length: int
    peak: int


@dataclass(frozen=True)
class Timed:
    """The time of one way at one length.

    Attributes:
        way: its name.
        length: in tokens.
        seconds: processor time of a step, the least of the rounds.
        ours: the seconds of our step over that, the median of the rounds.
    """

    way: str
    length: int
    seconds: float
    ours: float


def ids_of(length: int) -> Tensor:
    """Return a sequence of one sample."""
    generator = torch.Generator().manual_seed(length)
    return torch.randint(WORDS, (1, length), generator=generator)


def made() -> GPT:
    """Return the model, the same each time."""
    torch.manual_seed(0)
    return GPT()


def trains(way: str, length: int, limit: int) -> int | None:
    """Return the peak of a step in bytes; None where it does not fit."""
    model, ids = made(), ids_of(length)
    with MemoryBudget(limit, [model, ids]) as budget, WAYS[way](model) as step:
        try:
            step(ids)
        except (torch.OutOfMemoryError, MicroBatchFloorError):
            return None
        return budget.peak


def longest(way: str, limit: int, start: int) -> Longest:
    """Return the longest sequence that trains, to an eighth of its length.

    Args:
        way: its name.
        limit: bytes.
        start: a length to begin with.
    """
    peaks = {0: 0}
    above = start
    while (peak := trains(way, above, limit)) is not None:
        peaks[above] = peak
        above *= 2
    below = max(peaks)
    while above - below > max(WINDOW, above // 8):
        middle = (above + below) // 2 // WINDOW * WINDOW
        peak = trains(way, middle, limit)
        if peak is None:
            above = middle
        else:
            below, peaks[middle] = middle, peak
    return Longest(way, below, peaks[below])


def seconds_of(way: str, length: int, limit: int) -> float:
    """Return the processor time of a step, in seconds: the least of some."""
    model, ids = made(), ids_of(length)
    opened = elastic(model, tunes=True) if way == OURS else WAYS[way](model)
    with MemoryBudget(limit, [model, ids]), opened as step:
        if way == OURS:
            step(ids)
            model.zero_grad()
        times = list[float]()
        for _ in range(STEPS):
            began = time.process_time()
            step(ids)
            times.append(time.process_time() - began)
            model.zero_grad()
        return min(times)


def timed(ways: Sequence[str], length: int, limit: int, rounds: int) -> list[Timed]:
    """Return the times of a step of some ways, ours among them, in turns."""
    times = [{way: seconds_of(way, length, limit) for way in ways} for _ in range(rounds)]
    return [
        Timed(
            way,
            length,
            min(each[way] for each in times),
            statistics.median(each[OURS] / each[way] for each in times),
        )
        for way in ways
    ]


# ---------------------------------------------------------------------- the command


def lengths_timed(found: Sequence[Longest]) -> Iterator[tuple[int, list[str]]]:
    """Yield the lengths at which steps are timed, with the ways that can train them.

    They are the half of the shortest of the longest lengths, and each of them that others reach.
    """
    others = [each for each in found if each.length and each.way != OURS]
    every = sorted({each.length for each in others})
    if not every:
        return
    for length in dict.fromkeys([max(WINDOW, every[0] // 2 // WINDOW * WINDOW), *every]):
        ways = [each.way for each in found if each.length >= length]
        if OURS in ways:
            yield length, ways


def given_lengths(lengths: Sequence[int], limit: int) -> Iterator[tuple[int, list[str]]]:
    """Yield these lengths, with the ways that can train them."""
    for length in lengths:
        yield length, [way for way in WAYS if trains(way, length, limit) is not None]


def main(argv: Sequence[str] | None = None) -> int:
    """Print the tables; return 0."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--budget-mib", type=int, default=256, help="the memory (256)")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each time (3)")
    parser.add_argument("--lengths", type=int, nargs="+", help="time these alone, in tokens")
    parser.add_argument("--json", type=Path, help="where to write the rows")
    given = parser.parse_args(argv)
    limit = given.budget_mib * MIB
    if not given.lengths:
        print(f"{'in ' + str(given.budget_mib) + ' MiB':32}  {'tokens':>7}  {'peak':>9}")
    found = list[Longest]()
    for way in () if given.lengths else WAYS:
        found.append(longest(way, limit, max([WINDOW, *(each.length for each in found)])))
        print(f"{way:32}  {found[-1].length:7}  {found[-1].peak / MIB:5.1f} MiB", flush=True)
    print(f"\n{'a step':32}  {'tokens':>7}  {'seconds':>7}  ours")
    rows = list[Timed]()
    each = given_lengths(given.lengths, limit) if given.lengths else lengths_timed(found)
    for length, ways in each:
        for row in timed(ways, length, limit, given.rounds):
            rows.append(row)
            print(f"{row.way:32}  {length:7}  {row.seconds:7.3f}  {row.ours:.2f} ×", flush=True)
    if given.json is not None:
        result = {
            "torch": torch.__version__,
            "budget_mib": given.budget_mib,
            "longest": [asdict(each) for each in found],
            "times": [asdict(each) for each in rows],
        }
        given.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    logging.disable(logging.WARNING)  # not in main, which tests call: it is the process's own
    torch.set_num_threads(1)
    sys.exit(main())
