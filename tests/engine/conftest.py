"""A model, a batch, and a runtime that has to survive the mistakes of a test."""

from collections.abc import Iterator

import pytest
from torch import nn

from elastic_mbs import ElasticMBS
from elastic_mbs.engine.shared.running import leave_call, running_call
from tests.helpers.steps import Pair, elastic, mlp, pairs, still_works


@pytest.fixture(autouse=True)
def nothing_left_open() -> Iterator[None]:
    """End a call that a test has left open, so that the next test does not meet it."""
    yield
    call = running_call()
    if call is not None:
        call.abort(RuntimeError("left open by a test"))
        leave_call(call)


@pytest.fixture(params=[1, 3])
def door(request: pytest.FixtureRequest) -> int:
    """Return the number of a way in: 1 is `backward`, 3 the loop; the decorator is 2."""
    return int(request.param)


@pytest.fixture
def model() -> nn.Sequential:
    return mlp()


@pytest.fixture
def batch() -> Pair:
    return pairs()


@pytest.fixture
def mbs(model: nn.Module) -> Iterator[ElasticMBS]:
    """Yield a runtime; afterwards no gradient may be left, and the next call has to work."""
    mbs = elastic(model, micro_batch_size=4)
    yield mbs
    assert all(parameter.grad is None for parameter in model.parameters())
    assert still_works(mbs, model)
