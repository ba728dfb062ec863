#!/usr/bin/env python3
"""Cost of a call in a job of many processes, against plain `DistributedDataParallel`.

    python benchmarks/bench_ddp.py [WORKLOAD …] [--ranks 2] [--pieces 1 4] [--json FILE]

All loops train copies of one model on the same batches, in the same processes and over the same
process group. Each round runs a block of steps of every loop, in an order drawn for the round, so
that neighbours on the machine hit all alike. The figure is the median of the rounds' ratios to
plain DDP, with a bootstrap interval. A second plain DDP shows the method's own reading where
nothing differs.
"""

from __future__ import annotations

import argparse
import copy
import json
import multiprocessing
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import TCPStore
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

# so that it runs from anywhere, installed or not
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.bench_overhead import Estimate, environment, keep_freed_memory, median_of
from benchmarks.workloads import Residuals, conv_net
from elastic_mbs import DistributedOptions, ElasticMBS, Policy
from elastic_mbs.cli.demo.gpt import GPT, GPTConfig

WARM = 10  # steps of a loop before any is measured
PLAIN = "plain"


def _mlp(samples: int) -> tuple[nn.Module, Tensor]:
    layers = [nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU()]
    layers += [nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10)]
    return nn.Sequential(*layers), torch.randn(samples, 256)


def _cnn(samples: int) -> tuple[nn.Module, Tensor]:
    return conv_net(32, 7), torch.randn(samples, 3, 16, 16)


def _gpt(samples: int) -> tuple[nn.Module, Tensor]:
    config = GPTConfig(context=64, width=128, heads=4, layers=4)
    return GPT(config), torch.randint(0, 256, (samples, 64))


def _deep(samples: int) -> tuple[nn.Module, Tensor]:
    return Residuals(100, 64), torch.randn(samples, 64)


MAKERS: dict[str, Callable[[int], tuple[nn.Module, Tensor]]] = {
    "mlp": _mlp,
    "cnn": _cnn,
    "gpt": _gpt,
    "deep": _deep,
}


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    """Return a loss that is a mean over samples."""
    out = model(x)
    if x.dtype == torch.int64:
        return F.cross_entropy(out[:, :-1].flatten(0, 1), x[:, 1:].flatten())
    return F.cross_entropy(out, (x.flatten(1)[:, 0] > 0).long())


@dataclass(frozen=True)
class Result:
    """A loop's outcome on one workload.

    Attributes:
        workload: its name.
        pieces: of a batch.
        loop: the loop that was compared with plain DDP.
        rounds: blocks of each loop.
        plain: seconds of a step of plain DDP, median.
        took: seconds of a step, median.
        wall: took / plain - 1, round by round.
        cpu: the same in processor time of one rank, its threads for gloo included.
    """

    workload: str
    pieces: int
    loop: str
    rounds: int
    plain: float
    took: float
    wall: Estimate
    cpu: Estimate


class _Loop:
    """A way to train, on its own copy of the model.

    Attributes:
        step: makes one training step.
        close: ends its runtime.
    """

    def __init__(self, name: str, model: nn.Module, batch: Tensor, pieces: int) -> None:
        ddp = DDP(copy.deepcopy(model))
        optimizer = torch.optim.SGD(ddp.parameters(), lr=1e-4)
        self.step: Callable[[], object]
        self.close: Callable[[], object] = lambda: None
        if name in (PLAIN, "control"):
            self.step = lambda: _plain(ddp, optimizer, batch, pieces)
            return
        size = -(-len(batch) // pieces)
        overlap = name == "overlap"
        mbs = ElasticMBS(
            ddp,
            micro_batch_size=size,
            policy=Policy(grow=False),
            distributed=DistributedOptions(overlap=overlap),
        )
        self.close = mbs.close
        guarded = name == "with optimizer_step"

        def step() -> None:
            mbs.backward(lambda x: loss_of(ddp, x), batch)
            if guarded:
                mbs.optimizer_step(optimizer)
            else:
                optimizer.step()
            optimizer.zero_grad()

        self.step = step


def _plain(ddp: DDP, optimizer: torch.optim.Optimizer, batch: Tensor, pieces: int) -> None:
    parts = batch.chunk(pieces)
    for number, part in enumerate(parts, 1):
        with ddp.no_sync() if number < pieces else nullcontext():
            (loss_of(ddp, part) / pieces).backward()
    optimizer.step()
    optimizer.zero_grad()


LOOPS = (PLAIN, "control", "elastic", "overlap", "with optimizer_step")


def calibrated(name: str, seconds: float, pieces: int) -> int:
    """Return how many samples make a step of plain DDP that takes about `seconds`.

    Seconds of the processor of rank 0, which others on the machine disturb less.
    """
    samples = pieces
    while True:
        loop = _Loop(PLAIN, *MAKERS[name](samples), pieces)
        took = min(_block(loop, 2)[1] for _ in range(4))
        verdict = torch.tensor([float(took)])
        dist.broadcast(verdict, 0)
        if verdict.item() >= 0.9 * seconds:
            return samples
        factor = min(8.0, max(1.1, seconds / verdict.item()))
        samples = pieces * max(samples // pieces + 1, round(samples * factor / pieces))


def _block(loop: _Loop, steps: int) -> tuple[float, float]:
    """Return seconds of a step, by the clock and of this rank's processor, from a common start."""
    dist.barrier()
    cpu, wall = time.process_time(), time.perf_counter()
    for _ in range(steps):
        loop.step()
    return (time.perf_counter() - wall) / steps, (time.process_time() - cpu) / steps


def compare(name: str, pieces: int, options: argparse.Namespace) -> list[Result]:
    """Run all loops in turns; return the results of all but plain DDP."""
    samples = calibrated(name, options.step_ms / 1e3, pieces)
    model, batch = MAKERS[name](samples)
    loops = {each: _Loop(each, model, batch, pieces) for each in LOOPS}
    for loop in loops.values():
        for _ in range(WARM):
            loop.step()
    rng = random.Random(0)  # the same order on every rank
    found: list[dict[str, tuple[float, float]]] = []
    began = time.perf_counter()
    late = torch.zeros(1)
    while not late.item():
        found.append(
            {each: _block(loops[each], options.block) for each in rng.sample(LOOPS, len(LOOPS))}
        )
        late.fill_(float(time.perf_counter() - began > options.seconds))
        dist.broadcast(late, 0)
    for loop in loops.values():
        loop.close()

    def ratios(of: str, clock: int) -> Estimate:
        return median_of([took[of][clock] / took[PLAIN][clock] - 1 for took in found])

    def median(of: str) -> float:
        return statistics.median(took[of][0] for took in found)

    return [
        Result(
            workload=name,
            pieces=pieces,
            loop=each,
            rounds=len(found),
            plain=median(PLAIN),
            took=median(each),
            wall=ratios(each, 0),
            cpu=ratios(each, 1),
        )
        for each in LOOPS
        if each != PLAIN
    ]


def line(result: Result) -> str:
    """Return a result as one line."""
    return (
        f"{result.workload:5} {result.pieces:2} pieces  {result.loop:20} "
        f"{1e3 * result.plain:6.1f} → {1e3 * result.took:6.1f} ms  "
        f"{result.wall!s:30} CPU time {result.cpu!s:30} {result.rounds} rounds"
    )


def rank(number: int, port: int, options: argparse.Namespace) -> None:
    """Run one rank; the first prints and writes the results."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    keep_freed_memory()
    store = TCPStore("127.0.0.1", port, options.ranks, is_master=False)
    dist.init_process_group(
        "gloo",
        rank=number,
        world_size=options.ranks,
        store=store,
        timeout=timedelta(minutes=5),
    )
    results = []
    for name in options.workloads or ("mlp", "gpt"):
        for pieces in options.pieces:
            torch.manual_seed(0)
            for result in compare(name, pieces, options):
                results.append(result)
                if number == 0:
                    print(line(result), flush=True)
    if number == 0 and options.json is not None:
        report: dict[str, Any] = {"environment": environment(torch.device("cpu"))}
        report |= {"ranks": options.ranks, "ddp": [asdict(each) for each in results]}
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    dist.barrier()
    dist.destroy_process_group()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the job, and return 1 where a rank has failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("workloads", nargs="*", metavar="WORKLOAD", help=f"of {', '.join(MAKERS)}")
    parser.add_argument("--ranks", type=int, default=2, help="processes (default 2)")
    parser.add_argument("--pieces", type=int, nargs="+", default=[1, 4], help="of a batch")
    parser.add_argument("--step-ms", type=float, default=20.0, help="of plain DDP, about")
    parser.add_argument("--block", type=int, default=8, help="steps in a row of one loop")
    parser.add_argument("--seconds", type=float, default=20.0, help="of each comparison")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    options = parser.parse_args(arguments)
    unknown = [name for name in options.workloads if name not in MAKERS]
    if unknown:
        parser.error(f"there is no workload {unknown[0]!r}: there is {', '.join(MAKERS)}")
    store = TCPStore("127.0.0.1", 0, options.ranks, is_master=True, wait_for_workers=False)
    context = multiprocessing.get_context("spawn")
    ranks = [
        context.Process(target=rank, args=(number, store.port, options))
        for number in range(options.ranks)
    ]
    for each in ranks:
        each.start()
    for each in ranks:
        each.join()
    return int(any(each.exitcode for each in ranks))


if __name__ == "__main__":
    sys.exit(main())
