"""The rate of a larger batch and the way to it, against closed forms."""

from collections.abc import Callable
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
    LRScheduler,
    MultiStepLR,
    SequentialLR,
)

from elastic_mbs import UsageError
from elastic_mbs.recipes import gradual_warmup, linear_scaling


def optimizer(lr: float, **options: Any) -> SGD:
    return SGD([nn.Parameter(torch.zeros(1))], lr=lr, **options)


def rates(scheduler: LRScheduler | ChainedScheduler, steps: int) -> list[float]:
    """The rate of each step."""
    of = (
        scheduler.optimizer
        if isinstance(scheduler, LRScheduler)
        else scheduler._schedulers[0].optimizer
    )
    found = []
    for _ in range(steps):
        found.append(float(of.param_groups[0]["lr"]))
        of.step()
        scheduler.step()
    return found


@given(st.floats(1e-6, 10), st.integers(1, 10**6), st.integers(1, 10**6))
def test_k_times_the_batch_has_k_times_the_rate(lr: float, batch: int, reference: int) -> None:
    assert linear_scaling(lr, batch, reference) == pytest.approx(lr * batch / reference, rel=1e-12)


def test_the_papers_own_figures() -> None:
    assert linear_scaling(0.1, 8192, 256) == pytest.approx(3.2, rel=1e-15)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ((0.1, 0, 256), "batch=0"),
        ((0.1, 256, 2.5), "reference_batch=2.5"),
        ((-1.0, 8, 8), "lr=-1.0"),
        ((float("nan"), 8, 8), "lr=nan"),
        (("x", 8, 8), "lr='x'"),
    ],
)
def test_a_batch_or_a_rate_that_makes_no_sense_is_refused(arguments: Any, named: str) -> None:
    with pytest.raises(UsageError, match=named):
        linear_scaling(*arguments)


# ---------------------------------------------------------------------- warm-up


@given(st.floats(1, 64), st.integers(1, 40))
def test_the_warm_up_goes_from_the_reference_rate_to_k_times_it_by_equal_increments(
    k: float, steps: int
) -> None:
    large = optimizer(0.1 * k, weight_decay=5e-4)
    found = rates(gradual_warmup(large, k, steps), steps + 3)
    wanted = [0.1 + 0.1 * (k - 1) * min(step, steps) / steps for step in range(steps + 3)]
    assert found == pytest.approx(wanted, rel=1e-9)
    assert large.param_groups[0]["weight_decay"] == 5e-4


SCHEDULERS: list[Callable[[Optimizer], LRScheduler]] = [
    lambda o: MultiStepLR(o, [4, 9], 0.1),
    lambda o: CosineAnnealingLR(o, 20),
]


@pytest.mark.parametrize("make", SCHEDULERS, ids=["steps", "cosine"])
def test_beside_any_scheduler_it_multiplies_that_ones_rate(
    make: Callable[[Optimizer], LRScheduler],
) -> None:
    one = optimizer(0.8)
    together = rates(ChainedScheduler([gradual_warmup(one, 8, 5), make(one)]), 15)
    wanted = [
        rate * (1 / 8 + 7 / 8 * min(step, 5) / 5)
        for step, rate in enumerate(rates(make(optimizer(0.8)), 15))
    ]
    assert together == pytest.approx(wanted, rel=1e-9)


@pytest.mark.filterwarnings("ignore:The epoch parameter in")  # torch's own SequentialLR uses it
def test_before_another_scheduler_it_comes_first_and_then_that_one() -> None:
    one = optimizer(0.8)
    found = rates(
        SequentialLR(one, [gradual_warmup(one, 8, 5), MultiStepLR(one, [3], 0.1)], milestones=[5]),
        12,
    )
    assert found == pytest.approx(
        [0.1 + 0.7 * step / 5 for step in range(5)] + [0.8] * 3 + [0.08] * 4, rel=1e-9
    )


@pytest.mark.parametrize(
    ("k", "steps", "named"),
    [(0.5, 5, "k=0.5"), (float("inf"), 5, "k=inf"), (8, 0, "steps=0"), (8, 2.5, "steps=2.5")],
)
def test_a_warm_up_that_makes_no_sense_is_refused(k: Any, steps: Any, named: str) -> None:
    with pytest.raises(UsageError, match=named):
        gradual_warmup(optimizer(0.1), k, steps)
