"""What is kept of an optimizer before its step takes the step back, whatever kind it is; where nothing fails, it is in nobody's way."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from elastic_mbs import ElasticMBS, MemoryOptions, Warned
from elastic_mbs.testing import InjectOOM
from tests.helpers.steps import mlp, pairs

pytestmark = pytest.mark.injectable


class Lookahead(torch.optim.Optimizer):
    """Wraps another optimizer, which has the state."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.optimizer = inner
        super().__init__(inner.param_groups, {})
        self.param_groups = inner.param_groups

    def step(self, closure: Any = None) -> Any:
        return self.optimizer.step()


class Averaged(torch.optim.SGD):
    """Keeps an average of the weights in an attribute."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1, foreach=False)
        self.average = [p.detach().clone() for group in self.param_groups for p in group["params"]]

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        own = [p for group in self.param_groups for p in group["params"]]
        for average, p in zip(self.average, own, strict=True):
            average.mul_(0.9)
            average.add_(p * 0.1)
            p.add_(average * 0.01)
        super().step()


class Noisy(torch.optim.Optimizer):
    """Draws random numbers."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.grad * 0.1 + torch.randn_like(p) * 0.01)


class Bare(torch.optim.Optimizer):
    """Its state is a tensor for each parameter, and a number."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p] = self.state.get(p, torch.zeros_like(p)) + p.grad
                p.sub_(self.state[p] * 0.1)
        state: dict[Any, Any] = self.state
        state["steps"] = state.get("steps", 0) + 1


def _twice(parameters: Any) -> torch.optim.Optimizer:
    own = list(parameters)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that one is there twice
        return torch.optim.SGD([own[0], *own], lr=0.1, momentum=0.9, foreach=False)


@pytest.mark.parametrize(
    "make",
    [lambda own: Lookahead(torch.optim.Adam(own, foreach=False)), Averaged, Noisy, Bare, _twice],
    ids=["wrapper", "attribute", "noise", "bare", "twice"],
)
def test_a_step_of_an_optimizer_with_state_in_other_places_is_not_made_twice(make: Callable[[Any], torch.optim.Optimizer]) -> None:
    def trained(number: int | None) -> tuple[list[Tensor], bool]:
        torch.manual_seed(0)
        model, batch = mlp(), pairs(8)
        optimizer = make(model.parameters())
        mbs = ElasticMBS(model, memory=MemoryOptions(monitor_interval=0))
        hit = False
        for step in range(3):
            model.zero_grad()
            nn.functional.cross_entropy(model(batch[0]), batch[1]).backward()
            if number is None:
                optimizer.step()
                continue
            with InjectOOM(at=[number] if step == 2 else []) as inject:
                mbs.optimizer_step(optimizer)
            hit = bool(inject.hits)
        return [*model.parameters(), torch.randn(3)], hit

    wanted, _ = trained(None)
    number, hit = 0, True
    while hit:
        number += 1
        found, hit = trained(number)
        assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True)), number
    assert number > 1


def test_a_plain_step_of_any_optimizer_passes_under_the_watch() -> None:
    model, batch = mlp(), pairs(8)
    optimizer = Bare(model.parameters())
    with ElasticMBS(model, memory=MemoryOptions(monitor_interval=0)) as mbs:
        for _ in range(3):
            mbs.backward(lambda b: nn.functional.cross_entropy(model(b[0]), b[1]), batch)
            optimizer.step()


def test_a_closure_that_runs_a_batch_inside_the_step_is_no_step_that_did_not_end() -> None:
    model, batch = mlp(), pairs(8)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2)
    told: list[Any] = []
    with ElasticMBS(model, on_event=told.append, memory=MemoryOptions(monitor_interval=0)) as mbs:

        def closure() -> float:
            optimizer.zero_grad()
            return float(mbs.backward(lambda b: nn.functional.cross_entropy(model(b[0]), b[1]), batch))

        for _ in range(2):
            optimizer.step(closure)
    assert [event for event in told if isinstance(event, Warned)] == []


def test_a_step_hook_that_takes_itself_off_stays_off() -> None:
    model, batch = mlp(), pairs(8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    calls: list[str] = []

    def once(*args: Any) -> None:
        calls.append("once")
        handle.remove()

    handle = optimizer.register_step_pre_hook(once)
    mbs = ElasticMBS(model, memory=MemoryOptions(monitor_interval=0))
    nn.functional.cross_entropy(model(batch[0]), batch[1]).backward()
    for _ in range(3):
        mbs.optimizer_step(optimizer)
    assert calls == ["once"]


def test_a_step_that_ends_by_another_error_puts_the_random_stream_back_as_well() -> None:
    """It went back between two tries only, and not where the error passed through."""
    model, batch = mlp(), pairs(8)
    nn.functional.cross_entropy(model(batch[0]), batch[1]).backward()

    class Ends(Noisy):
        def step(self, closure: Any = None) -> Any:
            super().step()
            raise ValueError("mine")

    before, stream = [p.detach().clone() for p in model.parameters()], torch.get_rng_state()
    with pytest.raises(ValueError, match="mine"):
        ElasticMBS(model, memory=MemoryOptions(monitor_interval=0)).optimizer_step(Ends(model.parameters()))
    assert torch.equal(torch.get_rng_state(), stream)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), before, strict=True))


def test_copies_for_a_step_are_made_one_by_one_where_no_large_block_can_be_had() -> None:
    """They were put into one block of up to 64 MiB, and the step was refused although there was memory for each of them. Found by `fragmentation`."""
    from stress.limits import BudgetLimit

    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4))).double()
    twin = [p.detach().clone() for p in model.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(2, 64, dtype=torch.float64)).sum().backward()
    with BudgetLimit() as world, ElasticMBS(model, memory=MemoryOptions(sensor=world.sensor, monitor_interval=0)) as mbs:
        world.fragment(64 * 64 * 8)
        mbs.optimizer_step(optimizer)
    for parameter, before in zip(model.parameters(), twin, strict=True):
        assert parameter.grad is not None
        torch.testing.assert_close(parameter, before - 0.1 * parameter.grad)
