"""Sums that begin before ranks have met: what keeps them exact and free of hangs."""

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
from elastic_mbs.distributed import buckets, control, replicas, sums, torch_private
from stress.ranks.job import run_ranks, values
from stress.ranks.losses import data
from tests.helpers.ddp import caught, joined, net, worst


def square(out: Tensor) -> Tensor:
    return out.pow(2).mean()


def small_buckets() -> None:
    """Let a small model have several buckets, in this process."""
    buckets.CAP = 300


def recorded() -> list[str]:
    """Return a list that notes where each sum begins, and each meeting of the ranks."""
    found: list[str] = []
    begin, meet = torch_private.all_reduce, control.Control.meet

    def all_reduce(group: torch_private.Group, tensor: Tensor) -> dist.Work:
        inside = torch._C._current_graph_task_id() >= 0
        found.append("in a backward" if inside else "sum")
        return begin(group, tensor)

    def meeting(*args: Any, **options: Any) -> Any:
        found.append("meeting")
        return meet(*args, **options)

    torch_private.all_reduce = all_reduce
    control.Control.meet = meeting  # type: ignore[method-assign]  # of this process, a rank
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


def sums_of_calls(rank: int, world: int, overlap: bool) -> tuple[list[list[str]], float]:
    job = Job(rank, world, overlap=overlap)
    noted, errors = recorded(), list[float]()
    calls = []
    for step in range(3):
        noted.clear()
        errors.append(job.call(step))
        calls.append(list(noted))
    return calls, max(errors)


FOUR = ["sum"] * 4


@pytest.mark.parametrize(
    ("overlap", "order"),
    [
        (True, ["in a backward"] * 3 + ["sum", "meeting"]),
        (False, ["sum", "sum", "meeting", "sum", "sum"]),
    ],
)
def test_sums_begin_before_ranks_meet(overlap: bool, order: list[str]) -> None:
    # From the second call on: in the first one ranks have not agreed on the leaves.
    for calls, error in values(run_ranks(sums_of_calls, overlap)):
        assert calls == [["meeting", *FOUR], order, order]
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
    noted = recorded()

    def fail(gradient: Tensor) -> None:
        if noted:
            raise ValueError("a broken hook")

    if rank == 1:
        job.fails = lambda hidden: hidden.register_hook(fail)
    found = caught(lambda: job.call(2))
    inside = noted.count("in a backward")
    job.fails = lambda hidden: None
    job.clear()
    return found, inside, [*errors, job.call(3), job.call(4)]


def test_a_rank_that_has_failed_sends_the_rest_so_the_others_do_not_hang() -> None:
    (other, all_sent, first), (own, some_sent, second) = values(
        run_ranks(error_after_a_sum_has_begun)
    )
    assert own == "ValueError: a broken hook"
    assert other.endswith("rank 1: ValueError: a broken hook")
    assert (all_sent, some_sent) == (3, 2)
    assert max(first + second) < 1e-12


def centred(model: nn.Sequential, hidden: Tensor) -> Tensor:
    """Return a loss to which each sample's contribution depends on its piece."""
    return square(model[1:](hidden - hidden.mean(0)))


def shortage_after_a_sum_has_begun(rank: int, world: int) -> tuple[int, int, float]:
    """The last backward of rank 1 runs out of memory after its first bucket was sent."""
    small_buckets()
    model, reference = net(), net()
    ddp = DDP(model)
    noted, struck, fails = recorded(), list[int](), False

    def fail(gradient: Tensor) -> None:
        if rank == 1 and fails and noted and not struck:
            struck.append(noted.count("in a backward"))
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
            noted.clear()
            fails = step == 2
            result = mbs.backward(loss_fn, data(rank, step, 6))
    inside = noted.count("in a backward")
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
    assert all_sent == 3
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


def counts_that_change(rank: int, world: int, overlap: bool) -> list[float]:
    """Batches of other lengths: sums that were sent are scaled, or made again."""
    small_buckets()
    model, reference = net(), net()
    ddp = DDP(model)
    errors = []
    with ElasticMBS(ddp, distributed=DistributedOptions(timeout=8, overlap=overlap)) as mbs:
        for step, length in enumerate([8, 8, 5, 5, 5, 9, 1, 1, 100, 50]):
            lengths = [length + r for r in range(world)]
            mbs.backward(lambda x: square(ddp(x)), data(rank, step, lengths[rank]))
            everyone = [data(r, step, lengths[r]) for r in range(world)]
            square(reference(joined(everyone))).backward()
            errors.append(worst(model, reference))
            model.zero_grad()
            reference.zero_grad()
    return errors


@pytest.mark.parametrize("overlap", [True, False])
def test_sums_that_were_sent_are_weighed_by_the_counts_of_their_own_call(overlap: bool) -> None:
    for errors in values(run_ranks(counts_that_change, overlap)):
        assert max(errors) < 1e-12


def factors_after_a_large_batch(
    rank: int, world: int, scaler: torch.amp.GradScaler | None
) -> list[tuple[float, float]]:
    """Return the factors of the gradients and of their sums, in each call."""
    found: list[tuple[float, float]] = []
    fill, take = buckets.Bucket.fill, buckets.Bucket.take
    ddp = DDP(net())
    with (
        ElasticMBS(ddp, scaler=scaler, distributed=DistributedOptions(timeout=8)) as mbs,
        pytest.MonkeyPatch.context() as patch,
    ):
        for step, length in enumerate([4, 6, 4, 4, 4]):
            noted: list[float] = []

            def filled(self: buckets.Bucket, factor: float, noted: list[float] = noted) -> None:
                noted.append(factor)
                fill(self, factor)

            def taken(self: buckets.Bucket, factor: float, noted: list[float] = noted) -> None:
                noted.append(factor)
                take(self, factor)

            patch.setattr(buckets.Bucket, "fill", filled)
            patch.setattr(buckets.Bucket, "take", taken)
            mbs.backward(lambda x: square(ddp(x)), data(rank, step, length))
            found.append((noted[-2], noted[-1]))
    return found


def test_batches_of_one_length_need_no_pass_for_their_weights() -> None:
    # Also after one that was longer, by whose counts pieces are weighed for two calls.
    for factors in values(run_ranks(factors_after_a_large_batch, None)):
        *_, before, last = factors
        assert before != (1.0, 1.0)
        assert last == (1.0, 1.0)


def test_a_scaler_meets_the_same_weights_in_every_call() -> None:
    # Its factor has grown until numbers of half precision were nearly too large.
    for factors in values(run_ranks(factors_after_a_large_batch, torch.amp.GradScaler("cpu"))):
        assert factors[-1] == (0.5, 1.0)


def half_precision(rank: int, world: int) -> list[float]:
    """A batch of one sample, then a large one: weights by the counts before would be large."""
    model = nn.Linear(1, 1, bias=False).half()
    nn.init.ones_(model.weight)
    ddp = DDP(model)
    gradients = []
    with ElasticMBS(ddp, distributed=DistributedOptions(timeout=8)) as mbs:
        for length in (1, 1, 2_000, 2_000):
            x = torch.full((length, 1), 200.0, dtype=torch.float16)
            mbs.backward(lambda x: ddp(x).float().mean(), x)
            assert model.weight.grad is not None
            gradients.append(model.weight.grad.item())
            model.zero_grad()
    return gradients


def test_counts_that_grow_overflow_no_half_precision() -> None:
    for gradients in values(run_ranks(half_precision)):
        assert gradients == pytest.approx([200.0] * 4, rel=1e-3)


def loss_in_half_precision(rank: int, world: int) -> list[float]:
    model = nn.Linear(1, 1, bias=False)
    nn.init.ones_(model.weight)
    ddp = DDP(model)
    gradients = []
    with ElasticMBS(ddp, distributed=DistributedOptions(timeout=8)) as mbs:
        for _ in range(3):
            mbs.backward(lambda x: ddp(x).bfloat16().mean(), torch.full((4, 1), 3.0))
            assert model.weight.grad is not None
            gradients.append(model.weight.grad.item())
            model.zero_grad()
    return gradients


def test_a_share_of_a_third_is_not_rounded_to_half_precision() -> None:
    for gradients in values(run_ranks(loss_in_half_precision, world=3)):
        assert gradients == pytest.approx([3.0] * 3, rel=1e-6)


def test_the_hooks_go_with_the_sums_they_are_for(monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[int] = []
    monkeypatch.setattr(buckets, "CAP", 300)
    monkeypatch.setattr(sums, "_hook", lambda _, place: lambda *gradients: heard.append(place))
    model, group = net(), object()
    leaves = list(model.parameters())
    each = [buckets.Buckets(leaves, overlap=True) for _ in range(2)]
    first, second = (sums.Sums(made, group) for made in each)  # type: ignore[arg-type]
    del first
    square(model(data(0, 0))).backward()
    lengths = [len(bucket.leaves) for bucket in each[1].all]
    assert len(lengths) > 2
    # The last bucket is whole when the backward ends, and needs no hook.
    assert [heard.count(place) for place in range(len(lengths))] == [*lengths[:-1], 0]
    assert second.sent == 0


def test_overlap_is_a_boolean() -> None:
    with pytest.raises(UsageError, match="overlap='yes' is neither True nor False"):
        DistributedOptions(overlap="yes")  # type: ignore[arg-type]
