"""After a plan the first step runs at the largest size that fits, without an error or search."""

import json
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from elastic_mbs import ElasticMBS, MemoryBudget
from elastic_mbs.controller.controller import (
    CallOutcome,
    Capacity,
    Controller,
    Extent,
    Key,
    Policy,
)
from elastic_mbs.controller.memory_model import UNCHECKED
from elastic_mbs.controller.peak import Line, PeakModel
from stress.flat_options import grouped
from tests.helpers.planned import SUBJECTS, Subject, cnn, gpt
from tests.helpers.steps import grads, quiet, there

AT_ONCE: dict[str, Any] = {"monitor_interval": 0, "seed": 0}


@pytest.mark.parametrize("share", [0.1, 1.1])
@pytest.mark.parametrize("make", SUBJECTS)
def test_the_first_steps_run_at_the_largest_size_that_fits(
    make: Callable[[int], Subject], share: float
) -> None:
    torch.manual_seed(0)
    model, loss_fn, batch = make(48)
    optimizer = torch.optim.AdamW(model.parameters())
    with MemoryBudget(2**40, track=[model, *batch]) as budget:
        mbs = ElasticMBS(model, **grouped(AT_ONCE))
        ends = mbs.plan(loss_fn, batch, optimizer=optimizer).sizes
        budget.limit = (
            int(
                (there(ends[-1].peak) + share * (there(ends[0].peak) - there(ends[-1].peak))) / 0.95
            )
            + 1024
        )
        report = mbs.plan(loss_fn, batch, optimizer=optimizer)
        largest = there(report.largest)
        assert largest == 48 if share > 1 else 1 <= largest < 48
        for _ in range(3):
            result = mbs.backward(loss_fn, batch)
            optimizer.step()
            optimizer.zero_grad()
            assert (result.ooms, result.replayed_samples) == (0, 0)
            assert len(result.partition) == -(-48 // largest)
        assert budget.ooms == 0
    assert there(report.model).kappa == pytest.approx(1, abs=0.02)
    assert there(report.model).spread in (UNCHECKED, pytest.approx(0, abs=0.01)), (
        "where one size was measured"
    )
    if largest < 48:  # One more sample would have cut into the margin.
        size = max(largest + 1, 2)
        assert not there(report.model).fits(
            size * (batch[0][0].numel() + batch[1][0].numel()),
            there(report.usable),
            first=size == 48,
        )


def test_a_step_after_a_plan_is_the_step_of_that_partition() -> None:
    torch.manual_seed(0)
    (model, loss_fn, batch), (other, other_loss, _) = gpt(12), gpt(12)
    other.load_state_dict(model.state_dict())
    with MemoryBudget(2**40, track=[model, *batch]):
        mbs = ElasticMBS(model, **grouped(AT_ONCE))
        half = there(mbs.plan(loss_fn, batch).sizes[1].peak)
        assert mbs.plan(loss_fn, batch, budget=int(half / 0.95) + 1).largest == 6
        result = mbs.backward(loss_fn, batch)
    assert result.partition == ((0, 6), (6, 12))
    for start, stop in result.partition:
        (other_loss((batch[0][start:stop], batch[1][start:stop])) / 2).backward()
    for one, two in zip(grads(model), grads(other), strict=True):
        assert torch.equal(there(one), there(two))


@torch.library.custom_op("elastic_mbs_tests::worked", mutates_args=())
def worked(x: Tensor) -> list[Tensor]:
    return [2 * x, x.repeat(4, 1)]


@worked.register_fake
def _(x: Tensor) -> list[Tensor]:
    # Fakes of torch's own operations do not know the workspace of a kernel either.
    return [torch.empty_like(x), x.new_empty(0)]


worked.register_autograd(
    lambda ctx, grads: 2 * grads[0],
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(output[1]),
)


def test_the_first_steps_correct_a_plan_that_missed_a_kernels_memory() -> None:
    model, batch = nn.Linear(64, 64), torch.randn(64, 64)

    def loss_fn(batch: Tensor) -> Tensor:
        loss: Tensor = torch.ops.elastic_mbs_tests.worked(model(batch))[0].square().mean()
        return loss

    with MemoryBudget(2**40, track=[model, batch]) as budget:
        mbs = ElasticMBS(model, **grouped({**AT_ONCE, "patience": 1, "jitter": 0.0}))
        report = mbs.plan(loss_fn, batch)
        budget.limit = int(1.2 * there(report.sizes[1].peak))
        failures = [mbs.backward(loss_fn, batch).ooms for _ in range(8)]
    assert there(report.model).kappa > 1.1
    assert failures[0] > 0
    assert sum(failures[1:]) == 0


def test_the_size_and_the_model_of_the_peak_survive_being_saved() -> None:
    model, loss_fn, batch = cnn(16)
    with MemoryBudget(2**40, track=[model, *batch]) as budget:
        mbs = ElasticMBS(model, **grouped(AT_ONCE))
        budget.limit = int(there(mbs.plan(loss_fn, batch).sizes[1].peak) / 0.95) + 1
        assert mbs.plan(loss_fn, batch).largest == 8
        other = ElasticMBS(model, **grouped(AT_ONCE))
        other.load_state_dict(json.loads(json.dumps(mbs.state_dict())))
        assert other.backward(loss_fn, batch).partition == ((0, 8), (8, 16))


def test_without_a_reading_there_is_a_table_and_the_size_stays() -> None:
    model, loss_fn, batch = cnn(16)
    mbs = ElasticMBS(model, **quiet())
    report = mbs.plan(loss_fn, batch)
    assert (report.largest, report.capacity, report.sizes[0].fits) == (None, None, None)
    assert "give budget=" in str(report)
    assert mbs.backward(loss_fn, batch).partition == ((0, 16),)


KEY = Key("loss", "train", 3)


def controller(**options: Any) -> Controller:
    return Controller(
        start=None,
        policy=Policy(patience=1, jitter=0, seed=0, **options),
        clock=iter(range(10**6)).__next__,
        random=random.Random(0),
    )


def planned_peak(slope: int = 10) -> PeakModel:
    line = Line(100, 0, slope)
    return PeakModel([line], [line], held=1000)


def test_full_speed_is_back_in_one_move_where_the_peak_is_planned() -> None:
    control = controller()
    control.planned(KEY, 64, 8, planned_peak(), 4)
    sizes = []
    for at in range(1, 4):
        plan = control.begin(KEY, Extent(64, 8, 64))
        outcome = CallOutcome(64, 8, 64 // plan.size, 1100 + 80 * plan.size, 1.0, None, 0)
        move = control.end(KEY, outcome, Capacity(10**6, 10.0 * at + 100))
        sizes.append(move.after if move else None)
    assert sizes == [64, None, None]


def test_a_plan_in_the_middle_of_a_run_counts_more_than_the_failures_before_it() -> None:
    control = controller()
    for at in range(12):
        control.begin(KEY, Extent(64, 8, 64))
        for attempted in (64, 32, 16):
            control.out_of_memory(KEY, attempted, Capacity(10**4, float(at)))
        control.end(KEY, CallOutcome(64, 8, 8, None, 1.0, None, 0, ooms=3), None)
    assert control.begin(KEY, Extent(64, 8, 64)).size <= 8
    control.planned(KEY, 64, 8, planned_peak(), 64)
    assert control.begin(KEY, Extent(64, 8, 64)).size == 64
    assert control.out_of_memory(KEY, 64, Capacity(10**4, 100.0)) == 32
    control.end(KEY, CallOutcome(64, 8, 2, None, 1.0, None, 0, ooms=1), None)


@pytest.mark.parametrize(
    ("align", "samples", "size", "pieces"),
    [(1, 7, 7, 1), (4, 7, 7, 1), (4, 23, 10, 3), (4, 23, 0, 6)],
)
def test_a_planned_size_is_aligned_and_a_batch_that_fits_is_not_split(
    align: int, samples: int, size: int, pieces: int
) -> None:
    control = controller(align=align)
    control.planned(KEY, samples, 8, planned_peak(), size)
    assert -(-samples // control.begin(KEY, Extent(samples, 8, samples)).size) == pieces
    # A batch of another shape before any call gets no more elements at once.
    other = control.begin(KEY._replace(shape=4), Extent(samples, 16, samples))
    assert other.size <= max(size, align)


def test_a_loop_written_out_starts_at_the_size_planned_under_its_name() -> None:
    model, _, batch = gpt(12)

    def loss_fn(piece: Any) -> Tensor:
        return functional.cross_entropy(model(piece[0]).flatten(0, 1), piece[1].flatten())

    with MemoryBudget(2**40, track=[model, *batch]):
        mbs = ElasticMBS(model, **grouped(AT_ONCE))
        half = there(mbs.plan(loss_fn, batch).sizes[1].peak)
        mbs.plan(loss_fn, batch, budget=int(half / 0.95) + 1)
        for micro in mbs.micro_batches(batch, name=loss_fn.__qualname__):
            with micro:
                micro.backward(loss_fn(micro.data))
    assert there(mbs.last_result).partition == ((0, 6), (6, 12))


def test_a_plan_that_is_not_applied_changes_no_size() -> None:
    model, loss_fn, batch = gpt(12)
    with MemoryBudget(2**40, track=[model, *batch]):
        mbs = ElasticMBS(model, **grouped(AT_ONCE))
        before = mbs.state_dict()
        report = mbs.plan(loss_fn, batch, apply=False)
        budget = int(there(report.sizes[1].peak) / 0.95) + 1
        assert mbs.plan(loss_fn, batch, budget=budget, apply=False).largest == 6
        assert mbs.state_dict() == before
        assert mbs.size_models == {}
        assert mbs.backward(loss_fn, batch).partition == ((0, 12),)
