"""An error on one rank: it is raised there unchanged, the others hear of it, and all may go on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

from elastic_mbs import DistributedOptions, ElasticMBS, MemoryOptions
from elastic_mbs.testing import InjectOOM
from stress.ranks.job import Outcome, run_ranks, values
from stress.ranks.losses import data
from tests.helpers.ddp import FailingBackward, caught, failing, joined, net, worst

TIMEOUT = DistributedOptions(timeout=20)
SHORT = MemoryOptions(wait_for_memory=0)


def square(out: Tensor) -> Tensor:
    return out.pow(2).mean()


class Job:
    """One model, its runtime, and batches of which rank 1 spoils one."""

    def __init__(self, rank: int, world: int) -> None:
        self.rank, self.world = rank, world
        self.model, self.reference = net(), net()
        self.ddp = DDP(self.model)
        self.mbs = ElasticMBS(self.ddp, distributed=TIMEOUT, memory=SHORT)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)

    def call(self, step: int) -> None:
        self.mbs.backward(lambda x: square(self.ddp(x)), data(self.rank, step))

    def loss_that(self, fails: Callable[[], None]) -> Callable[[Tensor], Tensor]:
        def loss_fn(x: Tensor) -> Tensor:
            if self.rank == 1:
                fails()
            return square(self.ddp(x))

        return loss_fn

    def error_after_another_call(self) -> float:
        """Return the error of the gradient of one more call, with what was there before."""
        self.call(7)
        square(self.reference(joined([data(each, 7) for each in range(self.world)]))).backward()
        return worst(self.model, self.reference)


def raise_value_error() -> None:
    raise ValueError("the data are broken")


def raise_interrupt() -> None:
    raise KeyboardInterrupt


def user_error(rank: int, world: int) -> tuple[str, float]:
    job = Job(rank, world)
    loss_fn = job.loss_that(raise_value_error)
    found = caught(lambda: job.mbs.backward(loss_fn, data(rank, 0)))
    return found, job.error_after_another_call()


def test_an_error_of_the_users_is_raised_on_its_rank_and_named_on_the_others() -> None:
    (other, first), (own, second) = values(run_ranks(user_error))
    assert own == "ValueError: the data are broken"
    assert other.startswith("PeerError: another rank could not finish this batch")
    assert other.endswith("rank 1: ValueError: the data are broken")
    assert max(first, second) < 1e-12  # state was put back, and the job goes on


def interrupted(rank: int, world: int) -> tuple[str, float]:
    job = Job(rank, world)
    found = "no error"
    try:
        job.mbs.backward(job.loss_that(raise_interrupt), data(rank, 0))
    except BaseException as error:
        found = type(error).__name__
    return found, job.error_after_another_call()


def test_an_interrupt_on_one_rank_ends_the_call_on_all() -> None:
    (other, first), (own, second) = values(run_ranks(interrupted))
    assert (other, own) == ("PeerError", "KeyboardInterrupt")
    assert max(first, second) < 1e-12


def at_the_floor(rank: int, world: int) -> tuple[str, float]:
    """Gradients of a first call are there, and rank 1 cannot finish the second."""
    job = Job(rank, world)
    job.call(1)
    square(job.reference(joined([data(each, 1) for each in range(world)]))).backward()
    batch = data(rank, 0)

    def call() -> None:
        with InjectOOM(always_from=1 if rank == 1 else None):
            job.mbs.backward(lambda x: square(job.ddp(x)), batch)

    return caught(call), job.error_after_another_call()


def test_a_rank_without_memory_ends_the_batch_on_all_and_old_gradients_are_back() -> None:
    (other, first), (own, second) = values(run_ranks(at_the_floor))
    assert own.startswith("MicroBatchFloorError: ")
    assert other.startswith("PeerError: ")
    assert "rank 1: MicroBatchFloorError: " in other
    assert max(first, second) < 1e-12


def out_of_memory_without_a_batch(rank: int, world: int) -> tuple[int, float]:
    """Return at how many places rank 1 has run out, and the largest error of a reported loss."""
    job = Job(rank, world)
    struck, off = 0, 0.0
    for place in range(1, 100):
        with InjectOOM([place] if rank == 1 else []) as fault:
            batch = data(0, place) if rank == 0 else None
            result = job.mbs.backward(lambda x: square(job.ddp(x)), batch)
        loss = square(job.reference(data(0, place))).item()
        off = max(off, abs(result.loss.item() - loss) / loss)
        struck += len(fault.hits)
    return struck, off


def test_a_rank_without_a_batch_reports_the_loss_in_full_wherever_it_runs_out() -> None:
    (_, first), (struck, second) = values(run_ranks(out_of_memory_without_a_batch))
    assert struck > 5
    assert max(first, second) < 1e-14


def bad_batch(rank: int, world: int) -> tuple[str, float]:
    job = Job(rank, world)
    batch: Any = data(rank, 0)
    if rank == 1:
        batch = {"x": batch, "y": batch[:2]}
    found = caught(lambda: job.mbs.backward(lambda x: square(job.ddp(x)), batch))
    return found, job.error_after_another_call()


def test_a_batch_that_cannot_be_cut_ends_the_call_on_all() -> None:
    (other, first), (own, second) = values(run_ranks(bad_batch))
    assert own.startswith("BatchError: ")
    assert "rank 1: BatchError: " in other
    assert max(first, second) < 1e-12


def left_early(rank: int, world: int) -> tuple[str, float]:
    job = Job(rank, world)

    def loop() -> None:
        with job.mbs:
            for micro in job.mbs.micro_batches(data(rank, 0)):
                if rank == 1:
                    break
                with micro:
                    micro.backward(square(job.ddp(micro.data)))

    return caught(loop), job.error_after_another_call()


def test_a_loop_that_one_rank_leaves_early_ends_on_all() -> None:
    (other, first), (own, second) = values(run_ranks(left_early))
    assert own.startswith("IncompleteBatchError: ")
    assert "rank 1: IncompleteBatchError: " in other
    assert max(first, second) < 1e-12


# ---------------------------------------------------------------------- errors of all ranks


def no_counts(rank: int, world: int) -> tuple[str, float]:
    job = Job(rank, world)
    found = caught(lambda: job.mbs.backward(lambda x: square(job.ddp(x)), None))
    return found, job.error_after_another_call()


def test_a_batch_without_samples_on_any_rank_is_an_error_on_all() -> None:
    for found, error in values(run_ranks(no_counts)):
        assert found.startswith("CountError: the counts of all ranks together are zero")
        assert error < 1e-12


def other_calls(rank: int, world: int) -> tuple[str, float, bool]:
    """Rank 0 steps the optimizer where rank 1 makes another batch."""
    job = Job(rank, world)
    job.call(0)
    before = [parameter.detach().clone() for parameter in job.model.parameters()]

    def action() -> None:
        job.mbs.optimizer_step(job.optimizer) if rank == 0 else job.call(1)

    found = caught(action)
    same = all(map(torch.equal, before, job.model.parameters()))
    job.model.zero_grad()
    return found, job.error_after_another_call(), same


def test_ranks_that_make_other_calls_are_told_where_each_is() -> None:
    for found, error, same in values(run_ranks(other_calls)):
        assert found.startswith("MisuseError: the ranks do not make the same calls")
        assert "rank 0 is in optimizer_step()" in found
        assert "rank 1 is at the end of a batch" in found
        assert same  # the step is taken back
        assert error < 1e-12


def other_leaves(rank: int, world: int) -> str:
    job = Job(rank, world)
    job.model[4].requires_grad_(rank == 0)
    return caught(lambda: job.call(0))


def test_ranks_that_train_other_parameters_are_told() -> None:
    for found in values(run_ranks(other_leaves)):
        assert found.startswith("MisuseError: the ranks train different parameters")


# ---------------------------------------------------------------------- the optimizer's step


class Growing(nn.Module):
    """A model that makes a longer buffer for the longest sample that it has seen."""

    table: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 2).double()
        self.register_buffer("table", torch.ones(6, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        if len(x) > len(self.table):
            self.register_buffer("table", torch.ones(len(x), dtype=torch.float64))
        out: Tensor = self.inner(x) * self.table[: len(x), None]
        return out


def grow(rank: int, world: int, sends: bool) -> str:
    ddp = DDP(Growing(), broadcast_buffers=sends)
    mbs = ElasticMBS(ddp, distributed=TIMEOUT)
    found = caught(lambda: mbs.backward(lambda x: square(ddp(x)), data(rank, 0)))
    assert all((each.grad is None) == sends for each in ddp.parameters())
    return found


def test_buffers_of_different_sizes_are_told_and_may_stay_where_none_is_sent() -> None:
    for found in values(run_ranks(grow, True)):
        assert found.startswith("MisuseError: the buffers of the ranks differ by shape")
        assert "broadcast_buffers=False" in found
    assert values(run_ranks(grow, False)) == ["no error", "no error"]


def callback_that_fails(rank: int, world: int) -> tuple[str, float]:
    job = Job(rank, world)

    def log() -> None:
        if rank == 0:
            raise_value_error()

    def call() -> None:
        for micro in job.mbs.micro_batches(data(rank, 0)):
            with micro:
                micro.backward(square(job.ddp(micro.data)))
                micro.on_commit(log)

    found = caught(call)
    square(job.reference(joined([data(each, 0) for each in range(world)]))).backward()
    return found, max(worst(job.model, job.reference), job.error_after_another_call())


def test_an_error_of_a_callback_leaves_the_gradient_whole_on_all_ranks() -> None:
    first, second = values(run_ranks(callback_that_fails))
    assert first[0] == "ValueError: the data are broken"
    assert second[0] == "no error"
    assert max(first[1], second[1]) <= 1e-12


def step_that_fails(rank: int, world: int, fused: bool) -> tuple[str, bool, bool]:
    job = Job(rank, world)
    optimizer = torch.optim.AdamW(job.model.parameters(), lr=0.1, fused=fused)
    job.call(0)
    if fused:  # its state exists, so no copies are taken
        job.mbs.optimizer_step(optimizer)
        optimizer.zero_grad()
        job.call(1)
    before = [parameter.detach().clone() for parameter in job.model.parameters()]
    runs = []
    optimizer.register_step_post_hook(lambda *args: runs.append(1))
    if rank == 1:
        hook = optimizer.register_step_pre_hook(lambda *args: raise_value_error())
    found = caught(lambda: job.mbs.optimizer_step(optimizer))
    same = all(map(torch.equal, before, job.model.parameters()))
    if rank == 1:
        hook.remove()
    if not fused:
        job.mbs.optimizer_step(optimizer)  # it may be made again
    moved = not any(map(torch.equal, before, job.model.parameters()))
    assert len(runs) == (0 if fused else 1)
    return found, same, moved


def test_a_step_is_made_on_all_ranks_or_on_none() -> None:
    other, own = values(run_ranks(step_that_fails, False))
    assert own == ("ValueError: the data are broken", True, True)
    assert other[0].startswith("PeerError: another rank could not make this optimizer step")
    assert "rank 1: ValueError: the data are broken" in other[0]
    assert other[1:] == (True, True)


def test_a_fused_step_that_cannot_be_taken_back_says_so() -> None:
    other, own = values(run_ranks(step_that_fails, True))
    assert own == ("ValueError: the data are broken", True, False)
    assert other[0].startswith("OptimizerStepError: a fused step, of which no copies are taken")


def guarded_in_place(rank: int, world: int) -> tuple[str, bool]:
    model = net()
    ddp = DDP(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    with ElasticMBS(ddp, optimizers=[optimizer], distributed=TIMEOUT) as mbs:
        mbs.backward(lambda x: square(ddp(x)), data(rank, 0))
        before = [parameter.detach().clone() for parameter in model.parameters()]

        def step() -> None:
            with InjectOOM(always_from=1 if rank else None):
                optimizer.step()

        found = caught(step)
        return found, all(map(torch.equal, before, model.parameters()))


def test_an_optimizer_that_is_guarded_in_place_votes_too() -> None:
    other, own = values(run_ranks(guarded_in_place))
    assert own[0].startswith("OptimizerStepError: ")
    assert other[0].startswith("PeerError: another rank could not make this optimizer step")
    assert own[1]
    assert other[1]


# ---------------------------------------------------------------------- errors inside the sums


def sums_that_fail(rank: int, world: int) -> tuple[str, bool, str]:
    """Rank 1 cannot copy its gradients into the sum, not even after its memory was released."""
    job = Job(rank, world)
    if rank == 1:
        job.mbs._resources.peers._buckets.all[0].fill = _no_room  # type: ignore[attr-defined]
    found = caught(lambda: job.call(0))
    empty = all(parameter.grad is None for parameter in job.model.parameters())
    return found, empty, caught(lambda: job.call(1))


def _no_room(factor: float) -> None:
    raise torch.OutOfMemoryError("no room")


def test_a_sum_that_cannot_be_made_ends_the_job_by_typed_errors() -> None:
    (other, empty, later), (own, emptied, then) = values(run_ranks(sums_that_fail))
    assert own.startswith("MicroBatchFloorError: there is no room to sum the gradients")
    assert other.startswith("PeerError: the other ranks cannot be reached while gradients are summ")
    assert "rank 1 has left" in other
    assert empty
    assert emptied
    assert later.startswith("PeerError: ")
    assert then.startswith("PeerError: ")


def many_faults(rank: int, world: int) -> float:
    """Fail a few times in one call: the others wait for each replay."""
    model, reference = net(), net()
    ddp = DDP(model)
    mbs = ElasticMBS(ddp, distributed=TIMEOUT)
    FailingBackward.left = 3 * rank
    mbs.backward(lambda x: square(failing(ddp(x))), data(rank, 0, 16))
    square(reference(joined([data(each, 0, 16) for each in range(world)]))).backward()
    return worst(model, reference)


def test_the_others_wait_while_one_rank_replays() -> None:
    assert max(values(run_ranks(many_faults))) < 1e-12


@pytest.mark.parametrize("outcome", [Outcome("hang", None), Outcome("error", "text")])
def test_the_watchdog_of_these_tests_reports_what_is_not_ok(outcome: Outcome) -> None:
    with pytest.raises(AssertionError, match=outcome.status):
        values([outcome])


def outside(rank: int, world: int) -> str:
    model, prompt = net(), nn.Parameter(torch.zeros(4, dtype=torch.float64))
    ddp = DDP(model)
    mbs = ElasticMBS(ddp, distributed=TIMEOUT)
    return caught(lambda: mbs.backward(lambda x: square(ddp(x + prompt)), data(rank, 0)))


def test_a_leaf_outside_the_model_is_refused_before_it_is_wrong() -> None:
    for found in values(run_ranks(outside)):
        assert "a leaf of shape (4,) outside the model got a gradient" in found
