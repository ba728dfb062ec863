"""The demo as a job of several ranks: one rank's memory is taken away for a while.

Each rank trains on its part of every batch. The undisturbed run is one process with whole batches.
"""

from __future__ import annotations

import copy
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from elastic_mbs.cli.demo.compare import (
    ROUNDING,
    Notes,
    Options,
    Outcome,
    Setting,
    largest_difference,
    measure,
    prepare,
)
from elastic_mbs.cli.demo.gpt import GPT
from elastic_mbs.cli.demo.run import train, train_plainly
from elastic_mbs.cli.demo.tenant import Script, TenantMove, limited, write_script
from elastic_mbs.cli.demo.text import Batch
from elastic_mbs.errors import UsageError
from elastic_mbs.events import CallDone, Event, format_bytes

COMMAND = "torchrun --nproc-per-node 2 -m elastic_mbs demo --distributed"

Kind = Literal["ddp", "fsdp2"]
KINDS: dict[Kind, str] = {"ddp": "DistributedDataParallel", "fsdp2": "fully_shard"}


class Figures(NamedTuple):
    """The figures of one rank."""

    ooms: int
    replayed: int  # samples
    sizes: list[int]  # micro-batch sizes that it had
    seconds: float
    moves: list[tuple[float, TenantMove]]


@dataclass(frozen=True)
class JobOutcome(Outcome):
    """Both runs, seen from rank 0."""

    ranks: tuple[Figures, ...] = ()
    backend: str = "gloo"  # of the process group

    @property
    def ooms(self) -> int:
        """Out-of-memory errors survived by all ranks."""
        return sum(rank.ooms for rank in self.ranks)


class RankNotes(Notes):
    """Notes of a rank: rank 0 tells of steps, each of what happens to it."""

    def __init__(self, steps: int, budget: int, rank: int) -> None:
        super().__init__(steps, budget)
        self._rank = rank

    def steps_of(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """Yield the batches; a step is over when the next batch is asked for."""
        if self._rank == 0:
            yield from super().steps_of(batches)
        else:
            yield from batches

    def event(self, event: Event) -> None:
        """Keep an event, and print it."""
        self.events.append(event)
        if not isinstance(event, CallDone):
            print(f"    rank {self._rank}: {event.line()}", flush=True)


def begin(options: Options, kind: Kind) -> tuple[int, int, Options]:
    """Join the job; return this rank, how many there are, and the options with its device.

    Raises:
        UsageError: this process was not started by torchrun, or alone, or a batch has too few
            documents.
    """
    if not dist.is_available() or "RANK" not in os.environ:
        raise UsageError(f"--distributed is for a job of several processes: {COMMAND} {kind}")
    world = int(os.environ["WORLD_SIZE"])
    if world < 2 or options.batch < 2 * world:
        raise UsageError(
            f"--distributed with {world} ranks and --batch {options.batch}: at least two ranks are "
            f"needed, and two documents for each: {COMMAND} {kind}"
        )
    device, backend = torch.device("cpu"), "gloo"
    if options.device.type == "cuda":  # cuda-only
        devices = torch.cuda.device_count()
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % devices)
        torch.cuda.set_device(device)
        if int(os.environ["LOCAL_WORLD_SIZE"]) <= devices:  # NCCL refuses two ranks on one device
            backend = "nccl"
    dist.init_process_group(backend)
    return dist.get_rank(), world, replace(options, device=device)


def set_up(options: Options, world: int) -> Setting:
    """Return the start of both runs; the budget is that of the rank with a co-tenant."""
    setting = prepare(options)
    if options.budget is None:
        share = setting.loader.longest(options.batch // world)
        whole = measure(setting.model, share, options.device)
        setting = replace(setting, budget=max(3 * setting.one, round(0.3 * whole)))
    return replace(setting, budget=setting.budget + _beside(setting))


def _beside(setting: Setting) -> int:
    """Return the bytes that a rank holds beside those of a lone process.

    They are DDP's own buckets and those of the sums. Shards, and the memory of their collectives,
    take no more: a rank has only a part of the optimizer's state.
    """
    return 2 * sum(parameter.nbytes for parameter in setting.model.parameters())


def _wrapped(model: GPT, kind: Kind, device: torch.device) -> nn.Module:
    """Return the model in DDP, or sharded by block."""
    if kind == "ddp":
        return DDP(model, device_ids=None if device.type == "cpu" else [device])
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard  # its import takes half a second

    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


@torch.no_grad()
def _whole(model: GPT, like: GPT) -> GPT:
    """Return a model with the values of all shards. Every rank calls it."""
    whole = copy.deepcopy(like)
    for parameter, mine in zip(whole.parameters(), model.parameters(), strict=True):
        gather = getattr(mine, "full_tensor", None)  # of a DTensor
        parameter.copy_(mine if gather is None else gather())
    return whole


def run_job(setting: Setting, rank: int, world: int, kind: Kind) -> JobOutcome | None:
    """Train on all ranks, and on rank 0 once more without limits; return its outcome there."""
    options = setting.options
    device, disturbed = options.device, rank == world - 1
    model = copy.deepcopy(setting.model).to(device)
    wrapped = _wrapped(model, kind, device)
    notes = RankNotes(options.steps, setting.budget, rank)
    began = time.perf_counter()
    with limited(setting.budget, device) if disturbed else nullcontext() as leave:

        def make(move: TenantMove) -> None:
            notes.moved(move)
            assert leave is not None
            leave(move.left)

        floor = round(1.25 * setting.one) + _beside(setting)
        moves = write_script(options.steps, setting.budget, floor) if disturbed else []
        script = Script(moves, lambda: len(notes.results), make)
        model.blocks[-1].register_forward_hook(script.forward)
        mine = ({key: rows[rank::world] for key, rows in batch.items()} for batch in setting.loader)
        train(wrapped, notes.steps_of(mine), notes.event, notes.results.append, options.log)
    seconds = time.perf_counter() - began
    ranks = _gathered(notes, seconds, world)
    trained = _whole(model, setting.model)
    if rank:
        return None
    notes.moves = ranks[-1].moves
    between = time.perf_counter()
    twin, reference = copy.deepcopy(setting.model).to(device), list[float]()
    whole = ({key: rows.to(device) for key, rows in batch.items()} for batch in setting.loader)
    train_plainly(twin, whole, reference.append)
    return JobOutcome(
        notes,
        reference,
        largest_difference(trained.to(device), twin),
        seconds,
        time.perf_counter() - between,
        ROUNDING[options.dtype],
        ranks,
        dist.get_backend(),
    )


def _gathered(notes: Notes, seconds: float, world: int) -> tuple[Figures, ...]:
    """Return the figures of all ranks, once each of them has closed its log."""
    results = notes.results
    own = Figures(
        ooms=sum(result.ooms for result in results),
        replayed=sum(result.replayed_samples for result in results),
        sizes=sorted({result.micro_batch_size for result in results}),
        seconds=seconds,
        moves=notes.moves,
    )
    found: list[Figures] = [own] * world
    dist.all_gather_object(found, own)
    return tuple(found)


def introduction(setting: Setting, world: int, kind: Kind) -> str:
    """Return the introduction of the job."""
    options = setting.options
    return (
        f"A GPT of {sum(parameter.numel() for parameter in setting.model.parameters()):,} "
        f"parameters in {KINDS[kind]} on {world} ranks, "
        f"{str(options.dtype).removeprefix('torch.')} on {options.device}.\n"
        f"{options.steps} steps of {options.batch} documents, each rank with its part. Rank "
        f"{world - 1} has {format_bytes(setting.budget)}, which a co-tenant takes a part of for a "
        "while; the others have no limit.\n"
    )


def summary(outcome: JobOutcome) -> Mapping[str, str]:
    """Return the figures of the job, by name."""
    largest = max(outcome.differences)
    step = outcome.differences.index(largest) + 1
    return {
        "largest difference": f"{largest:.1e} of the loss (step {step}), {outcome.weight:.1e} of a "
        "weight at the end",
        "counts as rounding": f"up to {outcome.rounding.loss:.0e} of the loss, "
        f"{outcome.rounding.weight:.0e} of a weight",
        **{
            f"rank {number}": f"{rank.ooms} out-of-memory errors survived, {rank.replayed} samples "
            f"replayed, micro-batch sizes {', '.join(map(str, rank.sizes))}"
            for number, rank in enumerate(outcome.ranks)
        },
        "time": f"{outcome.seconds:.1f} s on {len(outcome.ranks)} ranks over {outcome.backend}, "
        f"{outcome.reference_seconds:.1f} s in one process without limits",
    }
