#!/usr/bin/env python3
"""What it costs to bring pieces from the host's memory, against a batch that lies on the device already.

    python tools/streaming.py [WORKLOAD …] [--device cuda] [--json FILE]

The same runtime trains the same model on the same pieces, in turns, in an order drawn for each pair: once from pinned host memory, once from a copy
on the device. Two figures: the median of the pairs' ratios of time, with a bootstrap interval; and what the two peaks of device memory say. The batch
on the device is held whole. Of the one on the host only the running piece may be on the device, so its peak is lower by the rest of the batch.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from torch.utils._pytree import tree_leaves

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that it runs from anywhere, installed or not

from elastic_mbs.batch.view import map_tensors
from tools.bench_overhead import Estimate, environment, median_of
from tools.breakdown import WARM, make_runtime
from tools.workloads import MAKERS, PIECES, Workload, calibrated, wait

FOR_THE_TABLE = ("cnn", "mlp")


@dataclass(frozen=True)
class Memory:
    """Device memory of a step, in bytes, above what is there without a batch.

    Attributes:
        batch: the whole batch on the device.
        piece: its largest piece.
        host: peak with the batch on the host.
        device: peak with the batch on the device, the batch included.
    """

    batch: int
    piece: int
    host: int
    device: int

    @property
    def added(self) -> int:
        """What streaming holds of the batch at the peak."""
        return self.host - (self.device - self.batch)

    def problem(self) -> str | None:
        """What is wrong, or None: streaming holds more than one piece."""
        if self.added <= self.piece:
            return None
        return f"the batch on the host adds {self.added} bytes to the peak of the step, more than one piece ({self.piece} bytes)"


@dataclass(frozen=True)
class Result:
    """One workload's outcome.

    Attributes:
        name: the workload.
        size: samples per piece.
        pairs: steps of each kind.
        host: seconds of a step from host memory, median.
        device: seconds of a step on the device's own batch, median.
        cost: host / device - 1.
        memory: None on a CPU, where both are the same memory.
        problem: what is wrong, or None.
    """

    name: str
    size: int
    pairs: int
    host: float
    device: float
    cost: Estimate
    memory: Memory | None
    problem: str | None


def on_device(workload: Workload) -> Workload:
    """The same with a copy of its batch on its device."""
    return replace(workload, batch=map_tensors(workload.batch, lambda tensor: tensor.to(workload.device, copy=True)))


def nbytes(batch: object) -> int:
    """Bytes of a batch's tensors."""
    return sum(leaf.nbytes for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor))


def measure(workload: Workload, *, pairs: int, seconds: float, seed: int = 0) -> Result:
    """Trains from both batches in turns.

    Args:
        workload: its batch is on the host.
        pairs: steps of each kind at most.
        seconds: time at most; ten pairs are run all the same.
        seed: of the order.
    """
    rng = random.Random(seed)
    found: list[dict[str, float]] = []
    with make_runtime(workload) as mbs:

        def step(batch: object) -> float:
            workload.model.zero_grad(set_to_none=False)
            wait(workload.device)
            began = time.perf_counter()
            mbs.backward(workload.loss_fn, batch)
            wait(workload.device)
            return time.perf_counter() - began

        for _ in range(WARM):
            step(workload.batch)
        memory = _memory(workload, step) if workload.device.type == "cuda" else None
        batches = {"host": workload.batch, "device": on_device(workload).batch}
        for batch in batches.values():
            step(batch)
        began = time.perf_counter()
        while len(found) < pairs and (len(found) < 10 or time.perf_counter() - began < seconds):
            found.append({name: step(batches[name]) for name in rng.sample(sorted(batches), 2)})
    return Result(
        name=workload.name,
        size=workload.size,
        pairs=len(found),
        host=statistics.median(took["host"] for took in found),
        device=statistics.median(took["device"] for took in found),
        cost=median_of([took["host"] / took["device"] - 1 for took in found]),
        memory=memory,
        problem=None if memory is None else memory.problem(),
    )


def _memory(workload: Workload, step: Callable[[object], object]) -> Memory:
    """Peaks of both kinds of step, by the allocator's statistics, above what is held without a batch on the device."""
    device = workload.device

    def requested(when: str) -> int:  # what was asked for, not what it was rounded to
        return int(torch.cuda.memory_stats(device)[f"requested_bytes.all.{when}"])

    base = requested("current")

    def peak(batch: object) -> int:
        torch.cuda.reset_peak_memory_stats(device)
        step(batch)
        return requested("peak") - base

    host = peak(workload.batch)
    there = on_device(workload).batch
    batch = requested("current") - base
    return Memory(batch, nbytes(workload.piece(0, workload.size)), host, peak(there))


def line(result: Result) -> str:
    """A result as text."""
    times = f"{1e3 * result.host:.1f} ms from the host, {1e3 * result.device:.1f} ms from the device"
    head = f"{result.name}: {times}, {result.cost} ({result.pairs} pairs)"
    if result.memory is None:
        return head
    memory = result.memory
    return (
        f"{head}; peak {memory.host} bytes with the batch on the host, {memory.device} with it on the device ({memory.batch} bytes):"
        f" {memory.added} bytes of a batch are there at once, of {memory.piece} in a piece{'' if result.problem is None else ': TOO MUCH'}"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures and prints; returns 1 where more than a piece of the batch is on the device."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workloads", nargs="*", metavar="WORKLOAD", help=f"of {', '.join(MAKERS)} (default: {' '.join(FOR_THE_TABLE)})")
    parser.add_argument("--device", default="cpu", help="cpu (default) or cuda")
    parser.add_argument("--pairs", type=int, default=200, help="steps of each kind at most, for each workload")
    parser.add_argument("--seconds", type=float, default=20.0, help="seconds at most, for each workload")
    parser.add_argument("--step-ms", type=float, default=20.0, help="what a step takes at least: pieces are made large enough")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    options = parser.parse_args(arguments)
    unknown = [name for name in options.workloads if name not in MAKERS]
    if unknown:
        parser.error(f"there is no workload {unknown[0]!r}: there is {', '.join(MAKERS)}")
    device = torch.device(options.device)
    if device.type == "cuda":
        if not torch.cuda.is_available():
            parser.error("--device cuda, but torch sees no CUDA device")
        device = torch.device("cuda", torch.cuda.current_device())
    torch.set_num_threads(1)
    torch.manual_seed(0)
    results = []
    for name in options.workloads or FOR_THE_TABLE:
        workload = calibrated(name, device, options.step_ms / 1e3)
        results.append(measure(workload, pairs=options.pairs, seconds=options.seconds))
        print(line(results[-1]), flush=True)
    if options.json is not None:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        report = {"environment": environment(device), "pieces": PIECES, "streaming": [asdict(result) for result in results]}
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    return int(any(result.problem is not None for result in results))


if __name__ == "__main__":
    sys.exit(main())
