"""An out-of-memory error that the step itself catches is noticed where that can be told."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from elastic_mbs import ElasticMBS, Event, MemoryBudget, Warned
from elastic_mbs.testing import InjectOOM
from tests.helpers.steps import Pair, cross_entropy, elastic, mlp, pairs, through
from tests.helpers.strikes import every_operation

pytestmark = pytest.mark.no_oom_injection


def catching(model: nn.Module) -> Callable[[Pair], Tensor]:
    """Return a loss function that leaves out a piece without memory."""

    def loss_fn(b: Pair) -> Tensor:
        try:
            return cross_entropy(model)(b)
        except torch.OutOfMemoryError:
            return 0.0 * sum((p.sum() for p in model.parameters()), torch.zeros(()))

    return loss_fn


def caught(events: list[Event]) -> list[str]:
    """Return the warnings of errors that a step has caught."""
    return [
        event.message
        for event in events
        if isinstance(event, Warned) and "caught an out-of-memory error itself" in event.message
    ]


def test_an_error_that_the_step_catches_is_named_with_its_samples(
    model: nn.Module, door: int
) -> None:
    events: list[Event] = []
    mbs = elastic(model, micro_batch_size=4, on_event=events.append)
    through(door, mbs, catching(model), pairs())
    model.zero_grad()
    with InjectOOM(at=[2 + door]) as inject:
        result = through(door, mbs, catching(model), pairs())
    assert len(inject.hits) == 1
    assert result.ooms == 0
    (message,) = caught(events)
    assert "samples 0:4" in message


def test_it_is_named_under_a_budget_and_in_an_evaluation(model: nn.Module) -> None:
    x, events = torch.zeros(64, 6, dtype=torch.float64), list[Event]()

    def outputs(b: Tensor) -> Tensor:
        try:
            hidden: Tensor = model(b)
            return hidden
        except torch.OutOfMemoryError:
            return b[:, :1]

    with MemoryBudget("64MiB", track=[model]) as budget:
        mbs = elastic(model, micro_batch_size=32, on_event=events.append)
        budget.limit = budget.live + 100
        try:
            mbs.evaluate(outputs, x)
        finally:
            budget.limit = "64MiB"
    assert budget.ooms
    assert caught(events)


def test_an_error_that_is_let_through_is_none_that_was_caught(door: int) -> None:
    for inject in every_operation(least=15):
        model, beside, events = mlp(), nn.Linear(6, 2).double(), list[Event]()
        inner, batch = elastic(beside, micro_batch_size=4), pairs()
        mbs = elastic(model, micro_batch_size=4, on_event=events.append)

        def loss_fn(
            b: Pair,
            model: nn.Module = model,
            beside: nn.Module = beside,
            inner: ElasticMBS = inner,
        ) -> Tensor:
            inner.evaluate(beside, b[0])  # it recovers from its own
            return cross_entropy(model)(b)

        with inject:
            through(door, mbs, loss_fn, batch)
        assert not caught(events), inject.hits


def test_an_error_before_the_batch_is_not_the_steps(model: nn.Module) -> None:
    events: list[Event] = []
    mbs = elastic(model, micro_batch_size=4, on_event=events.append)
    with InjectOOM(at=[1]), pytest.raises(torch.OutOfMemoryError):
        torch.zeros(2)
    mbs.backward(cross_entropy(model), pairs())
    assert not caught(events)
