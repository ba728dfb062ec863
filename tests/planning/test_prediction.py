"""A plan predicts the memory of a step, as a `MemoryBudget` counts it exactly."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from elastic_mbs import ElasticMBS, MemoryBudget, PlanReport
from elastic_mbs.controller.peak import PeakModel
from tests.helpers.planned import SUBJECTS, Subject, gpt, mlp, peak_of
from tests.helpers.steps import quiet, there

GREAT = 2**40


def first_samples(batch: Any, samples: int) -> Any:
    return torch.utils._pytree.tree_map_only(Tensor, lambda leaf: leaf[:samples], batch)


def plan_of(
    subject: Subject, optimizer: torch.optim.Optimizer | None = None, **options: Any
) -> tuple[PlanReport, PeakModel, int]:
    model, loss_fn, batch = subject
    report = ElasticMBS(model, **quiet(**options)).plan(loss_fn, batch, optimizer=optimizer)
    assert report.reason is None
    return report, there(report.model), sum(leaf[0].numel() for leaf in batch)


def real_peaks(
    budget: MemoryBudget, subject: Subject, sizes: list[int], *, emptied: bool
) -> dict[int, int]:
    """Return the peaks of forward and backward by size, into empty or existing gradients."""
    model, loss_fn, batch = subject
    found = {}
    for size in sizes:
        piece = first_samples(batch, size)
        loss_fn(piece).backward()
        if emptied:
            model.zero_grad()
        found[size] = peak_of(budget, lambda piece=piece: loss_fn(piece).backward())  # type: ignore[misc]
    return found


@pytest.mark.parametrize("emptied", [False, True], ids=["into gradients", "into none"])
@pytest.mark.parametrize("make", SUBJECTS)
def test_one_measured_peak_predicts_sizes_up_to_16_times_as_large(
    make: Callable[[int], Subject], emptied: bool
) -> None:
    torch.manual_seed(0)
    calibrated = 4
    subject = make(16 * calibrated)
    with MemoryBudget(GREAT, track=[subject[0], *subject[2]]) as budget:
        _, planned, elements = plan_of(subject)
        real = real_peaks(
            budget, subject, [calibrated * k for k in (1, 2, 3, 5, 8, 12, 16)], emptied=emptied
        )
    planned.add(calibrated * elements, real.pop(calibrated), elements=elements, first=emptied)
    predicted = {size: there(planned.predict(size * elements, first=emptied)) for size in real}
    errors = {size: predicted[size] / peak - 1 for size, peak in real.items()}
    mean = sum(real.values()) / len(real)
    missed = sum((predicted[size] - peak) ** 2 for size, peak in real.items())
    assert max(map(abs, errors.values())) <= 0.001, (planned.kappa, errors)
    assert 1 - missed / sum((peak - mean) ** 2 for peak in real.values()) >= 0.99


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
    "adamw": torch.optim.AdamW,
    "adamw on all at once": lambda p: torch.optim.AdamW(p, foreach=True),
    "adamw fused": lambda p: torch.optim.AdamW(p, fused=True),
    "state from the start": torch.optim.Adagrad,
    "factored": torch.optim.Adafactor,
    "averaged": torch.optim.ASGD,
}


@pytest.mark.parametrize("trained", [False, True], ids=["new", "trained"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_step_and_its_state_are_predicted_before_there_is_any(name: str, trained: bool) -> None:
    torch.manual_seed(0)
    subject = mlp(16)
    model, loss_fn, batch = subject
    with MemoryBudget(GREAT, track=[model, *batch]) as budget:
        optimizer = OPTIMIZERS[name](model.parameters())
        scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)  # wraps the step

        def step() -> None:
            loss_fn(batch).backward()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()

        if trained:
            step()
        report, planned, elements = plan_of(subject, optimizer)
        for _ in range(2):
            step()
        assert budget.live == pytest.approx(
            sum((report.sizes[0].parameters, report.sizes[0].optimizer, report.sizes[0].other)),
            abs=256,
        )
        loss_fn(batch).backward()
        real = peak_of(budget, optimizer.step), peak_of(budget, lambda: loss_fn(batch).backward())
    assert report.step == pytest.approx(real[0], rel=0.01)
    assert there(planned.predict(16 * elements)) == pytest.approx(max(real), rel=0.01)


class Uneven(nn.Module):
    """A model with operations that differ by size: a loop over samples, and more for many."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        rows = torch.stack([self.layer(row).tanh() for row in x])
        return rows * rows.exp().detach() if len(x) > 12 else rows


def test_operations_that_differ_by_size_take_no_more_than_predicted() -> None:
    model = Uneven()
    batch = torch.randn(32, 64), torch.randn(32, 64)
    subject: Subject = model, lambda b: (model(b[0]) - b[1]).square().mean(), batch
    with MemoryBudget(GREAT, track=[model, *batch]) as budget:
        report, planned, elements = plan_of(subject)
        real = real_peaks(budget, subject, [2, 4, 8, 16, 32, 7, 25], emptied=False)
    for size, peak in real.items():
        assert peak <= 1.001 * there(planned.predict(size * elements)) <= 1.3 * peak
    assert planned.predict(64 * elements) is not None
    assert planned.predict(65 * elements) is None  # too far from the traces
    assert report.sizes[-1].size == 1


def test_isolated_gradients_are_counted_twice() -> None:
    subject = gpt(8)
    gradients = sum(leaf.nbytes for leaf in subject[0].parameters())
    # The host's meter reads the whole process, which grows between plans; a budget counts exactly.
    with MemoryBudget(GREAT, track=[subject[0], *subject[2]]):
        usual, isolated, wide = (
            plan_of(subject, **options)[1]
            for options in ({}, {"replay": "isolate"}, {"accumulate_dtype": torch.float64})
        )
    assert there(isolated.predict(10**4)) - there(usual.predict(10**4)) <= gradients
    assert there(isolated.predict(1)) > there(usual.predict(1))
    assert there(wide.predict(1)) - there(isolated.predict(1)) == pytest.approx(gradients, rel=0.01)


@pytest.mark.parametrize("there_before", [False, True])
def test_gradients_that_are_there_are_planned_to_the_byte(there_before: bool) -> None:
    """They are set aside while a piece runs, so a piece makes gradients once more."""
    model, loss_fn, batch = mlp(64)
    with MemoryBudget(GREAT, track=[model]) as budget:
        if there_before:
            loss_fn(batch).backward()
        mbs = ElasticMBS(model, **quiet(sensor=budget))
        planned = there(mbs.plan(loss_fn, batch).sizes[0].peak)
        budget.reset_peak()
        mbs.backward(loss_fn, batch)
    assert budget.peak == pytest.approx(planned, rel=0.001)


@pytest.mark.parametrize("samples", [1, 2, 3])
def test_a_short_batch_predicts_within_its_traces(samples: int) -> None:
    subject = mlp(samples)
    report, planned, elements = plan_of(subject)
    assert [planned_size.size for planned_size in report.sizes] == sorted(
        {samples, -(-samples // 2)}, reverse=True
    )
    assert planned.predict(samples * elements) is not None
    assert (planned.predict(1000 * elements) is None) == (samples == 1)


@pytest.mark.parametrize("size", [32, 16, 4])
def test_the_gradient_of_a_batch_that_requires_grad_is_planned(size: int) -> None:
    torch.manual_seed(0)
    model, loss_fn, batch = mlp(32)
    batch[0].requires_grad_()
    with MemoryBudget(GREAT, track=[model, *batch]) as budget:
        mbs = ElasticMBS(model, **quiet(sensor=budget, micro_batch_size=size, grow=False))
        report = mbs.plan(loss_fn, batch, apply=False)
        planned = {row.size: row.peak for row in report.sizes}[size]
        assert [leaf.grad for leaf in batch] == [None, None]
        budget.reset_peak()
        result = mbs.backward(loss_fn, batch)
        real = budget.peak
    assert len(result.partition) == 32 // size
    assert real == pytest.approx(there(planned), rel=0.02)


def test_products_in_groups_are_planned_in_single_precision() -> None:
    weight = nn.Parameter(torch.randn(4, 64, 128))
    model = nn.ParameterList([weight])

    def loss_fn(rows: Tensor) -> Tensor:
        ends = torch.arange(1, 5, dtype=torch.int32) * (len(rows) // 4)
        loss: Tensor = torch._grouped_mm(rows * 2, weight, offs=ends).square().mean()
        return loss

    batch = torch.randn(256, 64)
    try:
        loss_fn(batch).backward()
    except (AttributeError, RuntimeError):
        pytest.skip("this torch has no such product on the CPU")
    weight.grad = None
    with MemoryBudget(GREAT, track=[model, batch]) as budget:
        mbs = ElasticMBS(model, **quiet(sensor=budget))
        report = mbs.plan(loss_fn, batch, apply=False)
        assert report.reason is None
        budget.reset_peak()
        mbs.backward(loss_fn, batch)
    assert there(report.sizes[0].peak) == pytest.approx(budget.peak, rel=0.05)
