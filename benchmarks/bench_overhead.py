#!/usr/bin/env python3
"""Cost of a call without events, against a loop by hand with the same micro-batch size.

    python benchmarks/bench_overhead.py [WORKLOAD …] [--device cuda] [--breakdown] [--json FILE]

Both loops train the same model on the same batch, in one process, step by step in turns, in an
order drawn for each pair, so that neighbours on the machine, clocks and the place of tensors in
memory hit both alike. The figure is the median of the pairs' ratios, with a bootstrap interval. A
second run of the loop by hand in each pair shows the method's own reading where nothing differs.

glibc gives freed memory at the top of its heap back to the kernel, and the next backward takes it
again, page by page. Whether the top is free is luck of the layout: it differs from run to run of
one loop by more than the promise allows. So that is switched off here; `--trim` leaves it on.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import platform
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

# so that it runs from anywhere, installed or not
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.breakdown import SHOWN, WARM, Loop, Row, by_part, make_runtime, per_call_and_piece
from benchmarks.workloads import MAKERS, Workload, calibrated, wait

PROMISE = 0.01
"""Largest overhead, as a fraction of the loop by hand's time."""
FOR_THE_TABLE = ("mlp", "cnn", "gpt", "deep")
FOR_THE_BREAKDOWN = ("small", "cold", "deep", "norms")
RESAMPLES = 2000
ENOUGH = 20


@dataclass(frozen=True)
class Estimate:
    """A median with its 95 % interval."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{100 * self.median:+.2f} % [{100 * self.low:+.2f}, {100 * self.high:+.2f}]"


@dataclass(frozen=True)
class Result:
    """A workload's outcome.

    Attributes:
        name: the workload.
        size: samples per piece.
        pieces: in a step.
        pairs: steps of each loop.
        by_hand: seconds of a step, median.
        elastic: seconds of a step, median.
        overhead: elastic / by hand - 1.
        control: by hand / by hand - 1: the method's reading where nothing differs.
        cpu: the overhead in CPU time of the process, which others on the machine disturb less;
            means little where a GPU does the work.
        verdict: "holds", "broken", or "open" where the interval has the promise inside.
    """

    name: str
    size: int
    pieces: int
    pairs: int
    by_hand: float
    elastic: float
    overhead: Estimate
    control: Estimate
    cpu: Estimate
    verdict: str


def median_of(values: Sequence[float], seed: int = 0) -> Estimate:
    """Return the median and its bootstrap interval.

    The interval's ends are percentiles of the medians of resampled values.
    """
    rng = random.Random(seed)
    medians = sorted(
        statistics.median(rng.choices(values, k=len(values))) for _ in range(RESAMPLES)
    )
    return Estimate(
        statistics.median(values), medians[int(0.025 * RESAMPLES)], medians[int(0.975 * RESAMPLES)]
    )


def judge(overhead: Estimate, pairs: int) -> str:
    """Return the verdict of an interval on the promise; a few pairs leave it open."""
    if pairs < ENOUGH:
        return "open"
    return "holds" if overhead.high <= PROMISE else "broken" if overhead.low > PROMISE else "open"


@dataclass(frozen=True)
class _Took:
    wall: float
    cpu: float


def compare(workload: Workload, *, pairs: int, seconds: float, seed: int = 0) -> Result:
    """Run both loops in turns.

    Args:
        workload: what to train.
        pairs: steps of each loop at most.
        seconds: time at most; ten pairs are run all the same.
        seed: of the order.
    """
    rng = random.Random(seed)
    found: list[dict[str, _Took]] = []
    with make_runtime(workload) as mbs:

        def elastic() -> object:
            return mbs.backward(workload.loss_fn, workload.batch)

        def step(run: Callable[[], object]) -> _Took:
            workload.model.zero_grad()
            wait(workload.device)
            cpu = time.process_time()
            wall = time.perf_counter()
            run()
            wait(workload.device)
            return _Took(time.perf_counter() - wall, time.process_time() - cpu)

        for _ in range(WARM):
            step(elastic)
        began = time.perf_counter()
        while len(found) < pairs and (len(found) < 10 or time.perf_counter() - began < seconds):
            took: dict[str, _Took] = {}
            for loop in rng.sample(["by hand", "elastic", "control"], 3):
                took[loop] = step(elastic if loop == "elastic" else workload.by_hand)
            found.append(took)

    def ratio(of: str, clock: Callable[[_Took], float]) -> Estimate:
        return median_of([clock(took[of]) / clock(took["by hand"]) - 1 for took in found])

    overhead = ratio("elastic", lambda took: took.wall)
    return Result(
        name=workload.name,
        size=workload.size,
        pieces=-(-workload.samples // workload.size),
        pairs=len(found),
        by_hand=statistics.median(took["by hand"].wall for took in found),
        elastic=statistics.median(took["elastic"].wall for took in found),
        overhead=overhead,
        control=ratio("control", lambda took: took.wall),
        cpu=ratio("elastic", lambda took: took.cpu),
        verdict=judge(overhead, len(found)),
    )


def keep_freed_memory() -> None:
    """Tell glibc to keep freed memory, in one arena for all threads.

    Does nothing with another C library.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError, TypeError):
        return
    trim_threshold, mmap_threshold, arena_max = -1, -3, -8  # malloc.h
    mallopt(arena_max, 1)
    mallopt(trim_threshold, 2**30)
    mallopt(mmap_threshold, 2**25)  # the largest value that it takes


def environment(device: torch.device) -> dict[str, object]:
    """Return the machine and the versions behind the figures."""
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "device": str(device) if device.type == "cpu" else torch.cuda.get_device_name(device),
        "load": os.getloadavg() if hasattr(os, "getloadavg") else None,
    }


def table(results: Sequence[Result]) -> str:
    """Return the results as text."""
    head = (
        f"{'':6} {'pieces':>8} {'pairs':>5} {'by hand':>9} {'elastic':>9}  "
        f"{'overhead, median [95 %]':28} {'control':28} {'CPU time':28} ≤ 1 %"
    )
    lines = (
        f"{r.name:6} {f'{r.pieces} × {r.size}':>8} {r.pairs:5} {1e3 * r.by_hand:6.1f} ms "
        f"{1e3 * r.elastic:6.1f} ms  "
        f"{r.overhead!s:28} {r.control!s:28} {r.cpu!s:28} {r.verdict}"
        for r in results
    )
    return "\n".join([head, *lines])


def breakdown_text(name: str, loop: Loop, rows: Sequence[Row]) -> str:
    """Return one workload's breakdown as text."""
    opcodes = (
        f"{loop.opcodes_per_call:,.0f} and {loop.opcodes_per_piece:,.0f} operations of Python's"
    )
    lines = [
        f"{name}: elastic minus by hand: {loop.per_call:.0f} µs a call + {loop.per_piece:.1f} µs "
        f"a piece ({opcodes})"
    ]
    lines += [
        f"  in {pieces} pieces: {micros:.0f} µs a step" for pieces, micros in loop.extra.items()
    ]
    lines += [
        f"  {row.part:60} {row.micros:9.1f} µs a call, run {row.times:.0f} times"
        for row in [*rows[:SHOWN], rows[-1]]
    ]
    return "\n".join(lines)


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "workloads",
        nargs="*",
        metavar="WORKLOAD",
        help=f"of {', '.join(MAKERS)} (default: {' '.join(FOR_THE_TABLE)})",
    )
    parser.add_argument("--device", default="cpu", help="cpu (default) or cuda")
    parser.add_argument(
        "--pairs", type=int, default=200, help="steps of each loop at most, for each workload"
    )
    parser.add_argument(
        "--seconds", type=float, default=60.0, help="seconds at most, for each workload"
    )
    parser.add_argument(
        "--step-ms",
        type=float,
        default=55.0,
        help="what a step takes at least: pieces are made large enough",
    )
    parser.add_argument(
        "--threads",
        type=int,
        default=1,
        help="torch's threads on the CPU; with one, neighbours disturb least",
    )
    parser.add_argument(
        "--trim",
        action="store_true",
        help="let glibc give freed memory back to the kernel, as it does by default",
    )
    parser.add_argument(
        "--breakdown", action="store_true", help="say where the microseconds go, instead"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    return parser


def measured(options: argparse.Namespace, device: torch.device) -> Iterator[Result]:
    """Yield the results of all workloads that were asked for."""
    for name in options.workloads or FOR_THE_TABLE:
        workload = calibrated(name, device, options.step_ms / 1e3)
        yield compare(workload, pairs=options.pairs, seconds=options.seconds)


def broken_down(
    options: argparse.Namespace, device: torch.device
) -> Iterator[tuple[str, dict[str, object]]]:
    """Yield the breakdown of each workload that was asked for, by its name, and print it."""
    for name in options.workloads or FOR_THE_BREAKDOWN:
        workload = MAKERS[name](4, device)
        loop = per_call_and_piece(workload, options.pairs, options.seconds / 2)
        rows = by_part(workload, options.pairs, options.seconds / 2)
        print(breakdown_text(name, loop, rows), flush=True)
        yield name, {**asdict(loop), "parts": [asdict(row) for row in rows]}


def keep(report: Mapping[str, object], path: Path | None) -> None:
    """Write the figures so far, so that a run that is ended early leaves them."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(report, indent=1) + "\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print; return 1 where the promise is broken for sure."""
    parser = make_parser()
    options = parser.parse_args(arguments)
    unknown = [name for name in options.workloads if name not in MAKERS]
    if unknown:
        parser.error(f"there is no workload {unknown[0]!r}: there is {', '.join(MAKERS)}")
    device = torch.device(options.device)
    if device.type == "cuda":
        if not torch.cuda.is_available():
            parser.error("--device cuda, but torch sees no CUDA device")
        device = torch.device("cuda", torch.cuda.current_device())
    if not options.trim:
        keep_freed_memory()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    report: dict[str, Any] = {"environment": environment(device)}
    results: list[Result] = []
    if options.breakdown:
        for name, part in broken_down(options, device):
            report.setdefault("breakdown", {})[name] = part
            keep(report, options.json)
    else:
        for result in measured(options, device):
            results.append(result)
            print(table([result]), flush=True)
            report.setdefault("overhead", []).append(asdict(result))
            keep(report, options.json)
    return int(any(result.verdict == "broken" for result in results))


if __name__ == "__main__":
    sys.exit(main())
