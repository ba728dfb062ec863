"""A learning rate that steps inside a batch is a named mistake, and leaves the rate as it was."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.optim import lr_scheduler as schedulers

from elastic_mbs import ElasticMBS, IncompleteBatchError, StepInsideError
from elastic_mbs.testing import InjectOOM
from tests.helpers.steps import Pair, cross_entropy, elastic, pairs, through

pytestmark = pytest.mark.injectable


class Own(schedulers.LRScheduler):
    """A scheduler with a `step` of its own, as some have."""

    def get_lr(self) -> list[float | Tensor]:
        return [0.5**self.last_epoch for _ in self.optimizer.param_groups]

    def step(self, epoch: int | None = None) -> None:
        self.last_epoch += 1
        for group in self.optimizer.param_groups:
            group["lr"] = 0.5**self.last_epoch


def chained(optimizer: Optimizer) -> Any:
    return schedulers.ChainedScheduler([schedulers.ExponentialLR(optimizer, 0.5)])


KINDS: dict[str, Callable[[Optimizer], Any]] = {
    "ExponentialLR": lambda optimizer: schedulers.ExponentialLR(optimizer, 0.5),
    "ReduceLROnPlateau": lambda optimizer: schedulers.ReduceLROnPlateau(optimizer, patience=0),
    "CosineAnnealingWarmRestarts": lambda optimizer: schedulers.CosineAnnealingWarmRestarts(
        optimizer, 3
    ),
    "ChainedScheduler": chained,
    "SequentialLR": lambda optimizer: schedulers.SequentialLR(
        optimizer, [schedulers.ExponentialLR(optimizer, rate) for rate in (0.5, 0.9)], [2]
    ),
    "Own": Own,
}


def state(scheduler: Any) -> Any:
    """Return the scheduler's place and the rates that it has set."""
    return scheduler.last_epoch if hasattr(scheduler, "last_epoch") else None, [
        group["lr"] for group in scheduler.optimizer.param_groups
    ]


def step(scheduler: Any) -> None:
    plateau = isinstance(scheduler, schedulers.ReduceLROnPlateau)
    scheduler.step(*[1.0] * plateau)


@pytest.mark.parametrize("kind", KINDS)
def test_a_scheduler_that_steps_inside_the_step_function(
    kind: str, model: nn.Module, mbs: ElasticMBS, door: int
) -> None:
    scheduler = KINDS[kind](SGD(model.parameters(), lr=1.0))
    before = state(scheduler)

    def loss_fn(b: Pair) -> Tensor:
        step(scheduler)
        return cross_entropy(model)(b)

    with pytest.raises(StepInsideError, match=rf"{kind}.step\(\) ran inside the step function"):
        through(door, mbs, loss_fn, pairs())
    assert state(scheduler) == before
    scheduler.optimizer.step()
    step(scheduler)


@pytest.mark.parametrize("kind", KINDS)
def test_a_scheduler_that_steps_between_two_pieces(
    kind: str, model: nn.Module, mbs: ElasticMBS
) -> None:
    scheduler = KINDS[kind](SGD(model.parameters(), lr=1.0))
    before = state(scheduler)
    with pytest.raises(IncompleteBatchError, match=rf"{kind}.step\(\) ran before the whole batch"):
        for micro in mbs.micro_batches(pairs()):
            with micro:
                micro.backward(cross_entropy(model)(micro.data))
            step(scheduler)
    assert state(scheduler) == before


def test_a_step_after_the_batch_and_one_over_other_tensors_are_none_of_its_business(
    model: nn.Module, mbs: ElasticMBS
) -> None:
    optimizer = SGD(model.parameters(), lr=1.0)
    scheduler = schedulers.ExponentialLR(optimizer, 0.5)
    inner = SGD([torch.zeros(2, requires_grad=True)], lr=1.0)
    own = schedulers.ExponentialLR(inner, 0.5)
    pieces = 0
    for micro in mbs.micro_batches(pairs()):
        with micro:
            pieces += 1
            inner.step()
            own.step()
            KINDS["Own"](inner)
            micro.backward(cross_entropy(model)(micro.data))
            if pieces == 1:  # both run once the whole batch has its gradient
                micro.on_commit(optimizer.step)
                micro.on_commit(scheduler.step)
    scheduler.step()
    optimizer.zero_grad()
    assert scheduler.get_last_lr() == [0.25]
    assert own.last_epoch == pieces


class Timms:
    """A scheduler as timm has them: no class of torch, told how many steps have been made."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer, self.updates = optimizer, 0

    def step_update(self, updates: int) -> None:
        for group in self.optimizer.param_groups:
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(0.5**updates)
            else:
                group["lr"] = 0.5**updates


def counting(scheduler: Timms) -> None:
    scheduler.updates += 1
    scheduler.step_update(scheduler.updates)


@pytest.mark.no_oom_injection  # the rates that it names count the attempts
def test_a_rate_that_moves_is_a_named_mistake_after_a_failure_of_the_first_piece(
    model: nn.Module,
) -> None:
    optimizer = SGD(model.parameters(), lr=1.0)
    optimizer.step()
    scheduler, mbs = Timms(optimizer), elastic(model, micro_batch_size=4)

    def loss_fn(b: Pair) -> Tensor:
        counting(scheduler)
        if scheduler.updates == 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB.")
        return cross_entropy(model)(b)

    with pytest.raises(StepInsideError, match=r"went from 0\.25 to 0\.125"):
        mbs.backward(loss_fn, pairs())
    assert optimizer.param_groups[0]["lr"] == 1.0


@pytest.mark.no_oom_injection  # the rates that it names count the attempts
@pytest.mark.parametrize("kind", [float, torch.tensor])
def test_a_rate_that_moves_with_each_piece_is_a_named_mistake_and_goes_back(
    kind: Callable[[float], Any], model: nn.Module, door: int
) -> None:
    optimizer = SGD(model.parameters(), lr=kind(1.0))
    optimizer.step()
    scheduler = Timms(optimizer)

    def loss_fn(b: Pair) -> Tensor:
        counting(scheduler)
        return cross_entropy(model)(b)

    mbs = elastic(model, micro_batch_size=4)
    mbs.backward(cross_entropy(model), pairs())
    optimizer.step()
    with pytest.raises(StepInsideError, match=r"a learning rate went from 0\.5 to 0\.25"):
        through(door, mbs, loss_fn, pairs())
    assert float(optimizer.param_groups[0]["lr"]) == 1.0
    scheduler.updates = 0
    counting(scheduler)  # before the batch, as it says
    through(door, mbs, cross_entropy(model), pairs())
    assert float(optimizer.param_groups[0]["lr"]) == 0.5


def test_a_rate_that_every_piece_sets_to_one_value_is_right_after_a_failure_anywhere(
    model: nn.Module,
) -> None:
    optimizer = SGD(model.parameters(), lr=1.0)
    optimizer.step()
    scheduler, rates = Timms(optimizer), list[float]()
    mbs = elastic(model, micro_batch_size=4, min_micro_batch_size=2)

    def loss_fn(b: Pair) -> Tensor:
        rates.append(optimizer.param_groups[0]["lr"])
        scheduler.step_update(scheduler.updates)
        return cross_entropy(model)(b)

    batch = pairs()
    for at in range(1, 12):
        scheduler.updates = at
        rates.clear()
        with InjectOOM(at=[at]):
            mbs.backward(loss_fn, batch)
        assert rates[0] == 0.5 ** (at - 1)
        assert optimizer.param_groups[0]["lr"] == 0.5**at
        optimizer.step()
        optimizer.zero_grad()


def test_a_class_of_schedulers_that_was_defined_after_a_call_is_checked_as_well(
    model: nn.Module, mbs: ElasticMBS
) -> None:
    mbs.backward(cross_entropy(model), pairs())
    model.zero_grad()

    class Late(schedulers.LambdaLR):
        def step(self, epoch: int | None = None) -> None:
            self.optimizer.param_groups[0]["lr"] *= 0.5

    class Later(Late):
        def step(self, epoch: int | None = None) -> None:
            self.optimizer.param_groups[0]["lr"] *= 0.25

    for kind in (Late, Later):
        scheduler = kind(SGD(model.parameters(), lr=1.0), lambda epoch: 1.0)
        before = state(scheduler)

        def loss_fn(b: Pair, scheduler: Any = scheduler) -> Tensor:
            step(scheduler)
            return cross_entropy(model)(b)

        with pytest.raises(StepInsideError, match=rf"{kind.__name__}.step\(\) ran inside"):
            mbs.backward(loss_fn, pairs())
        assert state(scheduler) == before
        step(scheduler)
        assert state(scheduler) != before
