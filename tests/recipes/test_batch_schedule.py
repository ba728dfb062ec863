"""A schedule grows where a scheduler would decay, keeps the quotient, and never shrinks."""

import json
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import (
    ChainedScheduler,
    CosineAnnealingLR,
    ExponentialLR,
    LRScheduler,
    MultiStepLR,
    ReduceLROnPlateau,
    StepLR,
)

from elastic_mbs import NoiseScale, UsageError
from elastic_mbs.recipes import BatchSchedule, gradual_warmup
from tests.helpers.steps import elastic
from tests.recipes.test_rate import optimizer, rates

Make = Callable[[Optimizer], LRScheduler]


def test_the_papers_own_schedule() -> None:
    """Wide ResNet 16-4 on CIFAR-10: 128 to 5,120 samples, rate / 5 after 60, 120, 160 epochs."""
    make: Make = partial(MultiStepLR, milestones=[60, 120, 160], gamma=0.2)
    schedule = BatchSchedule.from_scheduler(make, 128, steps=200, limit=5120)
    assert schedule.changes == ((0, 128), (60, 640), (120, 3200), (160, 5120))
    assert [schedule.batch(step) for step in (0, 59, 60, 199)] == [128, 128, 640, 5120]
    assert [schedule.rate(step) for step in (0, 159)] == pytest.approx([1, 1], rel=1e-12)
    # what is missing to 16,000 samples is decayed
    assert schedule.rate(160) == pytest.approx(5120 / 128 / 125, rel=1e-12)
    assert (
        BatchSchedule.from_scheduler(make, 128, steps=200, samples=51_200).changes
        == schedule.changes
    )


MAKERS: list[Make] = [
    partial(MultiStepLR, milestones=[3, 7, 8], gamma=0.2),
    partial(StepLR, step_size=4, gamma=0.3),
    partial(ExponentialLR, gamma=0.9),
    partial(CosineAnnealingLR, T_max=30),
]


@given(st.sampled_from(MAKERS), st.integers(1, 300), st.integers(1, 50))
def test_the_quotient_of_rate_and_batch_is_the_schedulers_at_every_step(
    make: Make, batch: int, room: int
) -> None:
    schedule = BatchSchedule.from_scheduler(make, batch, steps=30, limit=batch * room)
    for step, rate in enumerate(rates(make(optimizer(1.0)), 30)):
        size = schedule.batch(step)
        assert schedule.rate(step) / size == pytest.approx(rate / batch, rel=1e-9, abs=1e-15)
        assert size == min(batch * room, round(batch / rate)) or abs(rate * size / batch - 1) < 1e-9
        assert step == 0 or size >= schedule.batch(step - 1)


def test_the_rest_of_the_decay_goes_with_other_schedulers() -> None:
    schedule = BatchSchedule.from_scheduler(
        partial(MultiStepLR, milestones=[4, 6, 8], gamma=0.1), 10, steps=10, limit=100
    )
    one = optimizer(0.8)
    found = rates(ChainedScheduler([gradual_warmup(one, 8, 2), schedule.scheduler(one)]), 12)
    assert found == pytest.approx([0.1, 0.45] + [0.8] * 4 + [0.08] * 2 + [0.008] * 4, rel=1e-9)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ([], "no batch for step 0"),
        ([(1, 8)], "no batch for step 0"),
        ([(0, 8), (5, 4)], "shrinks from 8 to 4 at step 5"),
        ([(0, 8), (5, 16), (5, 32)], "step 5 comes after step 5"),
        ([(0, 8), (2.5, 16)], "step 2.5"),
        ([(0, 0)], "a batch of 0 at step 0"),
        ([(0, 8.0)], "a batch of 8.0"),
        ([5], r"no \(step, batch\) pairs"),
        ([(0, 8, 16)], r"no \(step, batch\) pairs"),
        (5, r"no \(step, batch\) pairs"),
    ],
)
def test_a_schedule_that_shrinks_or_makes_no_sense_is_refused(changes: Any, named: str) -> None:
    with pytest.raises(UsageError, match=named):
        BatchSchedule(changes)


WARM: Make = partial(torch.optim.lr_scheduler.LinearLR, start_factor=0.1, total_iters=3)


@pytest.mark.parametrize(
    ("make", "options", "named"),
    [
        (WARM, {"limit": 100}, "the rate rises at step 1.*gradual_warmup"),
        (
            ReduceLROnPlateau,
            {"limit": 100},
            "rate of ReduceLROnPlateau does not follow from its step",
        ),
        (MAKERS[0], {}, "one of the two"),
        (MAKERS[0], {"samples": 100, "limit": 100}, "one of the two"),
        (MAKERS[0], {"samples": 79}, "a tenth of samples is 7, below the first batch of 8"),
        (MAKERS[0], {"limit": 7}, "limit is 7, below"),
        (MAKERS[0], {"limit": 100, "steps": 0}, "steps=0"),
        (MAKERS[0], {"limit": 100, "steps": 2.5}, "steps=2.5"),
        (MAKERS[0], {"limit": 100, "batch": 0}, "a batch of 0"),
    ],
)
def test_a_scheduler_that_says_no_sizes_is_refused(
    make: Any, options: dict[str, Any], named: str
) -> None:
    with pytest.raises(UsageError, match=named):
        BatchSchedule.from_scheduler(make, **{"batch": 8, "steps": 10, **options})


def test_a_step_below_0_is_refused() -> None:
    with pytest.raises(UsageError, match="step=-1"):
        BatchSchedule([(0, 8)]).batch(-1)


# ---------------------------------------------------------------------- following the noise scale


def noise(value: float, error: float = 0.0) -> NoiseScale:
    return NoiseScale(value, 1.0, error, 10)


def test_the_batch_doubles_to_what_the_noise_scale_is_known_to_allow() -> None:
    schedule = BatchSchedule.from_noise_scale(16, limit=200, ahead=2)
    for step, (seen, batch) in enumerate(
        [
            (None, 16),
            (noise(31), 16),
            (noise(100, 70), 16),
            (noise(70, 5), 64),
            (noise(20), 64),
            (noise(10**6), 128),
            (noise(10**6), 128),
        ]
    ):
        schedule.follow(seen, step)
        assert schedule.changes[-1][1] == batch, step
    assert schedule.changes == ((0, 16), (5, 64), (7, 128))
    assert [schedule.batch(step) for step in (4, 5, 7)] == [16, 64, 128]
    assert schedule.rate(9) == 1.0


@pytest.mark.parametrize(
    "unknown",
    [NoiseScale(1.0, -1.0, math.inf, 5), NoiseScale(100.0, 1.0, math.inf, 1), noise(math.nan)],
)
def test_an_unknown_noise_scale_grows_nothing(unknown: NoiseScale) -> None:
    schedule = BatchSchedule.from_noise_scale(2, limit=64)
    schedule.follow(unknown, 0)
    assert schedule.changes == ((0, 2),)


def test_a_resumed_schedule_has_grown_and_a_fixed_one_must_be_the_same() -> None:
    one, other = (BatchSchedule.from_noise_scale(2, limit=64) for _ in range(2))
    one.follow(noise(9), 3)
    other.load_state_dict(json.loads(json.dumps(one.state_dict())))
    assert other.changes == ((0, 2), (4, 8))
    fixed = BatchSchedule([(0, 2), (4, 8)])
    fixed.load_state_dict(one.state_dict())
    with pytest.raises(UsageError, match="the saved run had another schedule"):
        BatchSchedule([(0, 2)]).load_state_dict(one.state_dict())


def test_only_a_schedule_that_follows_can_be_told_to() -> None:
    with pytest.raises(UsageError, match="from_noise_scale"):
        BatchSchedule([(0, 2)]).follow(noise(9), 0)
    with pytest.raises(UsageError, match="ahead=0"):
        BatchSchedule.from_noise_scale(2, limit=64, ahead=0)


def test_a_run_follows_its_own_noise_scale() -> None:
    # a quadratic bowl: a sample's gradient is w - x, so tr(Σ) is the data's variance, |G|² is |w|²
    torch.manual_seed(0)
    weight = nn.Parameter(torch.full((4,), 2.0, dtype=torch.float64))
    model = nn.ParameterList([weight])
    schedule = BatchSchedule.from_noise_scale(8, limit=512)
    mbs = elastic(model, micro_batch_size=4, noise_scale=100)
    still = SGD([weight], lr=0.0)
    for step in range(60):
        batch = torch.randn(schedule.batch(step), 4, dtype=torch.float64) * 6
        result = mbs.backward(lambda x: (weight - x).square().sum(1).mean() / 2, batch)
        still.zero_grad()
        schedule.follow(result.noise_scale, step)
    assert result.noise_scale is not None
    assert result.noise_scale.value == pytest.approx(4 * 36 / 16, rel=0.3)
    assert schedule.changes[-1][1] == 8
    # nearer to the minimum there is more noise than gradient: 225 samples, so 128 or less
    weight.data /= 5
    for step in range(60, 500):
        batch = torch.randn(schedule.batch(step), 4, dtype=torch.float64) * 6
        schedule.follow(
            mbs.backward(lambda x: (weight - x).square().sum(1).mean() / 2, batch).noise_scale, step
        )
        still.zero_grad()
    mbs.close()
    assert schedule.changes[-1][1] in (64, 128)
