#!/usr/bin/env python3
"""PAPAYA's two claims (arXiv 2303.14633) on models of this machine.

    python benchmarks/papers/papaya.py [MODEL …] [--rounds 9] [--quick] [--json FILE] [--png FILE]

How well are peak memory and time predicted, and which way to save memory pays?

Prediction: a plan on fake tensors, corrected by the measured peak of one size, and γ·m + δ fitted
to the times of three (that size, its double and fourfold), against measurements of sizes up to 16
times as large. Choice: under three budgets, the way that `mbs.plan(compare=True)` calls the
fastest, with these times, against measured steps of each way at its largest size. Memory is counted
by a `MemoryBudget`, which itself takes 5 µs an operation. Times are the least of all rounds, taken
in turns, in processor time of one thread, so that a busy machine counts less.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

# so that it runs from anywhere, installed or not
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.bench import models
from benchmarks.bench.report import table
from benchmarks.bench_overhead import environment, keep_freed_memory
from benchmarks.workloads import Workload
from elastic_mbs import ElasticMBS, MemoryBudget, PlanReport
from elastic_mbs.controller.fit import TimeFit
from elastic_mbs.escalation.checkpoint import CheckpointedBlocks
from elastic_mbs.escalation.offload import OffloadedTensors
from elastic_mbs.rollback.random_streams import RandomStreams

CPU = torch.device("cpu")
MULTIPLES = (1, 2, 3, 4, 6, 8, 12, 16)  # multiples of the calibrated size
CALIBRATED = (1, 2, 4)  # multiples that are calibrated by: memory by the first, time by all
# Parts of the way from the peak of the smallest size to that of the whole batch.
SHARES = (0.1, 0.25, 0.6)
AMPLE = 2**40
PAPER = {"R": 0.97, "slowdown": 9.3}


MODELS: Mapping[str, tuple[Callable[[int], Workload], int]] = {
    "conv": (models.conv, 8),
    "groups": (models.groups, 4),
    "gpt": (models.gpt, 4),
    "encoder": (models.encoder, 4),
    "lstm": (models.lstm, 16),
    "gru": (models.gru, 128),
    "mlp": (models.mlp, 128),
}
"""Name → maker of a workload, and the size at which it is calibrated."""


@dataclass(frozen=True)
class Size:
    """A size, in samples: peak bytes and seconds of a piece, measured and predicted."""

    size: int
    peak: int
    predicted_peak: int
    seconds: float
    predicted_seconds: float


@dataclass(frozen=True)
class Fit:
    """Quality of a prediction, over the sizes that nothing was calibrated by.

    Attributes:
        r: Pearson's correlation of the predicted and the measured, which PAPAYA reports.
        r2: the part of the variance that the prediction explains.
        worst: largest relative error.
    """

    r: float
    r2: float
    worst: float

    @classmethod
    def of(cls, pairs: Sequence[tuple[float, float]]) -> Fit:
        """Return the fit of pairs (measured, predicted)."""
        measured, predicted = torch.tensor(pairs, dtype=torch.float64).T
        r = torch.corrcoef(torch.stack([measured, predicted]))[0, 1]
        r2 = 1 - (predicted - measured).square().sum() / (measured - measured.mean()).square().sum()
        return cls(r.item(), r2.item(), (predicted / measured - 1).abs().max().item())

    def __str__(self) -> str:
        return f"{self.r2:.4f}, {100 * self.worst:.2f} %"


@dataclass(frozen=True)
class Choice:
    """A budget: the ways to save memory, by name.

    Attributes:
        budget: bytes.
        sizes: the largest micro-batch of each way, in samples.
        predicted: seconds of a step, as the plan has it.
        measured: seconds of a step.
        picked: the fastest way by the plan.
        best: the fastest way.
        lost: time of the picked way beyond the best, as a fraction.
    """

    budget: int
    sizes: Mapping[str, int]
    predicted: Mapping[str, float | None]
    measured: Mapping[str, float]
    picked: str | None
    best: str
    lost: float | None


@dataclass(frozen=True)
class Subject:
    """A model.

    Attributes:
        name: for people.
        samples: of the batch.
        sizes: the measurements of each.
        memory: of the plan.
        line: of a straight line through the peaks of the calibrated size and its double, as PAPAYA
            has it.
        time: of a piece.
        throughput: samples per second.
        slowdown: factor by which pieces of the fourfold size take longer with each way.
        choices: one for each budget.
    """

    name: str
    samples: int
    sizes: Sequence[Size]
    memory: Fit
    line: Fit
    time: Fit
    throughput: Fit
    slowdown: Mapping[str, float]
    choices: Sequence[Choice]


class Bench:
    """A model under a budget, and the least time of each piece and step."""

    def __init__(self, make: Callable[[int], Workload], samples: int) -> None:
        torch.manual_seed(0)
        self.workload = make(samples)
        self.budget = MemoryBudget(AMPLE, track=(self.workload.model,))
        self._streams = RandomStreams((), [])

    def made(self, way: str, piece: Any) -> AbstractContextManager[Any]:
        """Return the context in which a piece is made in that way, as the engine does it."""
        model = self.workload.model
        if way == "offload":
            values = piece.values() if isinstance(piece, dict) else piece
            return OffloadedTensors(lambda: [*model.parameters(), *model.buffers(), *values])
        return CheckpointedBlocks([model], self._streams) if way == "checkpoint" else nullcontext()

    def run(self, way: str, pieces: Sequence[tuple[int, int]]) -> tuple[float, int]:
        """Return seconds and peak of forward and backward of these pieces."""
        workload = self.workload
        workload.model.zero_grad()
        with self.budget:
            self.budget.reset_peak()
            began = time.process_time()
            for start, stop in pieces:
                piece = workload.piece(start, stop)
                with self.made(way, piece):
                    (workload.loss_fn(piece) * ((stop - start) / workload.samples)).backward()
            return time.process_time() - began, self.budget.peak

    def least(
        self, runs: Sequence[tuple[str, Sequence[tuple[int, int]]]], rounds: int
    ) -> list[tuple[float, int]]:
        """Return the least seconds and the highest peak of each, taken in turns."""
        found = [[self.run(*each) for each in runs] for _ in range(rounds)]
        return [
            (min(seconds for seconds, _ in column), max(peak for _, peak in column))
            for column in zip(*found, strict=True)
        ]


def cut(samples: int, size: int) -> list[tuple[int, int]]:
    """Return balanced pieces of up to `size` samples."""
    pieces = -(-samples // size)
    ends = [samples * k // pieces for k in range(pieces + 1)]
    return list(pairwise(ends))


def subject(make: Callable[[int], Workload], start: int, rounds: int) -> Subject:
    """Return all figures of one model."""
    bench = Bench(make, start * max(MULTIPLES))
    workload = bench.workload
    sizes = [start * each for each in MULTIPLES]
    calibrated = [start * each for each in CALIBRATED]
    bench.run("none", [(0, sizes[-1])])  # warm-up
    measured = dict(
        zip(sizes, bench.least([("none", [(0, size)]) for size in sizes], rounds), strict=True)
    )
    workload.model.zero_grad()  # a plan counts gradients that are there
    with bench.budget:
        mbs = ElasticMBS(workload.model, count=workload.count)
        plan = partial(mbs.plan, workload.loss_fn, workload.batch)
        report = plan()
    times = TimeFit()
    for size in calibrated:
        times.add(size, measured[size][0])
    gamma, delta = times.coefficients() or (0.0, 0.0)
    found = predicted(
        report,
        measured,
        start,
        gamma,
        delta,
        elements := next(iter(mbs.size_models.values())).elements,
    )
    held_out = [each for each in found if each.size not in calibrated]
    slope = (measured[2 * start][1] - measured[start][1]) / start
    ways = (
        "none",
        *(way.name for way in compared(bench, plan, AMPLE).ways[1:] if way.reason is None),
    )
    whole = [(0, calibrated[-1])]
    seconds = [each[0] for each in bench.least([(way, whole) for way in ways], rounds)]
    know(mbs, [(size * elements, measured[size][0]) for size in calibrated])
    return Subject(
        workload.name,
        workload.samples,
        found,
        Fit.of([(each.peak, each.predicted_peak) for each in found if each.size != start]),
        Fit.of(
            [
                (each.peak, measured[start][1] + slope * (each.size - start))
                for each in found
                if each.size > 2 * start
            ]
        ),
        Fit.of([(each.seconds, each.predicted_seconds) for each in held_out]),
        Fit.of(
            [(each.size / each.seconds, each.size / each.predicted_seconds) for each in held_out]
        ),
        {way: took / seconds[0] for way, took in zip(ways, seconds, strict=True)},
        [choice(bench, compared(bench, plan, at(report, share)), rounds) for share in SHARES],
    )


def predicted(
    report: PlanReport,
    measured: Mapping[int, tuple[float, int]],
    start: int,
    gamma: float,
    delta: float,
    elements: int,
) -> list[Size]:
    """Return the predictions for each size, memory after one correction."""
    model = report.model
    assert model is not None, report.reason
    model.add(start * elements, measured[start][1], elements=elements, first=True)
    peaks = {size: model.predict(size * elements, first=True) or 0 for size in measured}
    return [
        Size(size, peak, round(peaks[size]), seconds, gamma * size + delta)
        for size, (seconds, peak) in measured.items()
    ]


def know(mbs: ElasticMBS, times: Sequence[tuple[int, float]]) -> None:
    """Tell the runtime the seconds of pieces of so many elements, as a saved state does.

    Its own would be of a busy machine.
    """
    state = json.loads(json.dumps(mbs.state_dict()))
    for track in state["controller"]["tracks"]:
        track["time"] = [list(each) for each in times]
    mbs.load_state_dict(state)


def at(report: PlanReport, share: float) -> int:
    """Return a budget between the peaks of the smallest size and of the whole batch."""
    low, high = report.sizes[-1].peak or 0, report.sizes[0].peak or 0
    return int(low + share * (high - low))


def compared(bench: Bench, plan: Callable[..., PlanReport], budget: int) -> PlanReport:
    """Return the plan for a budget, with the ways of the paper: none, offload, all blocks again."""
    bench.workload.model.zero_grad()
    with bench.budget:
        report = plan(budget=budget, compare=True)
    last = {way.name.partition(" (")[0]: way for way in report.ways}  # of all blocks
    names = [name for name in ("none", "offload", "checkpoint") if name in last]
    return replace(report, ways=tuple(replace(last[name], name=name) for name in names))


def choice(bench: Bench, report: PlanReport, rounds: int) -> Choice:
    """Measure steps of each way at its largest size under a budget."""
    fitting = [way for way in report.ways if way.largest]
    bench.budget.limit = report.capacity or AMPLE
    try:
        least = bench.least(
            [(way.name, cut(bench.workload.samples, way.largest)) for way in fitting], rounds
        )
    finally:
        bench.budget.limit = AMPLE
    measured = {way.name: seconds for way, (seconds, _) in zip(fitting, least, strict=True)}
    best = min(measured, key=lambda name: measured[name])
    picked = report.fastest
    lost = None if picked is None else measured[picked] / measured[best] - 1
    sizes = {way.name: way.largest for way in fitting}
    seconds = {way.name: way.seconds for way in fitting}
    return Choice(report.capacity or AMPLE, sizes, seconds, measured, picked, best, lost)


def text(subjects: Sequence[Subject]) -> str:
    """Return two tables, and the paper's figures beside ours."""
    columns: dict[str, Callable[[Subject], object]] = {
        "model": lambda s: s.name,
        "sizes": lambda s: f"{s.sizes[0].size}-{s.sizes[-1].size}",
        "memory: R², worst": lambda s: s.memory,
        "straight line": lambda s: s.line,
        "time": lambda s: s.time,
        "throughput": lambda s: s.throughput,
        "offloading": lambda s: f"{s.slowdown['offload']:.2f} ×",
        "checkpointing": lambda s: (
            f"{s.slowdown['checkpoint']:.2f} ×" if "checkpoint" in s.slowdown else "–"
        ),
    }
    rows = [(each, one) for each in subjects for one in each.choices]
    choices: dict[str, Callable[[tuple[Subject, Choice]], object]] = {
        "model": lambda row: row[0].name,
        "budget, MiB": lambda row: f"{row[1].budget / 2**20:.1f}",
        "largest": lambda row: ", ".join(f"{name} {size}" for name, size in row[1].sizes.items()),
        "seconds: predicted → measured": lambda row: ", ".join(
            f"{'?' if row[1].predicted[name] is None else f'{row[1].predicted[name]:.3f}'} → "
            f"{took:.3f}"
            for name, took in row[1].measured.items()
        ),
        "picked": lambda row: row[1].picked,
        "best": lambda row: row[1].best,
        "lost": lambda row: "?" if row[1].lost is None else f"{100 * row[1].lost:.1f} %",
    }
    return f"{table(subjects, columns)}\n\n{table(rows, choices)}\n\n{summary(subjects)}"


def summary(subjects: Sequence[Subject]) -> str:
    """Return our figures and the paper's."""
    memory, speed = (
        min(getattr(each, name).r for each in subjects) for name in ("memory", "throughput")
    )
    made = [one for each in subjects for one in each.choices]
    right = sum(one.picked == one.best for one in made)
    lost = max(one.lost or 0.0 for one in made)
    slowest = max(took for each in subjects for took in each.slowdown.values())
    return (
        f"R of peak memory at least {memory:.4f}, of throughput {speed:.4f} (PAPAYA: more than "
        f"{PAPER['R']} for both, on five models). "
        f"Saving memory slows pieces of one size down by up to {slowest:.1f} × (PAPAYA: "
        f"{PAPER['slowdown']} ×). "
        f"The way that the rule picks is the fastest one in {right} of {len(made)} budgets, and "
        f"takes at most {100 * lost:.0f} % longer."
    )


def draw(subjects: Sequence[Mapping[str, Any]], out: Path) -> None:
    """Draw errors by size, and each budget's ways."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 4.4), layout="constrained")
    memory, seconds, chosen = figure.subplots(1, 3, width_ratios=[2, 2, 3])
    for axes, what, bound in ((memory, "peak", 3), (seconds, "seconds", 10)):
        for each in subjects:
            first = each["sizes"][0]["size"]
            errors = [100 * (size[f"predicted_{what}"] / size[what] - 1) for size in each["sizes"]]
            axes.plot(
                [size["size"] / first for size in each["sizes"]],
                errors,
                marker=".",
                label=each["name"],
            )
        axes.axhspan(-bound, bound, color="0.92", zorder=0)
        axes.set(
            xscale="log",
            xlabel="size / calibrated size",
            ylabel=f"predicted / measured {what} − 1, %",
            xticks=MULTIPLES,
        )
        axes.set_xticklabels(MULTIPLES)
        axes.minorticks_off()
    memory.legend(frameon=False, fontsize=7)
    colours = {"none": "#000000", "offload": "#0072b2", "checkpoint": "#d55e00"}
    bars = [(each["name"], one) for each in subjects for one in each["choices"]]
    for place, (_, one) in enumerate(bars):
        for turn, (name, took) in enumerate(one["measured"].items()):
            star = {"hatch": "//", "edgecolor": "white"} if name == one["picked"] else {}
            chosen.bar(
                place + 0.27 * turn,
                took / one["measured"][one["best"]],
                0.27,
                align="edge",
                color=colours[name],
                **star,
            )
    chosen.set_xticks(
        [3 * k + 1.5 for k in range(len(subjects))],
        [each["name"].replace(" ", "\n") for each in subjects],
        fontsize=7,
    )
    chosen.set_ylabel("time of a step / the fastest way's")
    chosen.set_title(
        "black none, blue offload, orange checkpoint; hatched: picked; tight to ample budget",
        fontsize=8,
    )
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=130)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print tables, write files."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "models", nargs="*", metavar="MODEL", help=f"of {', '.join(MODELS)} (default: all)"
    )
    parser.add_argument(
        "--rounds", type=int, default=9, help="how often each is measured; the quickest counts"
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="smallest sizes, one round: whether it works, not how well",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    parser.add_argument("--png", type=Path, metavar="FILE", help="draw them there")
    options = parser.parse_args(arguments)
    unknown = [name for name in options.models if name not in MODELS]
    if unknown:
        parser.error(f"there is no model {unknown[0]!r}: there is {', '.join(MODELS)}")
    keep_freed_memory()
    torch.set_num_threads(1)
    chosen = [MODELS[name] for name in options.models or MODELS]
    subjects = []
    for make, start in chosen:
        # oneDNN's LSTM keeps memory for its backward that no fake shows, so it has no plan.
        torch.backends.mkldnn.enabled = make is not models.lstm  # type: ignore[assignment]  # a property
        subjects.append(subject(make, *((2, 1) if options.quick else (start, options.rounds))))
    torch.backends.mkldnn.enabled = True  # type: ignore[assignment]
    figures = {
        "environment": environment(CPU),
        "paper": PAPER,
        "summary": summary(subjects),
        "models": [asdict(each) for each in subjects],
    }
    print(text(subjects))
    if options.json is not None:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(figures, separators=(",", ":")) + "\n")
    if options.png is not None:
        draw([asdict(each) for each in subjects], options.png)


if __name__ == "__main__":
    main()
