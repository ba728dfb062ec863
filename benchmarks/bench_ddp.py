#!/usr/bin/env python3
"""Cost of a call in a job of many processes, against plain DDP or plain `fully_shard`.

    python benchmarks/bench_ddp.py [WORKLOAD …] [--kind fsdp2] [--pieces 1 4] [--loops LOOP …]

All loops train copies of one model on the same batches, in the same processes and over the same
process group. `--kind lockstep` is plain `fully_shard` against `mode="lockstep"`. Each round runs a
block of steps of every loop, in an order drawn for the round, so that neighbours on the machine hit
all alike. The figure is the median of the rounds' ratios to the plain loop, with a bootstrap
interval. A second plain loop shows the method's own reading where nothing differs. "one process" is
the part of the cost that is there without other ranks: a call on the bare model beyond a loop by
hand on it, as a part of the plain loop's step. "one all-gather" is the plain loop with one
`dist.all_gather` of as many numbers as ranks exchange at the end of a batch: the least that a step
costs in which all ranks hear of each other.
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
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import TCPStore
from torch.distributed.device_mesh import init_device_mesh
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
ALONE, BY_HAND = "one process", "by hand"
GATHER = "one all-gather"
NUMBERS = 25  # that a rank brings to a meeting


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
        loop: the loop that was compared with the plain one.
        rounds: blocks of each loop.
        plain: seconds of a step of the plain loop, median.
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


def wrapped(model: nn.Module, kind: str) -> nn.Module:
    """Return a copy of a model that all ranks train."""
    model = copy.deepcopy(model)
    if kind == "ddp":
        return DDP(model)
    from torch.distributed.fsdp import fully_shard  # its import takes half a second

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    lists = (each for each in model.modules() if isinstance(each, nn.ModuleList))
    for layer in next(lists, model).children():
        if any(True for _ in layer.parameters()):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


class _Loop:
    """A way to train, on its own copy of the model.

    Attributes:
        step: makes one training step.
        close: ends its runtime.
    """

    def __init__(self, name: str, model: nn.Module, batch: Tensor, pieces: int, kind: str) -> None:
        alone = name in (ALONE, BY_HAND)
        model = copy.deepcopy(model) if alone else wrapped(model, kind)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
        self.step: Callable[[], object]
        self.close: Callable[[], object] = lambda: None
        if name in (PLAIN, "control", BY_HAND):
            self.step = lambda: _plain(model, optimizer, batch, pieces)
            return
        if name == GATHER:
            own = torch.zeros(NUMBERS, dtype=torch.float64)
            all_ranks = list(own.repeat(dist.get_world_size(), 1))

            def step_and_gather() -> None:
                _plain(model, optimizer, batch, pieces)
                dist.all_gather(all_ranks, own)

            self.step = step_and_gather
            return
        mbs = ElasticMBS(
            model,
            micro_batch_size=-(-len(batch) // pieces),
            policy=Policy(grow=False),
            distributed=DistributedOptions(
                overlap=name == "overlap", mode="lockstep" if kind == "lockstep" else "local"
            ),
        )
        self.close = mbs.close
        guarded = name == "with optimizer_step"

        def step() -> None:
            mbs.backward(lambda x: loss_of(model, x), batch)
            if guarded:
                mbs.optimizer_step(optimizer)
            else:
                optimizer.step()
            optimizer.zero_grad()

        self.step = step


def _plain(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Tensor, pieces: int) -> None:
    for number, part in enumerate(batch.chunk(pieces), 1):
        with _syncing(model, last=number == pieces):
            (loss_of(model, part) / pieces).backward()
    optimizer.step()
    optimizer.zero_grad()


def _syncing(model: nn.Module, *, last: bool) -> AbstractContextManager[None]:
    """Return a block of a piece: gradients are summed over the ranks after the last one."""
    if isinstance(model, DDP):
        return nullcontext() if last else model.no_sync()
    sync = getattr(model, "set_requires_gradient_sync", None)  # of a model without shards: none
    if sync is not None:
        sync(last)
    return nullcontext()


LOOPS = (PLAIN, "control", GATHER, "elastic", "overlap", "with optimizer_step", ALONE, BY_HAND)


def calibrated(name: str, seconds: float, pieces: int, kind: str) -> int:
    """Return how many samples make a step of the plain loop that takes about `seconds`.

    Seconds of the processor of rank 0, which others on the machine disturb less.
    """
    samples = pieces
    while True:
        loop = _Loop(PLAIN, *MAKERS[name](samples), pieces, kind)
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
    """Run all loops in turns; return the results of all but the plain one."""
    kind = options.kind
    samples = calibrated(name, options.step_ms / 1e3, pieces, kind)
    model, batch = MAKERS[name](samples)
    wanted = (PLAIN, *options.loops) if options.loops else LOOPS
    if ALONE in wanted:
        wanted = (*wanted, BY_HAND)
    names = [each for each in LOOPS if each in wanted and (kind == "ddp" or each != "overlap")]
    loops = {each: _Loop(each, model, batch, pieces, kind) for each in names}
    for loop in loops.values():
        for _ in range(WARM):
            loop.step()
    rng = random.Random(0)  # the same order on every rank
    found: list[dict[str, tuple[float, float]]] = []
    began = time.perf_counter()
    late = torch.zeros(1)
    while not late.item():
        order = rng.sample(names, len(names))
        found.append({each: _block(loops[each], options.block) for each in order})
        late.fill_(float(time.perf_counter() - began > options.seconds))
        dist.broadcast(late, 0)
    for loop in loops.values():
        loop.close()

    def ratios(of: str, clock: int) -> Estimate:
        less = BY_HAND if of == ALONE else PLAIN
        return median_of(
            [(took[of][clock] - took[less][clock]) / took[PLAIN][clock] for took in found]
        )

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
        for each in names
        if each not in (PLAIN, BY_HAND)
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
        report |= {
            "kind": options.kind,
            "ranks": options.ranks,
            "ddp": [asdict(each) for each in results],
        }
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
    kinds = ("ddp", "fsdp2", "lockstep")
    parser.add_argument("--kind", choices=kinds, default="ddp", help="(default ddp)")
    parser.add_argument("--ranks", type=int, default=2, help="processes (default 2)")
    parser.add_argument("--pieces", type=int, nargs="+", default=[1, 4], help="of a batch")
    loops = [each for each in LOOPS if each not in (PLAIN, BY_HAND)]
    parser.add_argument(
        "--loops", nargs="+", choices=loops, help="only these, in more rounds (default all)"
    )
    parser.add_argument("--step-ms", type=float, default=20.0, help="of the plain loop, about")
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
