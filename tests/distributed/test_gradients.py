"""`.grad` is the gradient of the mean over the batch of all ranks, whatever fails where."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

from elastic_mbs import (
    DistributedOptions,
    ElasticMBS,
    MemoryBudget,
    MemoryOptions,
    MicroBatch,
    StepResult,
    elastic_step,
)
from elastic_mbs.sinks.log_reader import files_of, read_log
from stress.ranks.job import run_ranks, values
from stress.ranks.losses import data
from tests.helpers.ddp import FailingBackward, failing, joined, net, worst

TIMEOUT = DistributedOptions(timeout=20)
STEPS = 4


def square(out: Tensor) -> Tensor:
    return out.pow(2).mean()


def fail_on(rank: int, step: int, world: int) -> None:
    """Let the next backward fail once, on one rank of this step."""
    FailingBackward.left = int(step % world == rank)


# ---------------------------------------------------------------------- all ways in


def by_backward(mbs: ElasticMBS, loss_fn: Callable[[Any], Tensor], batch: Any) -> StepResult:
    return mbs.backward(loss_fn, batch)


def by_loop(mbs: ElasticMBS, loss_fn: Callable[[Any], Tensor], batch: Any) -> StepResult:
    micro: MicroBatch
    for micro in mbs.micro_batches(batch):
        with micro:
            micro.backward(loss_fn(micro.data))
    assert mbs.last_result is not None
    return mbs.last_result


def train(rank: int, world: int, way: str, flags: dict[str, Any], called: str) -> list[float]:
    """Train on batches of unequal lengths; each step one rank fails, and one has no batch."""
    model, reference = net(), net()
    ddp = DDP(_compiled(model) if called == "compiled inside" else model, **flags)
    given = _compiled(ddp) if called == "compiled" else ddp
    module = ddp.module if called == "module" else given
    errors = []

    def loss_fn(x: Tensor) -> Tensor:
        return square(failing(module(x)))

    with ElasticMBS(given, distributed=TIMEOUT) as mbs:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        right = torch.optim.AdamW(reference.parameters(), lr=0.01)
        decorated = elastic_step(given, distributed=TIMEOUT)(loss_fn)
        for step in range(STEPS):
            fail_on(rank, step, world)
            batches = [data(each, step) for each in range(world)]
            idle = world - 1 if step == 2 else None  # this rank has no samples
            mine = None if rank == idle else batches[rank]
            if way == "decorator":
                result = decorated(mine)
            else:
                result = {"backward": by_backward, "loop": by_loop}[way](mbs, loss_fn, mine)
            loss = square(reference(joined([b for i, b in enumerate(batches) if i != idle])))
            loss.backward()
            errors += [worst(model, reference), abs(result.loss.item() - loss.item())]
            mbs.optimizer_step(optimizer)
            right.step()
            optimizer.zero_grad()
            right.zero_grad()
    return errors


def _compiled(model: nn.Module) -> nn.Module:
    compiled: Any = torch.compile(model, backend="aot_eager", dynamic=True)
    assert isinstance(compiled, nn.Module)  # its type says that it is a function
    return compiled


@pytest.mark.parametrize("way", ["backward", "loop", "decorator"])
def test_each_way_in_gives_the_gradient_and_the_loss_of_the_global_batch(way: str) -> None:
    for errors in values(run_ranks(train, way, {}, "ddp")):
        assert len(errors) == 2 * STEPS
        assert max(errors) < 1e-12


@pytest.mark.parametrize(
    "flags",
    [
        {"find_unused_parameters": True},
        {"static_graph": True},
        {"gradient_as_bucket_view": True},
        {"broadcast_buffers": False, "bucket_cap_mb": 1},
    ],
    ids=lambda flags: next(iter(flags)),
)
def test_no_option_of_ddp_changes_the_gradient(flags: dict[str, Any]) -> None:
    for errors in values(run_ranks(train, "backward", flags, "ddp")):
        assert max(errors) < 1e-12


def test_the_module_inside_may_be_called_as_well() -> None:
    for errors in values(run_ranks(train, "backward", {}, "module", world=3)):
        assert max(errors) < 1e-12


@pytest.mark.parametrize("called", ["compiled", "compiled inside"])
def test_a_compiled_model_may_have_its_wrapper_outside_or_inside(called: str) -> None:
    for errors in values(run_ranks(train, "backward", {}, called)):
        assert max(errors) < 1e-12


def test_a_job_of_one_rank_is_like_no_wrapper() -> None:
    (errors,) = values(run_ranks(train_alone, world=1))
    assert max(errors) == 0.0


def train_alone(rank: int, world: int) -> list[float]:
    model, reference = net(), net()
    ddp = DDP(model)
    errors = []
    with ElasticMBS(ddp, distributed=TIMEOUT) as mbs, ElasticMBS(reference) as plain:
        for step in range(STEPS):
            mbs.backward(lambda x: square(ddp(x)), data(0, step))
            plain.backward(lambda x: square(reference(x)), data(0, step))
            errors.append(worst(model, reference))
            model.zero_grad()
            reference.zero_grad()
    return errors


# ---------------------------------------------------------------------- what is summed


def valid(x: Tensor) -> Tensor:
    return (x[:, 0] > 0).long()


def masked(out: Tensor, x: Tensor) -> Tensor:
    return (out.pow(2).mean(1) * valid(x)).sum() / valid(x).sum()


def count_tokens_of_all(rank: int, world: int) -> list[float]:
    """Rank 1 has no token at all in step 1."""
    model, reference = net(), net()
    ddp = DDP(model)
    errors = []
    with ElasticMBS(ddp, count=valid, distributed=TIMEOUT) as mbs:
        for step in range(STEPS):
            fail_on(rank, step, world)
            batches = [data(each, step) for each in range(world)]
            if step == 1:
                batches[1][:, 0] = -1.0
            mbs.backward(lambda x: masked(failing(ddp(x)), x), batches[rank])
            whole = joined(batches)
            masked(reference(whole), whole).backward()
            errors.append(worst(model, reference))
            model.zero_grad()
            reference.zero_grad()
    return errors


def test_tokens_are_counted_over_all_ranks() -> None:
    for errors in values(run_ranks(count_tokens_of_all)):
        assert max(errors) < 1e-12


def sums_and_names(rank: int, world: int, options: Any) -> list[float]:
    """Rank 0 has no samples in step 3."""
    model, reference = net(), net()
    ddp = DDP(model)
    errors = []
    with ElasticMBS(ddp, **options, distributed=TIMEOUT) as mbs:

        def loss_fn(x: Tensor) -> Any:
            out = failing(ddp(x))
            if "count" in options:
                return {"all": square(out), "some": masked(out, x)}
            return out.pow(2).mean(1).sum() / mbs.total  # the total of all ranks

        for step in range(STEPS):
            fail_on(rank, step, world)
            batches = [data(each, step) for each in range(world)]
            idle = step == 3
            result = mbs.backward(loss_fn, None if idle and rank == 0 else batches[rank])
            whole = joined(batches[idle:])
            out = reference(whole)
            loss = square(out) + (masked(out, whole) if "count" in options else 0.0)
            loss.backward()
            errors += [worst(model, reference), abs(result.loss.item() - loss.item())]
            if "count" in options:
                errors.append(abs(result.losses["some"].item() - masked(out, whole).item()))
            model.zero_grad()
            reference.zero_grad()
    return errors


@pytest.mark.parametrize(
    "options", [{"reduction": "sum"}, {"count": {"all": None, "some": valid}}], ids=["sum", "names"]
)
def test_sums_and_losses_with_names_use_the_totals_of_all_ranks(options: Any) -> None:
    for errors in values(run_ranks(sums_and_names, options)):
        assert max(errors) < 1e-12


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
    ddp = DDP(model, find_unused_parameters=True)
    with ElasticMBS(ddp, distributed=TIMEOUT) as mbs:
        mbs.backward(lambda x: square(ddp(x, rank)), data(rank, 0, 6))
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
    model, reference = net(), net()
    ddp = DDP(model)
    with ElasticMBS(ddp, distributed=TIMEOUT) as mbs:
        for step in range(2):
            fail_on(rank, step, world)
            batches = [data(each, step) for each in range(world)]
            mbs.backward(lambda x: square(failing(ddp(x))), batches[rank])
            square(reference(joined(batches))).backward()
    mine = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    right = nn.utils.clip_grad_norm_(reference.parameters(), 0.1)
    return [worst(model, reference), abs(float(mine - right))]


def test_calls_before_one_step_add_up_and_clip_alike() -> None:
    for errors in values(run_ranks(accumulate)):
        assert max(errors) < 1e-12


def clear_inside(rank: int, world: int) -> float:
    """Clear old gradients before the first piece, as a loop may."""
    model, reference = net(), net()
    ddp = DDP(model)
    with ElasticMBS(ddp, micro_batch_size=3, distributed=TIMEOUT) as mbs:
        mbs.backward(lambda x: square(ddp(x)), data(rank, 0))
        for i, micro in enumerate(mbs.micro_batches(data(rank, 1))):
            with micro:
                if not i:
                    model.zero_grad()
                micro.backward(square(ddp(micro.data)))
    square(reference(joined([data(each, 1) for each in range(world)]))).backward()
    return worst(model, reference)


def test_gradients_that_are_cleared_before_the_first_piece_do_not_come_back() -> None:
    assert max(values(run_ranks(clear_inside))) < 1e-12


def scale(rank: int, world: int) -> list[tuple[float, bool]]:
    model = net().float()
    ddp = DDP(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    seen = []
    with ElasticMBS(ddp, scaler=scaler, distributed=TIMEOUT) as mbs:
        for step in range(5):
            fail_on(rank, step, world)

            def loss_fn(x: Tensor, factor: float) -> Tensor:
                return square(failing(ddp(x))) * factor

            factor = float("inf") if step == 3 and rank == 1 else 1.0
            mbs.backward(loss_fn, data(rank, step).float(), factor)
            before = copy.deepcopy(model.state_dict())
            mbs.optimizer_step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            after = model.state_dict()
            skipped = all(torch.equal(before[name], after[name]) for name in before)
            seen.append((scaler.get_scale(), skipped))
    return seen


def test_an_infinity_on_one_rank_skips_the_step_on_all() -> None:
    first, second = values(run_ranks(scale))
    assert first == second
    assert [skipped for _, skipped in first] == [False, False, False, True, False]


def two_models(rank: int, world: int) -> list[float]:
    torch.manual_seed(1)
    first, second = net(), nn.Linear(2, 3).double()
    right = copy.deepcopy(first), copy.deepcopy(second)
    one, two = DDP(first), DDP(second)
    errors = []
    with ElasticMBS([one, two], distributed=TIMEOUT) as mbs:
        for step in range(3):
            fail_on(rank, step, world)
            batches = [data(each, step) for each in range(world)]
            mbs.backward(lambda x: square(failing(two(one(x)))), batches[rank])
            square(right[1](right[0](joined(batches)))).backward()
            errors += [worst(first, right[0]), worst(second, right[1])]
            for module in (first, second, *right):
                module.zero_grad()
    return errors


def test_two_wrapped_models_train_in_one_runtime() -> None:
    for errors in values(run_ranks(two_models)):
        assert max(errors) < 1e-12


def thaw(rank: int, world: int) -> list[float]:
    model, reference = net(), net()
    ddp = DDP(model)
    errors = []
    with ElasticMBS(ddp, distributed=TIMEOUT) as mbs:
        for step in range(4):
            for each in (model, reference):
                each[2].requires_grad_(step >= 2)
            batches = [data(r, step) for r in range(world)]
            mbs.backward(lambda x: square(ddp(x)), batches[rank])
            square(reference(joined(batches))).backward()
            errors.append(worst(model, reference))
            model.zero_grad()
            reference.zero_grad()
    return errors


def test_a_layer_may_thaw() -> None:
    for errors in values(run_ranks(thaw)):
        assert max(errors) < 1e-12


# ---------------------------------------------------------------------- buffers, and no collective


def statistics(rank: int, world: int, sends: bool) -> tuple[list[float], list[float]]:
    torch.manual_seed(0)
    norm = nn.BatchNorm1d(3)
    model = nn.Sequential(nn.Linear(4, 3), norm).double()
    ddp = DDP(model, broadcast_buffers=sends)
    with ElasticMBS(ddp, distributed=TIMEOUT) as mbs:
        mbs.backward(lambda x: square(ddp(x)), data(rank, 0))
    own = nn.BatchNorm1d(3).double()
    own(model[0](data(0, 0)))
    assert norm.running_mean is not None
    assert own.running_mean is not None
    return norm.running_mean.tolist(), own.running_mean.tolist()


def test_buffers_are_those_of_rank_0_where_ddp_broadcasts_them() -> None:
    (first, right), (second, _) = values(run_ranks(statistics, True))
    assert first == second == pytest.approx(right, abs=1e-15)
    (first, right), (second, _) = values(run_ranks(statistics, False))
    assert first == pytest.approx(right, abs=1e-15)
    assert first != second


def evaluate(rank: int, world: int) -> int:
    """Evaluate another number of times on each rank."""
    torch.manual_seed(0)
    ddp = DDP(nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)).double())
    group: Any = torch.distributed.group.WORLD
    with ElasticMBS(ddp, distributed=TIMEOUT) as mbs:
        before = group._get_sequence_number_for_group()
        for _ in range(2 + 3 * rank):
            mbs.evaluate(ddp, data(rank, 0))
        made = group._get_sequence_number_for_group() - before
        ddp.train()
        mbs.backward(lambda x: square(ddp(x)), data(rank, 1))
    return int(made)


def test_an_evaluation_makes_no_collective() -> None:
    assert values(run_ranks(evaluate)) == [0, 0]


def rehearse(rank: int, world: int) -> tuple[bool, str]:
    ddp = DDP(net())
    with ElasticMBS(ddp, distributed=TIMEOUT) as mbs:
        if rank:  # beside the loop, on one rank only
            return True, ""
        report = mbs.verify(lambda x: square(ddp(x)), data(0, 0))
        plan = mbs.plan(lambda x: square(ddp(x)), data(0, 0))
        return report.ok, plan.reason or ""


def test_verify_and_plan_work_on_one_rank_alone() -> None:
    assert values(run_ranks(rehearse))[0] == (True, "")


def short_of_memory(rank: int, world: int) -> tuple[float, int]:
    """Rank 0 has room for a quarter of its batch."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 2)).double()
    reference = copy.deepcopy(model)
    ddp = DDP(model)
    batches = [torch.randn(128, 64, dtype=torch.float64) for _ in range(world)]
    size = 128
    with MemoryBudget("100GiB" if rank else "1000KiB") as budget:
        budget.track(model, batches[rank])
        memory = MemoryOptions(wait_for_memory=0)
        with ElasticMBS(ddp, memory=memory, distributed=TIMEOUT) as mbs:
            for _ in range(2):
                model.zero_grad()
                size = mbs.backward(lambda x: square(ddp(x)), batches[rank]).micro_batch_size
    square(reference(joined(batches))).backward()
    return worst(model, reference), size


def test_each_rank_has_a_size_of_its_own() -> None:
    (first, small), (second, whole) = values(run_ranks(short_of_memory))
    assert max(first, second) < 1e-12
    assert small < whole == 128


def reopen(rank: int, world: int) -> float:
    model, reference = net(), net()
    ddp = DDP(model)
    mbs = ElasticMBS(ddp, distributed=TIMEOUT)
    for _ in range(2):
        with mbs:
            mbs.backward(lambda x: square(ddp(x)), data(rank, 0))
    for _ in range(2):
        square(reference(joined([data(each, 0) for each in range(world)]))).backward()
    return worst(model, reference)


def test_a_runtime_may_be_used_again_after_its_end() -> None:
    assert max(values(run_ranks(reopen))) < 1e-12


# ---------------------------------------------------------------------- run logs


def logged(rank: int, world: int, path: str) -> None:
    ddp = DDP(net())
    with ElasticMBS(ddp, distributed=TIMEOUT, log=path) as mbs:
        mbs.backward(lambda x: square(ddp(x)), data(rank, 0))


def test_each_rank_writes_a_run_log_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    values(run_ranks(logged, str(path)))
    runs = [run for file in files_of(path) for run in read_log(file)]
    assert [run.header["rank"] for run in runs] == [0, 1]
    assert {run.header["ranks"] for run in runs} == {2}
    assert len({run.header["job"] for run in runs}) == 1
    assert not path.exists()
