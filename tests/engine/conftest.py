"""A model, and a runtime that a test makes a mistake with."""

from collections.abc import Iterator

import pytest
from torch import nn

from elastic_mbs import ElasticMBS
from elastic_mbs.engine.shared.running import leave_call, running_call
from tests.helpers.steps import Pair, elastic, mlp, pairs, still_works


@pytest.fixture(autouse=True)
def nothing_left_open() -> Iterator[None]:
    """A call that one test leaves open must not be met by the next."""
    yield
    call = running_call()
    if call is not None:
        call.abort(RuntimeError("left open by a test"))
        leave_call(call)


@pytest.fixture(params=[1, 3])
def door(request: pytest.FixtureRequest) -> int:
    """Backward, and the loop; the decorator is door 2."""
    return int(request.param)


@pytest.fixture
def model() -> nn.Sequential:
    return mlp()


@pytest.fixture
def batch() -> Pair:
    return pairs()


@pytest.fixture
def mbs(model: nn.Module) -> Iterator[ElasticMBS]:
    """Whatever the test does with it: no part of a batch is left, and the next call works."""
    mbs = elastic(model, micro_batch_size=4)
    yield mbs
    assert all(parameter.grad is None for parameter in model.parameters())
    assert still_works(mbs, model)
