"""A plain `optimizer.step()` that runs out of memory inside `with mbs:` says what it has left."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from elastic_mbs import ElasticMBS, MemoryOptions, OptimizerStepError, Warned
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


def note_of(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> str:
    with pytest.raises(torch.OutOfMemoryError) as caught, ElasticMBS(model, memory=MemoryOptions(monitor_interval=0)), InjectOOM(at=[number]):
        optimizer.step()
    (note,) = caught.value.__notes__
    return note


@pytest.mark.parametrize("steps", [0, 1])
def test_what_a_failed_step_has_left_is_said_as_it_is(steps: int) -> None:
    number = 0
    seen = set()
    while True:
        number += 1
        model, optimizer = trained(steps=steps, foreach=False)
        before = [p.detach().clone() for p in model.parameters()]
        state = {p: {key: value.clone() for key, value in own.items()} for p, own in optimizer.state.items()}
        inject = InjectOOM(at=[number])
        try:
            with ElasticMBS(model, memory=MemoryOptions(monitor_interval=0)), inject:
                optimizer.step()
        except torch.OutOfMemoryError as error:
            (note,) = error.__notes__
        if not inject.hits:
            break
        moved = any(not torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))
        moved = moved or any(not torch.equal(optimizer.state[p][key], value) for p, own in state.items() for key, value in own.items())
        made = len(optimizer.state) - len(state)
        seen.add("changed" if moved else "made" if made else "nothing")
        assert note.startswith("elastic_mbs: Adam.step() did not end")
        if moved:
            assert "load the last checkpoint" in note.lower()
        elif made:
            assert "created the state" in note or "has changed parameters or their state" in note  # what was created may have moved since
        else:
            assert "has changed nothing" in note
    assert seen == ({"made", "changed"} if steps == 0 else {"changed"})


def test_after_a_step_that_was_refused_before_it_changed_anything_it_may_be_called_again() -> None:
    model, optimizer = trained(torch.optim.SGD, lr=0.1, maximize=True, foreach=False)
    note = note_of(model, optimizer, 1)
    assert note.startswith("elastic_mbs: SGD.step() did not end, and has changed nothing: it may be called again")


@pytest.mark.parametrize("implementation", ["fused", "foreach"])
def test_of_a_step_on_all_parameters_at_once_nothing_is_promised(implementation: str) -> None:
    model, optimizer = trained(steps=0, fused=True) if implementation == "fused" else trained(steps=0, foreach=True)
    assert "what it has changed cannot be told: load the last checkpoint" in note_of(model, optimizer, 2)


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
    assert "called again it would change them twice" in told.message


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


def test_outside_of_the_block_no_optimizer_is_watched() -> None:
    model, optimizer = trained()
    mbs = ElasticMBS(model, memory=MemoryOptions(monitor_interval=0))
    with mbs:
        pass
    with InjectOOM(at=[2]), pytest.raises(torch.OutOfMemoryError):
        optimizer.step()
    assert not mbs._steps.unfinished
