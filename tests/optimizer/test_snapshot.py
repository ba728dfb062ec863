"""A snapshot takes back the step of any optimizer; without a failure it changes nothing."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from elastic_mbs import OptimizerStepError, Warned
from elastic_mbs.testing import InjectOOM
from tests.helpers.guarded import copied, same
from tests.helpers.steps import cross_entropy, elastic, mlp, pairs
from tests.helpers.strikes import every_operation, until_clean


class Lookahead(torch.optim.Optimizer):
    """A wrapper of another optimizer, which has the state."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.optimizer = inner
        super().__init__(inner.param_groups, {})
        self.param_groups = inner.param_groups

    def step(self, closure: Any = None) -> Any:
        return self.optimizer.step()


class Bare(torch.optim.Optimizer):
    """An optimizer whose state is a tensor for each parameter, and a number."""

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


class Coupled(torch.optim.Optimizer):
    """An optimizer that scales gradients by their common norm, rounds at random, and averages."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.count = 0
        self.average = [p.detach().clone() for group in self.param_groups for p in group["params"]]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # torch's signature is wider
        self.count += 1
        own = [p for group in self.param_groups for p in group["params"]]
        norm = torch.stack([p.grad.norm() for p in own]).norm()
        for p, average in zip(own, self.average, strict=True):
            average.mul_(0.9).add_(p * 0.1)
            p.add_(average * 0.01 + torch.randn_like(p) * 0.01)
            state = self.state[p]
            if "seen" not in state:
                state["seen"] = {"mean": torch.zeros_like(p), "list": [0]}
            p.grad.add_(p, alpha=0.1)
            state["seen"]["mean"] = state["seen"]["mean"] * 0.9 + p.grad
            state["seen"]["list"].append(self.count)
            p.sub_(state["seen"]["mean"] / norm, alpha=0.1)
        for group in self.param_groups:
            group["norm"] = norm


def _twice(parameters: Any) -> torch.optim.Optimizer:
    own = list(parameters)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of a duplicate parameter
        return torch.optim.SGD([own[0], *own], lr=0.1, momentum=0.9, foreach=False)


MAKERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "wrapper": lambda own: Lookahead(torch.optim.Adam(own, foreach=False)),
    "bare": Bare,
    "coupled": Coupled,
    "twice": _twice,
}


def with_gradients() -> nn.Module:
    torch.manual_seed(0)
    model = mlp()
    cross_entropy(model)(pairs()).backward()
    return model


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_a_step_with_state_in_other_places_is_made_once_or_not_at_all(
    make: Callable[[Any], torch.optim.Optimizer],
) -> None:
    def trained(inject: InjectOOM) -> list[Tensor]:
        model = with_gradients()
        optimizer, mbs = make(model.parameters()), elastic(model)
        for _ in range(2):
            optimizer.step()
            model.zero_grad()
            cross_entropy(model)(pairs()).backward()

        def values() -> Any:
            return copied(
                (
                    model.state_dict(),
                    vars(optimizer).get("count"),
                    optimizer.state_dict(),
                    [p.grad for p in model.parameters()],
                )
            )

        before = values()
        try:
            with inject:
                mbs.optimizer_step(optimizer)
        except OptimizerStepError as error:
            assert same(values(), before)
            assert "step() ran out of memory each time" in str(error)
            mbs.optimizer_step(optimizer)
        return [*model.state_dict().values(), torch.randn(3)]

    wanted = trained(InjectOOM())
    for inject in every_operation(stride=3, least=1):
        assert same(trained(inject), wanted), inject.hits
    for inject in until_clean(lambda n: InjectOOM(always_from=n), stride=10, least=1):
        assert same(trained(inject), wanted), inject.hits


def test_an_attribute_that_a_failed_step_has_added_is_taken_away() -> None:
    class Counts(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            self.count = getattr(self, "count", 0) + 1
            super().step()

    struck = list[str]()
    for at in range(1, 20):
        model = with_gradients()
        optimizer = Counts(model.parameters(), lr=0.1, maximize=True)
        with InjectOOM(at=[at]) as inject:
            elastic(model).optimizer_step(optimizer)
        struck += inject.hits
        assert optimizer.count == 1, inject.hits
    assert "aten::neg" in struck  # in the step itself


def test_a_closure_that_runs_a_batch_is_no_unfinished_step() -> None:
    model, told = mlp(), list[Any]()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2)
    with elastic(model, on_event=told.append) as mbs:

        def closure() -> float:
            optimizer.zero_grad()
            return float(mbs.backward(cross_entropy(model), pairs()))

        for _ in range(2):
            optimizer.step(closure)
    assert [event for event in told if isinstance(event, Warned)] == []


def test_a_step_that_ends_by_an_error_puts_the_random_stream_back() -> None:
    """The stream goes back between two tries, and also where an error passes through."""

    class Ends(Coupled):
        def step(self, closure: Any = None) -> Any:
            super().step()
            raise ValueError("mine")

    model = with_gradients()
    before, stream = copied(model.state_dict()), torch.get_rng_state()
    with pytest.raises(ValueError, match="mine"):
        elastic(model).optimizer_step(Ends(model.parameters()))
    assert same((model.state_dict(), torch.get_rng_state()), (before, stream))
