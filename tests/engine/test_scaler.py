"""A GradScaler that runs out of memory itself is made whole the next time, or asked again."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from elastic_mbs.testing import InjectOOM
from tests.helpers.steps import elastic, mlp, pairs

pytestmark = pytest.mark.injectable


def test_a_scaler_that_ran_out_of_memory_between_its_two_tensors_makes_both_the_next_time() -> None:
    """It had its scale and looked ready, but no growth tracker: the optimizer's step ended by an AssertionError of torch's."""
    struck = 0
    for number in range(1, 80):
        model, batch = mlp(), pairs(4)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        mbs = elastic(model, micro_batch_size=4, scaler=scaler)
        with InjectOOM(at=[number]) as inject:
            mbs.backward(lambda b, net=model: nn.functional.cross_entropy(net(b[0]), b[1]), batch)
        struck += inject.hits == ["aten::full"]
        scaler.step(optimizer)
        scaler.update()
    assert struck >= 2


def test_unscaling_that_runs_out_of_pythons_own_memory_is_tried_again() -> None:
    """Only a RuntimeError was looked at there; a MemoryError passed through as it was."""
    model, batch = mlp(), pairs(4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    fails = [True]

    class Scaler(torch.amp.GradScaler):
        def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
            if fails:
                fails.clear()
                raise MemoryError
            super().unscale_(optimizer)

    mbs = elastic(model, scaler=Scaler("cpu", init_scale=4.0))
    mbs.backward(lambda b: nn.functional.cross_entropy(model(b[0]), b[1]), batch)
    before = [p.detach().clone() for p in model.parameters()]
    mbs.optimizer_step(optimizer)
    assert fails == []
    assert not any(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
