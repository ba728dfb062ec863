"""Sums that begin while the last backward runs: what keeps them exact and free of hangs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.checkpoint import checkpoint

from elastic_mbs import DistributedOptions, ElasticMBS, GradientOptions, Policy, UsageError
from elastic_mbs.distributed import buckets, overlap, replicas
from stress.ranks.job import run_ranks, values
from stress.ranks.losses import data
from tests.helpers.ddp import caught, joined, net, worst


def square(out: Tensor) -> Tensor:
    return out.pow(2).mean()


def small_buckets() -> None:
    """Let a small model have several buckets, in this process."""
    buckets.FIRST = buckets.CAP = 300


def recorded_sums() -> list[bool]:
    """Return a list that notes of each sum that begins whether a backward runs."""
    found: list[bool] = []
    begin = dist.all_reduce

    def all_reduce(*args: Any, **options: Any) -> Any:
        found.append(torch._C._current_graph_task_id() >= 0)
        return begin(*args, **options)

    dist.all_reduce = all_reduce
    return found


class Job:
    """A model on one rank, its runtime, and the same model in one process."""

    def __init__(self, rank: int, world: int, *, size: int = 3, overlap: bool = True) -> None:
        small_buckets()
        self.rank, self.world = rank, world
        self.model, self.reference = net(), net()
        self.ddp = DDP(self.model)
        self.mbs = ElasticMBS(
            self.ddp,
            micro_batch_size=size,
            policy=Policy(grow=False),
            distributed=DistributedOptions(timeout=8, overlap=overlap),
        )
        self.fails: Callable[[Tensor], None] = lambda hidden: None

    def loss(self, x: Tensor) -> Tensor:
        hidden = self.ddp.module[0](x)
        self.fails(hidden)
        return square(self.model[1:](hidden))

    def call(self, step: int) -> float:
        """Make one call; return the error of its gradient."""
        self.mbs.backward(self.loss, data(self.rank, step, 6))
        square(self.reference(joined([data(r, step, 6) for r in range(self.world)]))).backward()
        error = worst(self.model, self.reference)
        self.clear()
        return error

    def clear(self) -> None:
        self.model.zero_grad()
        self.reference.zero_grad()


def sums_of_calls(rank: int, world: int, overlap: bool) -> tuple[list[int], int, float]:
    job = Job(rank, world, overlap=overlap)
    sums = recorded_sums()
    inside, error = [], 0.0
    for step in range(4):
        sums.clear()
        error = max(error, job.call(step))
        inside.append(sum(sums))
    return inside, len(sums), error


@pytest.mark.parametrize("overlap", [True, False])
def test_sums_begin_while_the_last_backward_runs(overlap: bool) -> None:
    # From the second call on: in the first one ranks have not met.
    for inside, begun, error in values(run_ranks(sums_of_calls, overlap)):
        assert inside == ([0, 4, 4, 4] if overlap else [0, 0, 0, 0])
        assert begun == 4
        assert error < 1e-12


# ---------------------------------------------------------------------- the four rules


class Shared(nn.Module):
    """Blocks with one weight, each in a backward of its own inside the backward."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.block = nn.Linear(4, 4), nn.Linear(4, 4)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for _ in range(2):
            x = torch.tanh(checkpoint(self.block, x, use_reentrant=True))
        return x


def leaves_that_commit_twice(rank: int, world: int) -> list[float]:
    small_buckets()
    model, reference = Shared(), Shared()
    ddp = DDP(model)
    errors = []
    with ElasticMBS(ddp, distributed=DistributedOptions(timeout=8, overlap=True)) as mbs:
        for step in range(3):
            mbs.backward(lambda x: square(ddp(x)), data(rank, step, 6))
            square(reference(joined([data(r, step, 6) for r in range(world)]))).backward()
            errors.append(worst(model, reference))
            model.zero_grad()
            reference.zero_grad()
    return errors


def test_a_bucket_is_not_sent_where_its_leaves_commit_again() -> None:
    for errors in values(run_ranks(leaves_that_commit_twice)):
        assert max(errors) < 1e-12


def error_after_a_sum_has_begun(rank: int, world: int) -> tuple[str, int, list[float]]:
    """The last backward of rank 1 raises an error after its first bucket was sent."""
    job = Job(rank, world)
    errors = [job.call(0), job.call(1)]
    sums = recorded_sums()

    def fail(gradient: Tensor) -> None:
        if sums:
            raise ValueError("a broken hook")

    if rank == 1:
        job.fails = lambda hidden: hidden.register_hook(fail)
    found = caught(lambda: job.call(2))
    inside = sum(sums)
    job.fails = lambda hidden: None
    job.clear()
    return found, inside, [*errors, job.call(3), job.call(4)]


def test_a_rank_that_has_failed_sends_the_rest_so_the_others_do_not_hang() -> None:
    (other, all_sent, first), (own, some_sent, second) = values(
        run_ranks(error_after_a_sum_has_begun)
    )
    assert own == "ValueError: a broken hook"
    assert other.endswith("rank 1: ValueError: a broken hook")
    assert (all_sent, some_sent) == (4, 2)
    assert max(first + second) < 1e-12


def centred(model: nn.Sequential, hidden: Tensor) -> Tensor:
    """Return a loss to which each sample's contribution depends on its piece."""
    return square(model[1:](hidden - hidden.mean(0)))


def shortage_after_a_sum_has_begun(rank: int, world: int) -> tuple[int, int, float]:
    """The last backward of rank 1 runs out of memory after its first bucket was sent."""
    small_buckets()
    model, reference = net(), net()
    ddp = DDP(model)
    sums, struck, fails = recorded_sums(), list[int](), False

    def fail(gradient: Tensor) -> None:
        if rank == 1 and fails and sums and not struck:
            struck.append(sum(sums))
            raise torch.OutOfMemoryError("injected: out of memory in backward")

    def loss_fn(x: Tensor) -> Tensor:
        hidden = model[0](x)
        hidden.register_hook(fail)
        return centred(model, hidden)

    with ElasticMBS(
        ddp,
        micro_batch_size=3,
        policy=Policy(grow=False),
        gradients=GradientOptions(verify="off"),
        distributed=DistributedOptions(timeout=8, overlap=True),
    ) as mbs:
        for step in range(3):
            model.zero_grad()
            sums.clear()
            fails = step == 2
            result = mbs.backward(loss_fn, data(rank, step, 6))
    inside = sum(sums)
    everyone: list[Any] = [None] * world
    dist.all_gather_object(everyone, result.partition)
    for each, partition in enumerate(everyone):
        for start, stop in partition:
            piece = data(each, 2, 6)[start:stop]
            loss = centred(reference, reference[0](piece)) * (stop - start) / (6 * world)
            loss.backward()
    return sum(struck), inside, worst(model, reference)


def test_a_batch_that_starts_over_after_a_sum_has_begun_is_summed_again() -> None:
    (_, all_sent, first), (struck, some_sent, second) = values(
        run_ranks(shortage_after_a_sum_has_begun)
    )
    assert struck == some_sent == 2  # a replay sends nothing from its backward
    assert all_sent == 4
    assert max(first, second) < 1e-12


def no_room_for_new_buckets(rank: int, world: int) -> tuple[str, list[float]]:
    """A layer is thawed, and one rank has no memory for buckets with it."""
    job = Job(rank, world)
    for model in (job.model, job.reference):
        model[2].requires_grad_(False)
    errors = [job.call(0), job.call(1)]
    for model in (job.model, job.reference):
        model[2].requires_grad_(True)
    make = buckets.Buckets

    def fail(leaves: Any, **options: Any) -> Any:
        if leaves:
            raise torch.OutOfMemoryError("injected: out of memory for buckets")
        return make(leaves, **options)

    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(replicas, "Buckets", fail)
        found = caught(lambda: job.call(2))
    job.clear()
    return found, [*errors, job.call(3), job.call(4), job.call(5)]


def test_buckets_are_sent_only_once_every_rank_has_them() -> None:
    (other, first), (own, second) = values(run_ranks(no_room_for_new_buckets))
    assert own.startswith("MicroBatchFloorError: there is no room to hold the sums")
    assert "rank 1: MicroBatchFloorError: " in other
    assert max(first + second) < 1e-12


# ---------------------------------------------------------------------- counts that change


def counts_that_change(rank: int, world: int) -> list[float]:
    """Batches of other lengths: sums that were sent are scaled, or made again."""
    model, reference = net(), net()
    ddp = DDP(model)
    errors = []
    with ElasticMBS(ddp, distributed=DistributedOptions(timeout=8, overlap=True)) as mbs:
        for step, length in enumerate([8, 8, 5, 9, 1, 1, 100, 50]):
            lengths = [length + r for r in range(world)]
            mbs.backward(lambda x: square(ddp(x)), data(rank, step, lengths[rank]))
            everyone = [data(r, step, lengths[r]) for r in range(world)]
            square(reference(joined(everyone))).backward()
            errors.append(worst(model, reference))
            model.zero_grad()
            reference.zero_grad()
    return errors


def test_sums_that_were_sent_are_weighed_by_the_counts_of_their_own_call() -> None:
    for errors in values(run_ranks(counts_that_change)):
        assert max(errors) < 1e-12


def test_the_hooks_go_with_the_sums_they_are_for(monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[int] = []
    monkeypatch.setattr(overlap, "_hook", lambda _, place: lambda *gradients: heard.append(place))
    model, group = net(), object()
    leaves = list(model.parameters())
    first, second = (
        overlap.Overlap(buckets.Buckets(leaves, turns=False), group)  # type: ignore[arg-type]
        for _ in range(2)
    )
    del first
    square(model(data(0, 0))).backward()
    assert len(heard) == len(leaves)
    assert second.sent == 0


def test_overlap_is_a_boolean() -> None:
    with pytest.raises(UsageError, match="overlap='yes' is neither True nor False"):
        DistributedOptions(overlap="yes")  # type: ignore[arg-type]
