"""A plain `optimizer.step()` that runs out of memory inside `with mbs:` says what it has left."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from elastic_mbs import ElasticMBS, MemoryOptions, OptimizerStepError, StepInsideError, Warned
from elastic_mbs.testing import InjectOOM


def trained(cls: type[torch.optim.Optimizer] = torch.optim.Adam, steps: int = 1, **options: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    optimizer = cls(model.parameters(), **options)
    for _ in range(steps + 1):
        model(torch.ones(2, 3)).sum().backward()
        if steps:
            optimizer.step()
            steps -= 1
    return model, optimizer


@pytest.mark.parametrize("options", [{"foreach": False}, {"foreach": True}, {"fused": True}], ids=str)
def test_a_failed_step_is_reported_with_what_to_do(options: dict[str, Any]) -> None:
    model, optimizer = trained(steps=0, **options)
    with pytest.raises(torch.OutOfMemoryError) as caught, ElasticMBS(model, memory=MemoryOptions(monitor_interval=0)), InjectOOM(at=[2]):
        optimizer.step()
    assert caught.value.__notes__ == [
        "elastic_mbs: `Adam.step()` did not end; parameters and state may be half changed: load the last checkpoint, or use `mbs.optimizer_step`."
    ]


def test_a_failed_step_that_the_loop_has_caught_is_told_of_by_the_next_call() -> None:
    model, optimizer = trained()
    events: list[Any] = []
    with ElasticMBS(model, on_event=events.append, memory=MemoryOptions(monitor_interval=0)) as mbs:
        with InjectOOM(at=[2]), pytest.raises(torch.OutOfMemoryError):
            optimizer.step()
        mbs.backward(lambda x: model(x).sum(), torch.ones(2, 3))
        mbs.backward(lambda x: model(x).sum(), torch.ones(2, 3))
    (told,) = [event for event in events if isinstance(event, Warned)]
    assert told.topic == "optimizer-step"
    assert told.message.startswith("`Adam.step()` did not end")


def test_what_went_well_or_was_guarded_or_is_another_error_gets_no_note() -> None:
    model, optimizer = trained()
    with pytest.raises(ValueError, match="mine") as other, ElasticMBS(model, memory=MemoryOptions(monitor_interval=0)):
        optimizer.step()
        raise ValueError("mine")
    with pytest.raises(torch.OutOfMemoryError) as elsewhere, ElasticMBS(model, memory=MemoryOptions(monitor_interval=0)):
        optimizer.step()
        raise torch.OutOfMemoryError("in the loop")
    with pytest.raises(OptimizerStepError) as guarded, ElasticMBS(model, memory=MemoryOptions(monitor_interval=0)) as mbs, InjectOOM(always_from=3):
        mbs.optimizer_step(optimizer)
    assert [getattr(caught.value, "__notes__", []) for caught in (other, elsewhere, guarded)] == [[], [], []]


def test_a_step_that_was_refused_inside_a_batch_did_not_begin() -> None:
    model, optimizer = trained()
    events: list[Any] = []

    def steps_inside(x: torch.Tensor) -> torch.Tensor:
        optimizer.step()
        return torch.as_tensor(model(x).sum())

    with ElasticMBS(model, on_event=events.append, memory=MemoryOptions(monitor_interval=0)) as mbs:
        with pytest.raises(StepInsideError):
            mbs.backward(steps_inside, torch.ones(2, 3))
        mbs.backward(lambda x: model(x).sum(), torch.ones(2, 3))
    assert not any(isinstance(event, Warned) for event in events)


def test_outside_of_the_block_no_optimizer_is_watched() -> None:
    model, optimizer = trained()
    mbs = ElasticMBS(model, memory=MemoryOptions(monitor_interval=0))
    with mbs:
        pass
    with InjectOOM(at=[2]), pytest.raises(torch.OutOfMemoryError):
        optimizer.step()
    assert mbs._steps.begun is None
