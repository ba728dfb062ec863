"""The rate of a larger batch, the way to it, and what a velocity has to be told of a change: against closed forms."""

import copy
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import (
    ChainedScheduler,
    CosineAnnealingLR,
    LRScheduler,
    MultiStepLR,
    SequentialLR,
)

from elastic_mbs import UsageError
from elastic_mbs.recipes import gradual_warmup, linear_scaling, momentum_correction


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


# ---------------------------------------------------------------------- momentum


class Absorbing(Optimizer):
    """v ← m·v + η·g, w ← w - v: the velocity has absorbed the rate."""

    def __init__(self, parameters: Iterable[Tensor], lr: float, momentum: float) -> None:
        super().__init__(parameters, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # torch has two overloads of it
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    velocity = self.state[parameter].setdefault(
                        "velocity", torch.zeros_like(parameter)
                    )
                    velocity.mul_(group["momentum"]).add_(parameter.grad, alpha=group["lr"])
                    parameter.sub_(velocity)


RATES = [0.1, 0.1, 0.4, 0.4, 0.04, 0.2]


def trained(make: Callable[[list[nn.Parameter]], Optimizer]) -> Tensor:
    """Weights after a step at each rate."""
    weights = [
        nn.Parameter(torch.ones(3, dtype=torch.float64)),
        nn.Parameter(torch.zeros(2, dtype=torch.float64)),
    ]
    one = make(weights)
    for step, rate in enumerate(RATES):
        one.param_groups[0]["lr"] = rate
        weights[0].grad = torch.sin(weights[0].detach() * 3 + step)  # the other one never has any
        one.step()
    return weights[0].detach()


def by_the_paper() -> Tensor:
    """Equation (9): v ← m·v + g, w ← w - η·v."""
    w, v = torch.ones(3, dtype=torch.float64), torch.zeros(3, dtype=torch.float64)
    for step, rate in enumerate(RATES):
        v = 0.9 * v + torch.sin(w * 3 + step)
        w = w - rate * v
    return w


def test_torchs_own_sgd_needs_no_correction_and_gets_none() -> None:
    assert torch.allclose(
        trained(lambda weights: SGD(weights, lr=0.1, momentum=0.9)), by_the_paper(), rtol=1e-13
    )
    with pytest.raises(UsageError, match=r"torch\.optim\.SGD keeps the rate out of its velocity"):
        momentum_correction(optimizer(0.1, momentum=0.9))


def test_a_velocity_that_absorbs_the_rate_needs_the_correction() -> None:
    def corrected(weights: list[nn.Parameter]) -> Optimizer:
        one = Absorbing(weights, 0.1, 0.9)
        momentum_correction(one, "velocity")
        return one

    assert torch.allclose(trained(corrected), by_the_paper(), rtol=1e-13)
    assert not torch.allclose(
        trained(lambda weights: Absorbing(weights, 0.1, 0.9)), by_the_paper(), rtol=1e-2
    )


def test_the_correction_ends_with_its_handle_and_goes_on_in_a_resumed_run() -> None:
    weight = nn.Parameter(torch.ones(1, dtype=torch.float64))
    one = Absorbing([weight], 0.1, 0.9)
    handle = momentum_correction(one, "velocity")
    weight.grad = torch.ones(1, dtype=torch.float64)
    one.step()
    saved = copy.deepcopy(one.state_dict())
    resumed = Absorbing([weight], 0.1, 0.9)
    momentum_correction(resumed, "velocity")
    resumed.load_state_dict(saved)
    handle.remove()
    for each, velocity in ((resumed, 0.9 * 0.2 + 0.2), (one, 0.9 * 0.1 + 0.2)):
        each.param_groups[0]["lr"] = 0.2
        each.step()
        assert float(each.state[weight]["velocity"]) == pytest.approx(velocity, rel=1e-12)
