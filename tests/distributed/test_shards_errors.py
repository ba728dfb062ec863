"""An error on one rank of a sharded job: typed on all ranks, everything put back, all may go on."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from elastic_mbs import DistributedOptions, ElasticMBS, MemoryBudget, MemoryOptions
from elastic_mbs.testing import InjectOOM
from stress.ranks.job import DIED, run_ranks, values
from stress.ranks.losses import data
from stress.ranks.shards import states
from stress.ranks.training import same
from tests.helpers.ddp import caught, joined
from tests.helpers.shards import Net, sharded, worst
from tests.helpers.strikes import drawn

TIMEOUT = DistributedOptions(timeout=20)
IN_STEP = DistributedOptions(timeout=20, mode="lockstep")
SHORT = MemoryOptions(wait_for_memory=0)


def square(out: Tensor) -> Tensor:
    return out.pow(2).mean()


class Job:
    """One sharded model, its runtime, and batches of which rank 1 spoils one."""

    def __init__(self, rank: int, world: int) -> None:
        self.rank, self.world = rank, world
        self.model, self.reference = Net().double(), Net().double()
        sharded(self.model)
        self.mbs = ElasticMBS(self.model, distributed=TIMEOUT, memory=SHORT)

    def call(self, step: int) -> None:
        self.mbs.backward(lambda x: square(self.model(x)), data(self.rank, step))

    def failing(self, fails: Callable[[], None]) -> Callable[[Tensor], Tensor]:
        """Return a loss that fails on rank 1."""

        def loss_fn(x: Tensor) -> Tensor:
            if self.rank == 1:
                fails()
            return square(self.model(x))

        return loss_fn

    def right(self, step: int) -> None:
        """Do in the reference what `call` does."""
        square(self.reference(joined([data(r, step) for r in range(self.world)]))).backward()

    def error_after_another_call(self) -> float:
        """Return the error of the gradient of one more call, with what was there before."""
        self.call(7)
        self.right(7)
        return worst(self.model, self.reference)


def raise_value_error() -> None:
    raise ValueError("the data are broken")


def raise_interrupt() -> None:
    raise KeyboardInterrupt


def user_error(rank: int, world: int, fails: Callable[[], None]) -> tuple[str, bool, float]:
    """Fail in the second call, with gradients of the first."""
    job = Job(rank, world)
    job.call(1)
    job.right(1)
    before = states(job.model)
    found = "no error"
    try:
        job.mbs.backward(job.failing(fails), data(rank, 0))
    except BaseException as error:
        found = f"{type(error).__name__}: {error}"
    return found, same(before, states(job.model)), job.error_after_another_call()


@pytest.mark.parametrize(
    ("fails", "says"),
    [(raise_value_error, "ValueError: the data are broken"), (raise_interrupt, "KeyboardInterr")],
)
def test_an_error_of_the_users_is_raised_on_its_rank_and_named_on_the_others(
    fails: Callable[[], None], says: str
) -> None:
    (other, kept, first), (own, put_back, second) = values(run_ranks(user_error, fails))
    assert own.startswith(says)
    assert other.startswith("PeerError: another rank could not finish this batch")
    assert f"rank 1: {says}" in other
    assert kept
    assert put_back
    assert max(first, second) < 1e-12


# ---------------------------------------------------------------------- errors of our own code


def every_place(rank: int, world: int, lasting: bool, first: int, stride: int) -> dict[str, int]:
    """Let every operation of a call run out of memory on rank 1, one call for each."""
    job = Job(rank, world)
    job.mbs.close()
    seen = {"calls": 0, "ended": 0, "ooms": 0, "stale": 0, "wrong": 0}
    place, struck = first, True
    with job.mbs:
        job.call(0)
        while struck:
            job.model.zero_grad()
            job.reference.zero_grad()
            before = states(job.model)
            batch = data(rank, place)  # not a part of the call
            at = InjectOOM(always_from=place) if lasting else InjectOOM([place])
            fault = at if rank == 1 else InjectOOM()
            try:
                with fault:
                    result = job.mbs.backward(lambda x: square(job.model(x)), batch)
                seen["ooms"] += result.ooms
                job.right(place)
                seen["wrong"] += worst(job.model, job.reference) > 1e-12
            except Exception as error:
                seen["ended"] += 1
                assert type(error).__name__ in ("MicroBatchFloorError", "PeerError"), error
                seen["stale"] += not same(before, states(job.model))
            seen["calls"] += 1
            hit = torch.tensor(len(fault.hits))
            torch.distributed.broadcast(hit, 1)
            struck = bool(hit)
            place += stride
    return seen


@pytest.mark.parametrize("lasting", [False, True])
def test_no_operation_of_a_call_that_fails_hangs_the_job_or_changes_anything(lasting: bool) -> None:
    for found in values(run_ranks(every_place, lasting, drawn(17), 17, wall=120)):
        assert found["calls"] > 13
        assert (found["ended"] > 6) is lasting
        assert found["stale"] == found["wrong"] == 0


def broken_collective(rank: int, world: int, name: str) -> tuple[str, bool, str]:
    """Rank 1 cannot copy into a collective, not even after its memory was released."""
    job = Job(rank, world)
    job.call(0)
    before = states(job.model)
    if rank == 1:
        wholes: Any = job.mbs._resources.peers
        whole = wholes._wholes.every[0]
        setattr(whole, name, _no_room)
    found = caught(lambda: job.call(1))
    kept = same(before, states(job.model))
    return found, kept, caught(lambda: job.call(2))


def _no_room(*args: object) -> None:
    raise torch.OutOfMemoryError("no room")


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("put_shard", "gather the parameters"),
        ("take_whole", "take the parameters of all ranks"),
        ("put_gradient", "sum the gradients over the ranks"),
        ("take_gradient", "take the sums of gradients"),
    ],
)
def test_a_collective_that_one_rank_cannot_make_ends_the_job_typed(name: str, what: str) -> None:
    (other, kept, later), (own, put_back, then) = values(run_ranks(broken_collective, name))
    assert own.startswith(f"MicroBatchFloorError: there is no room to {what}")
    assert put_back
    if name == "take_gradient":  # the last sum was made, so the other rank hears of it later
        assert other == "no error"
        other = later
    else:
        assert kept
    assert other.startswith("PeerError: the other ranks cannot be reached")
    assert "rank 1 has left" in other
    assert later.startswith("PeerError: ")
    assert then.startswith("PeerError: ")


# ---------------------------------------------------------------------- a model that does not fit


def too_large(rank: int, world: int, way: str) -> list[str]:
    """Give rank 1 room for its shards, and for no whole model."""
    model = nn.Sequential(*(nn.Linear(128, 128) for _ in range(4)))
    low = MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float32)
    for layer in model:
        fully_shard(layer, mp_policy=low if way == "half" else MixedPrecisionPolicy())
    fully_shard(model)
    if way == "frozen":
        model[:3].requires_grad_(False)
    x = torch.randn(4, 128)
    with MemoryBudget("100GiB" if rank == 0 else "950KiB") as budget:
        budget.track(model, x)
        mode = IN_STEP if way == "lock-step" else TIMEOUT
        with ElasticMBS(model, memory=SHORT, distributed=mode) as mbs:

            def call() -> None:
                mbs.backward(lambda x: square(model(x)), x)

            found = [caught(call), caught(lambda: mbs.evaluate(model, x))]
            budget.limit = 10 * 2**20
            return [*found, caught(call)]


def test_a_model_that_does_not_fit_whole_is_refused_with_the_numbers() -> None:
    (other, others, after), (own, evaluation, then) = values(run_ranks(too_large, "whole"))
    assert own.startswith("MicroBatchFloorError: there is no room to hold the whole model")
    assert "258.0 KiB of parameters, 387.0 KiB of gradients" in own
    assert "DistributedOptions(mode='lockstep'), experimental" in own
    assert other.startswith("PeerError: another rank could not finish")
    assert "258.0 KiB of parameters" in other
    assert evaluation == "no error" == others  # it needs no gradients
    assert after == then == "no error"  # and all may go on


@pytest.mark.parametrize("way", ["half", "frozen", "lock-step"])
def test_what_the_refusal_advises_makes_it_fit(way: str) -> None:
    assert values(run_ranks(too_large, way)) == [["no error"] * 3] * 2


# ---------------------------------------------------------------------- ranks that do not come


def other_calls(rank: int, world: int) -> tuple[str, float]:
    job = Job(rank, world)
    x = data(rank, 0)
    found = caught(lambda: job.mbs.evaluate(job.model, x) if rank else job.call(0))
    return found, job.error_after_another_call()


def test_ranks_that_make_other_calls_are_told_where_each_is() -> None:
    for found, error in values(run_ranks(other_calls)):
        assert found.startswith("MisuseError: the ranks do not make the same calls")
        assert "rank 1 is where parameters are gathered, for a batch or an evaluation" in found
        assert error < 1e-12


def other_models(rank: int, world: int) -> str:
    model = Net(blocks=2).double()
    if rank:
        model.last = nn.Linear(8, 5).double()
    fully_shard(model)
    mbs = ElasticMBS(model, distributed=TIMEOUT)
    return caught(lambda: mbs.backward(lambda x: square(model(x)), data(rank, 0)))


def test_ranks_with_other_models_are_told() -> None:
    for found in values(run_ranks(other_models)):
        assert found.startswith("MisuseError: the ranks have different parameters")


def other_leaves(rank: int, world: int) -> tuple[str, float]:
    job = Job(rank, world)
    job.model.last.requires_grad_(rank == 0)
    found = caught(lambda: job.call(0))
    job.model.last.requires_grad_(True)
    return found, job.error_after_another_call()


def test_ranks_that_train_other_parameters_are_told() -> None:
    for found, error in values(run_ranks(other_leaves)):
        assert found.startswith("MisuseError: the ranks train different parameters")
        assert error < 1e-12


def run_until(rank: int, world: int, ending: str) -> tuple[str, float, bool]:
    """Make one call; in the second one rank 1 does not come to a meeting."""
    model = sharded(Net().double())
    mbs = ElasticMBS(model, distributed=DistributedOptions(timeout=4))
    mbs.backward(lambda x: square(model(x)), data(rank, 0))
    before = states(model)

    def loss_fn(x: Tensor) -> Tensor:
        if rank == 1 and ending == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        return square(model(x))

    if rank == 1 and ending == "hangs":
        time.sleep(10)
    began = time.monotonic()
    found = caught(lambda: mbs.backward(loss_fn, data(rank, 1)))
    return found, time.monotonic() - began, same(before, states(model))


def test_a_rank_that_was_killed_in_a_piece_is_an_error_on_the_others_at_once() -> None:
    first, second, third = run_ranks(run_until, "killed", world=3)
    assert second.status == DIED
    for found, seconds, kept in (first.value, third.value):
        assert found.startswith("PeerError: the other ranks cannot be reached")
        assert seconds < 4
        assert kept


def test_a_rank_that_hangs_before_the_gathering_is_named_after_the_time_out() -> None:
    first, second = values(run_ranks(run_until, "hangs"))
    found, seconds, kept = first
    assert "where parameters are gathered" in found
    assert "no answer within 4 s: rank 1 did not come" in found
    assert seconds < 9
    assert kept
    assert "rank 0 has left: it gave up" in second[0]
