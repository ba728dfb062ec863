"""A plain `optimizer.step()` that runs out of memory inside `with mbs:` says what it has left."""

import pytest
import torch
from torch import Tensor

from elastic_mbs import OptimizerStepError, StepInsideError, Warned
from elastic_mbs.testing import InjectOOM
from tests.helpers.guarded import IMPLEMENTATIONS, World

BATCH = torch.ones(2, 3, dtype=torch.float64)


def warned(world: World) -> list[Warned]:
    """What two more calls tell."""
    for _ in range(2):
        world.mbs.backward(lambda x: world.model(x).sum(), BATCH)
    return [event for event in world.events if isinstance(event, Warned)]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_failed_step_is_reported_with_what_to_do(implementation: str) -> None:
    world = World("Adam", implementation, steps=0)
    with pytest.raises(torch.OutOfMemoryError) as caught, world.mbs, InjectOOM(at=[2]):
        world.optimizer.step()
    assert caught.value.__notes__ == [
        "elastic_mbs: `Adam.step()` did not end; parameters and state may be half changed: load the last checkpoint, or use `mbs.optimizer_step`."
    ]


def test_a_failed_step_that_the_loop_has_caught_is_told_of_by_the_next_call() -> None:
    world = World("Adam", "foreach")
    with world.mbs:
        with InjectOOM(at=[2]), pytest.raises(torch.OutOfMemoryError):
            world.optimizer.step()
        (told,) = warned(world)
    assert told.topic == "optimizer-step"
    assert told.message.startswith("`Adam.step()` did not end")


def test_what_went_well_or_was_guarded_or_is_another_error_gets_no_note() -> None:
    world, notes = World("Adam", "foreach"), list[list[str]]()
    for error in (ValueError("mine"), torch.OutOfMemoryError("in the loop")):
        with pytest.raises(type(error)) as caught, world.mbs:
            world.optimizer.step()
            raise error
        notes.append(getattr(caught.value, "__notes__", []))
    with pytest.raises(OptimizerStepError) as guarded, world.mbs, InjectOOM(always_from=3):
        world.guarded()
    assert [*notes, getattr(guarded.value, "__notes__", [])] == [[], [], []]


def test_a_step_that_was_refused_inside_a_batch_did_not_begin() -> None:
    world = World("Adam", "foreach")

    def steps_inside(x: Tensor) -> Tensor:
        world.optimizer.step()
        raise AssertionError("it is refused")

    with world.mbs:
        with pytest.raises(StepInsideError):
            world.mbs.backward(steps_inside, BATCH)
        assert warned(world) == []


def test_outside_of_the_block_no_optimizer_is_watched() -> None:
    world = World("Adam", "foreach")
    with world.mbs:
        pass
    with InjectOOM(at=[2]), pytest.raises(torch.OutOfMemoryError):
        world.optimizer.step()
    assert world.mbs._steps.begun is None
