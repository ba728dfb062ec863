#!/usr/bin/env python3
"""Cost of a call without events in this tree and in another one, in turns in one process.

    git worktree add --detach ../other COMMIT
    python benchmarks/against.py ../other [WORKLOAD] [--pieces 1 6] [--rounds 1200]

Each round runs the loop by hand and both trees on the same model and batch, in an order drawn for
the round. Figures are medians of differences in processor time, with a bootstrap interval.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import random
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

# so that it runs from anywhere, installed or not
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.bench_overhead import keep_freed_memory, median_of
from benchmarks.breakdown import WARM
from benchmarks.workloads import MAKERS, Workload, with_pieces

HERE = Path(__file__).resolve().parents[1]
HAND, OTHER, THIS = "by hand", "other tree", "this tree"
Modules = Mapping[str, ModuleType]


def modules_of(root: Path) -> Modules:
    """Import the package and its benchmarks from a tree, and return their modules by name."""
    for name in [name for name in sys.modules if _is_ours(name)]:
        del sys.modules[name]
    sys.path.insert(0, str(root))
    importlib.import_module("benchmarks.breakdown")
    sys.path.remove(str(root))
    found = {name: module for name, module in sys.modules.items() if _is_ours(name)}
    origin = found["elastic_mbs"].__file__
    if origin is None or not Path(origin).is_relative_to(root):
        raise SystemExit(f"{root} has no elastic_mbs: it was imported from {origin}")
    return found


def _is_ours(name: str) -> bool:
    return name.partition(".")[0] in ("elastic_mbs", "benchmarks")


def measured(
    workload: Workload, trees: Mapping[str, Modules], rounds: int
) -> dict[str, list[float]]:
    """Return the microseconds of each loop in each round."""
    runs: dict[str, Callable[[], Any]] = {HAND: workload.by_hand}
    for name, modules in trees.items():
        sys.modules.update(modules)
        make: Any = modules["benchmarks.breakdown"]
        mbs = make.make_runtime(workload)
        runs[name] = partial(mbs.backward, workload.loss_fn, workload.batch)
        for _ in range(3 * WARM):
            workload.model.zero_grad()
            runs[name]()
    found: dict[str, list[float]] = {name: [] for name in runs}
    rng = random.Random(0)
    gc.collect()
    gc.disable()  # a collection would hit one loop and not the other
    for _ in range(rounds):
        for name in rng.sample(list(runs), len(runs)):
            sys.modules.update(trees.get(name, {}))  # for imports inside functions
            workload.model.zero_grad()
            began = time.thread_time()
            runs[name]()
            found[name].append(1e6 * (time.thread_time() - began))
    gc.enable()
    return found


def told(found: Mapping[str, Sequence[float]], one: str, other: str) -> str:
    """Return the median difference of two loops in words."""
    pairs = zip(found[one], found[other], strict=True)
    gap = median_of([first - second for first, second in pairs])
    return f"{one} - {other}: {gap.median:.1f} µs [{gap.low:.1f}, {gap.high:.1f}]"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("other", type=Path, help="root of the other tree")
    parser.add_argument("workload", nargs="?", default="tiny", choices=sorted(MAKERS))
    parser.add_argument("--pieces", type=int, nargs="+", default=[1, 6])
    parser.add_argument("--rounds", type=int, default=1200)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    keep_freed_memory()
    trees = {OTHER: modules_of(options.other.resolve()), THIS: modules_of(HERE)}
    workload = MAKERS[options.workload](4, torch.device("cpu"))
    for pieces in options.pieces:
        found = measured(with_pieces(workload, pieces), trees, options.rounds)
        gaps = [(OTHER, HAND), (THIS, HAND), (THIS, OTHER)]
        print(f"{pieces} pieces:", *(told(found, *gap) for gap in gaps), sep="\n  ", flush=True)


if __name__ == "__main__":
    main()
