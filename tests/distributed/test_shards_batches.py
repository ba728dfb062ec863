"""Counts, leaves, precision and what runs beside the calls of a sharded model."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from elastic_mbs import (
    DistributedOptions,
    ElasticMBS,
    GradientOptions,
    MemoryBudget,
    MemoryOptions,
    MicroBatch,
    Policy,
)
from stress.ranks.job import run_ranks, values
from stress.ranks.losses import data
from stress.ranks.shards import full
from tests.helpers.ddp import FailingBackward, caught, failing, joined
from tests.helpers.shards import Net, alike, sharded, worst

TIMEOUT = DistributedOptions(timeout=20)
STEPS = 4


def square(out: Tensor) -> Tensor:
    return out.pow(2).mean()


def fail_on(rank: int, step: int, world: int) -> None:
    """Let the next backward fail once, on one rank of this step."""
    FailingBackward.left = int(step % world == rank)


def pair(**options: Any) -> tuple[Net, Net]:
    """Return a sharded model, and the same model in one process."""
    model, reference = Net().double(), Net().double()
    sharded(model, **options)
    return model, reference


# ---------------------------------------------------------------------- counts


def valid(x: Tensor) -> Tensor:
    return (x[:, 0] > 0).long()


def masked(out: Tensor, x: Tensor) -> Tensor:
    return (out.pow(2).mean(1) * valid(x)).sum() / valid(x).sum().clamp(min=1)


def counted(rank: int, world: int, options: dict[str, Any]) -> list[float]:
    """Train on tokens, sums or named losses; rank 1 has no token in step 1."""
    model, reference = pair()
    names = isinstance(options.get("count"), dict)
    errors = []
    with ElasticMBS(model, **options, distributed=TIMEOUT) as mbs:

        def loss_of(out: Tensor, x: Tensor, total: float) -> Any:
            if names:
                return {"all": square(out), "some": masked(out, x)}
            if "count" in options:
                return masked(out, x)
            return out.pow(2).mean(1).sum() / total

        for step in range(STEPS):
            fail_on(rank, step, world)
            batches = [data(each, step) for each in range(world)]
            if step == 1:
                batches[1][:, 0] = -1.0
            idle = step == 3
            result = mbs.backward(
                lambda x: loss_of(failing(model(x)), x, mbs.total),
                None if idle and rank == 0 else batches[rank],
            )
            whole = joined(batches[idle:])
            right = loss_of(reference(whole), whole, len(whole))
            right = right["all"] + right["some"] if names else right
            right.backward()
            errors += [worst(model, reference), abs(result.loss.item() - right.item())]
            model.zero_grad()
            reference.zero_grad()
    return errors


COUNTS: dict[str, dict[str, Any]] = {
    "tokens": {"count": valid},
    "sum": {"reduction": "sum"},
    "names": {"count": {"all": None, "some": valid}},
}


@pytest.mark.parametrize("kind", COUNTS)
def test_tokens_sums_and_losses_with_names_use_the_totals_of_all_ranks(kind: str) -> None:
    for errors in values(run_ranks(counted, COUNTS[kind])):
        assert max(errors) < 1e-12


# ---------------------------------------------------------------------- leaves


class TwoHeads(nn.Module):
    """A model of which ranks use different parts."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Linear(4, 4).double()
        self.heads = nn.ModuleList([nn.Linear(4, 2).double() for _ in range(3)])

    def forward(self, x: Tensor, head: int) -> Tensor:
        out: Tensor = self.heads[head](self.body(x))
        return out


def use_other_leaves(rank: int, world: int) -> tuple[float, bool]:
    model, reference = TwoHeads(), TwoHeads()
    for head in model.heads:
        fully_shard(head)
    fully_shard(model)
    with ElasticMBS(model, distributed=TIMEOUT) as mbs:
        mbs.backward(lambda x: square(model(x, rank)), data(rank, 0, 6))
    parts = [square(reference(data(each, 0, 6), each)) / world for each in range(world)]
    torch.stack(parts).sum().backward()
    unused = all(p.grad is None for p in model.heads[2].parameters())
    return worst(model, reference), unused


def test_a_leaf_that_one_rank_uses_has_its_gradient_on_all() -> None:
    for error, unused in values(run_ranks(use_other_leaves)):
        assert error < 1e-12
        assert unused  # no rank has used the third head, so no optimizer moves it


def accumulate(rank: int, world: int) -> list[float]:
    """Two calls before a step, with a failure in the second; then clipping."""
    model, reference = pair()
    with ElasticMBS(model, distributed=TIMEOUT) as mbs:
        for step in range(2):
            fail_on(rank, step, world)
            batches = [data(each, step) for each in range(world)]
            mbs.backward(lambda x: square(failing(model(x))), batches[rank])
            square(reference(joined(batches))).backward()
    mine = full(nn.utils.clip_grad_norm_(model.parameters(), 0.1))
    right = nn.utils.clip_grad_norm_(reference.parameters(), 0.1)
    assert mine is not None
    return [worst(model, reference), abs(float(mine - right))]


def test_calls_before_one_step_add_up_and_clip_alike() -> None:
    for errors in values(run_ranks(accumulate)):
        assert max(errors) < 1e-12


def clear_inside(rank: int, world: int) -> tuple[float, str]:
    """Clear old gradients before the first piece, as a loop may; then start a call in a call."""
    model, reference = pair()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with ElasticMBS(model, micro_batch_size=3, distributed=TIMEOUT) as mbs:
        mbs.backward(lambda x: square(model(x)), data(rank, 0))
        nested = ""
        for i, micro in enumerate(mbs.micro_batches(data(rank, 1))):
            with micro:
                if not i:
                    optimizer.zero_grad()
                    nested = caught(lambda: mbs.backward(model, data(rank, 0)))
                micro.backward(square(model(micro.data)))
    square(reference(joined([data(each, 1) for each in range(world)]))).backward()
    return worst(model, reference), nested


def test_gradients_that_are_cleared_before_the_first_piece_do_not_come_back() -> None:
    for error, nested in values(run_ranks(clear_inside)):
        assert error < 1e-12
        assert nested.startswith("NestedCallError")  # and it has changed nothing


def thaw(rank: int, world: int) -> list[float]:
    model, reference = pair()
    errors = []
    with ElasticMBS(model, distributed=TIMEOUT) as mbs:
        for step in range(4):
            for each in (model, reference):
                each.blocks[0].requires_grad_(step >= 2)
            batches = [data(r, step) for r in range(world)]
            mbs.backward(lambda x: square(model(x)), batches[rank])
            square(reference(joined(batches))).backward()
            errors.append(worst(model, reference))
            model.zero_grad()
            reference.zero_grad()
    return errors


def test_a_block_may_be_frozen_and_thaw() -> None:
    for errors in values(run_ranks(thaw)):
        assert max(errors) < 1e-12


# ---------------------------------------------------------------------- precision


def in_half(rank: int, world: int, output: torch.dtype | None, size: int) -> list[float]:
    """Train in bfloat16 beside a model that `fully_shard` trains itself, on the whole batch."""
    models = []
    for _ in range(2):
        model = Net()
        low = partial(MixedPrecisionPolicy, param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for block in model.blocks:
            fully_shard(block, mp_policy=low())
        fully_shard(model, mp_policy=low(output_dtype=output))
        models.append(model)
    model, right = models
    gradients = GradientOptions(accumulate_dtype=torch.float32)
    errors = []
    with ElasticMBS(
        model,
        micro_batch_size=size,
        policy=Policy(grow=False),
        gradients=gradients,
        distributed=TIMEOUT,
    ) as mbs:
        for step in range(3):
            x = data(rank, step, 8).float()
            seen = []

            def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
                out = model(x)
                seen.append(out.dtype)  # noqa: B023 -- it is called in this turn
                return square(out.float())

            mbs.backward(lambda x: loss_fn(model, x), x)
            loss_fn(right, x).backward()
            assert set(seen) == {output or torch.bfloat16}
            for mine, other in zip(model.parameters(), right.parameters(), strict=True):
                grad, wanted = full(mine.grad), full(other.grad)
                assert grad is not None
                assert wanted is not None
                errors.append(float((grad - wanted).abs().max() / wanted.abs().max()))
            model.zero_grad()
            right.zero_grad()
    return errors


@pytest.mark.parametrize("output", [None, torch.float32])
def test_a_mixed_precision_policy_does_here_as_it_does_without_us(output: Any) -> None:
    for errors in values(run_ranks(in_half, output, 8)):
        assert max(errors) == 0.0


def test_pieces_in_half_precision_differ_by_its_rounding() -> None:
    for errors in values(run_ranks(in_half, None, 3)):
        assert 0.0 < max(errors) < 2e-2


# ---------------------------------------------------------------------- beside the calls


def evaluate(rank: int, world: int) -> tuple[float, list[int]]:
    """Evaluate other lengths on each rank, in pieces; count the collectives in them."""
    model, reference = pair()
    group: Any = torch.distributed.group.WORLD
    made: list[int] = []
    errors = []

    def run(x: Tensor) -> Tensor:
        made.append(group._get_sequence_number_for_group())
        out: Tensor = model(x)
        return out

    with ElasticMBS(model, policy=Policy(max_micro_batch_size=2), distributed=TIMEOUT) as mbs:
        for step in range(3):
            x = data(rank, step, 5 + 3 * rank)
            with torch.inference_mode(step == 1):
                found = mbs.evaluate(run, x)
            errors.append(float((found - reference(x)).abs().max()))
            mbs.backward(lambda x: square(model(x)), data(rank, 1))
            assert isinstance(model.first.weight, torch.distributed.tensor.DTensor)
    x = data(rank, 5)
    errors.append(float((mbs.evaluate(model, x) - reference(x)).abs().max()))  # it comes back
    return max(errors), [len(made), len(set(made))]


def test_an_evaluation_gathers_once_and_no_piece_makes_a_collective() -> None:
    for rank, (error, (pieces, numbers)) in enumerate(values(run_ranks(evaluate))):
        assert error < 1e-12
        assert pieces == 3 * (3 + rank)
        assert numbers == 3


def rehearse(rank: int, world: int) -> tuple[bool, str]:
    model, _ = pair()
    with ElasticMBS(model, distributed=TIMEOUT) as mbs:
        report = mbs.verify(lambda x: square(model(x)), data(rank, 0))
        plan = mbs.plan(lambda x: square(model(x)), data(rank, 0))
        return report.ok, plan.reason or ""


def test_verify_and_plan_work_where_all_ranks_call_them() -> None:
    assert values(run_ranks(rehearse)) == [(True, ""), (True, "")]


def plain_steps(rank: int, world: int) -> list[float]:
    """Mix calls with steps of `fully_shard` itself, and evaluations that leave the root whole."""
    model, reference = pair()
    errors = []
    with ElasticMBS(model, distributed=TIMEOUT) as mbs:
        for step in range(3):
            batches = [data(r, step, 6) for r in range(world)]
            if step != 1:
                square(model(batches[rank])).backward()
            else:
                with torch.no_grad():
                    model(batches[rank])
                mbs.backward(lambda x: square(model(x)), batches[rank])
            square(reference(joined(batches))).backward()
            errors.append(worst(model, reference))
            model.zero_grad()
            reference.zero_grad()
    return errors


def test_fully_shard_works_as_ever_before_and_after_a_call() -> None:
    for errors in values(run_ranks(plain_steps)):
        assert max(errors) < 1e-12


def callbacks(rank: int, world: int) -> list[float]:
    """Step, evaluate and clip in a callback, where the gradient is whole and parameters are not."""
    model, reference = pair()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    right = torch.optim.SGD(reference.parameters(), lr=0.1)
    x = data(rank, 9)
    found: list[Tensor] = []
    with ElasticMBS(model, distributed=TIMEOUT) as mbs:

        def done() -> None:
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            mbs.optimizer_step(optimizer)
            found.append(mbs.evaluate(model, x))

        for micro in mbs.micro_batches(data(rank, 0)):
            with micro:
                micro.backward(square(model(micro.data)))
                if micro.start == 0:
                    micro.on_commit(done)
    square(reference(joined([data(r, 0) for r in range(world)]))).backward()
    nn.utils.clip_grad_norm_(reference.parameters(), 0.1)
    right.step()
    return [alike(model, reference), float((found[0] - reference(x)).abs().max())]


def test_a_callback_may_clip_step_and_evaluate() -> None:
    for errors in values(run_ranks(callbacks)):
        assert max(errors) < 1e-12


def short_of_memory(rank: int, world: int) -> tuple[float, int]:
    """Rank 0 has room for a part of its batch."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 2)).double()
    reference = copy.deepcopy(model)
    fully_shard(model)
    batches = [torch.randn(128, 64, dtype=torch.float64) for _ in range(world)]
    size = 128
    with MemoryBudget("100GiB" if rank else "900KiB") as budget:
        budget.track(model, batches[rank])
        memory = MemoryOptions(wait_for_memory=0)
        with ElasticMBS(model, memory=memory, distributed=TIMEOUT) as mbs:
            for _ in range(2):
                model.zero_grad()
                size = mbs.backward(lambda x: square(model(x)), batches[rank]).micro_batch_size
    square(reference(joined(batches))).backward()
    return worst(model, reference), size


def test_each_rank_has_a_size_of_its_own() -> None:
    (first, small), (second, whole) = values(run_ranks(short_of_memory))
    assert max(first, second) < 1e-12
    assert small < whole == 128


def keep_nothing(rank: int, world: int) -> list[int]:
    """Return the bytes that are left after calls of each kind, but for gradients."""
    model, _ = pair()
    x = data(rank, 0, 6)
    left = []
    with MemoryBudget("1GiB", track=(model, x)) as budget:
        mbs = ElasticMBS(model, distributed=TIMEOUT)

        def fail(part: Tensor) -> Tensor:
            square(model(part))
            raise ValueError

        def run(action: Callable[[], object]) -> None:
            caught(action)
            model.zero_grad()
            gc.collect()
            left.append(budget.live)

        run(lambda: mbs.backward(lambda part: square(model(part)), x))
        run(lambda: mbs.evaluate(model, x))
        run(lambda: mbs.backward(fail, x))
        run(lambda: mbs.verify(lambda part: square(model(part)), x))
        run(lambda: list(map(_run(model), mbs.micro_batches(x))))
        run(lambda: mbs.backward(lambda part: square(model(part)), None if rank else x))
    return left


def _run(model: nn.Module) -> Callable[[MicroBatch], None]:
    def run(micro: MicroBatch) -> None:
        with micro:
            micro.backward(square(model(micro.data)))

    return run


def test_no_whole_parameter_stays_after_a_call_of_any_kind() -> None:
    for left in values(run_ranks(keep_nothing)):
        assert len(set(left)) == 1, left


def edit(rank: int, world: int) -> list[str]:
    """Do in a step function what only may be done after the batch."""
    model, _ = pair()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    shards = list(model.parameters())
    mbs = ElasticMBS(model, micro_batch_size=3, distributed=TIMEOUT)
    mbs.backward(lambda x: square(model(x)), data(rank, 0))
    pieces: list[Tensor] = []

    def step(x: Tensor) -> Tensor:
        optimizer.step()
        return square(model(x))

    def clear(x: Tensor) -> Tensor:
        for shard in shards if pieces else ():
            shard.grad = None
        pieces.append(x)
        return square(model(x))

    def clamp(x: Tensor) -> Tensor:
        with torch.no_grad():
            model.last.weight.clamp_(-1.0, 1.0)
        return square(model(x))

    kinds = (step, clear, clamp)
    found = [caught(lambda fn=fn: mbs.backward(fn, data(rank, 0))) for fn in kinds]  # type: ignore[misc]
    model.zero_grad()
    return [*found, caught(lambda: mbs.backward(lambda x: square(model(x)), data(rank, 0)))]


def test_a_step_and_an_edit_inside_the_step_function_are_refused() -> None:
    for step, clear, clamp, after in values(run_ranks(edit)):
        assert step.startswith("StepInsideError: SGD.step() ran inside the step function")
        assert clear.startswith("GradientsChangedError: the gradient of 'first.weight' was changed")
        assert clamp.startswith("UnsupportedError: the step edits the parameter 'last.weight' in p")
        assert after == "no error"
