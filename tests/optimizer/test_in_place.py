"""`ElasticMBS(model, optimizers=[optimizer])` guards `optimizer.step()` itself."""

import contextlib
import copy
import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR

from elastic_mbs import ElasticMBS, IncompleteBatchError, OptimizerStepError, UsageError
from tests.helpers.guarded import World, copied, same
from tests.helpers.steps import elastic, quiet
from tests.helpers.strikes import Everywhere, until_clean


def guarded(world: World) -> ElasticMBS:
    """Return a runtime that guards the step of the world's optimizer."""
    return elastic(world.model, scaler=world.scaler, optimizers=[world.optimizer])


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("scheduler", ["none", "before", "after"])
def test_out_of_memory_anywhere_in_a_plain_step_leaves_it_whole(
    scheduler: str, scaled: bool
) -> None:
    def stepped(inject: Everywhere | None) -> Any:
        world = World("AdamW", "foreach", scaled=scaled)
        schedule = StepLR(world.optimizer, 1) if scheduler == "before" else None
        with guarded(world):
            if scheduler == "after":
                schedule = StepLR(world.optimizer, 1)
            before = world.values()
            if inject is not None and scaled:
                # The scaler's own work around `optimizer.step()` is not guarded.
                assert world.scaler is not None
                world.scaler.unscale_(world.optimizer)
            try:
                with contextlib.nullcontext() if inject is None else inject:
                    world.optimizer.step()
            except OptimizerStepError:
                assert same(world.values(), before)
                world.optimizer.step()
            if schedule is not None:
                schedule.step()
        return world.values()

    wanted = stepped(None)
    points = 0
    for inject in until_clean(lambda at: Everywhere(at=[at]), stride=2, least=0):
        assert same(stepped(inject), wanted)
        points += bool(inject.hits)
    assert points > 5


def test_the_scaler_steps_as_without_the_guard() -> None:
    plain, world = World("Adam", "loop", scaled=True), World("Adam", "loop", scaled=True)
    plain.plain()
    with guarded(world):
        world.plain()
    assert same(world.values(), plain.values())
    for gradient in (p.grad for p in world.model.parameters()):
        assert gradient is not None
        gradient.fill_(float("inf"))
    before = copied(world.model.state_dict())
    with guarded(world):
        world.plain()
    assert same(copied(world.model.state_dict()), before)
    assert world.scaler is not None
    assert world.scaler.get_scale() == 512.0


def test_the_step_is_the_optimizers_own_again_after_the_block() -> None:
    world = World("SGD", "loop")
    with guarded(world):
        assert "step" in vars(world.optimizer)
    assert "step" not in vars(world.optimizer)
    StepLR(world.optimizer, 1)
    own = world.optimizer.step
    runtime = guarded(world)
    assert world.optimizer.step is not own
    runtime.close()
    assert world.optimizer.step is own


def test_a_scheduler_that_came_later_keeps_its_step() -> None:
    world, plain = World("SGD", "loop"), World("SGD", "loop")
    runtime = guarded(world)
    with runtime:
        StepLR(world.optimizer, 1)
    for optimizer in (world.optimizer, plain.optimizer):
        optimizer.step()  # no guard any more
    assert same(copied(world.model.state_dict()), copied(plain.model.state_dict()))
    with runtime:
        world.optimizer.step()
        assert vars(world.optimizer)["_opt_called"] is True


def test_the_newest_runtime_guards_and_no_older_one() -> None:
    world = World("SGD", "loop")
    first = guarded(world)
    second = guarded(world)
    world.optimizer.step()
    second.close()
    assert "step" not in vars(world.optimizer)
    first.close()
    assert "step" not in vars(world.optimizer)


def test_a_guarded_step_in_the_middle_of_a_batch_is_refused() -> None:
    world = World("SGD", "loop")
    x = torch.ones(4, 3, dtype=torch.float64)
    world.optimizer.zero_grad()
    with elastic(world.model, micro_batch_size=2, optimizers=[world.optimizer]) as mbs:
        for micro in mbs.micro_batches(x):
            with micro:
                micro.backward(world.model(micro.data).mean())
            break
        with pytest.raises(IncompleteBatchError, match="samples 2:4"):
            world.optimizer.step()


def test_an_optimizer_with_a_guard_can_be_copied() -> None:
    world = World("Adam", "loop")
    with guarded(world):
        twin = copy.deepcopy(world.optimizer)
        assert "step" not in vars(twin)


def test_nothing_stays_alive_by_the_guard() -> None:
    world = World("SGD", "loop")
    with guarded(world):
        world.optimizer.step()
    seen = weakref.ref(world.optimizer)
    del world
    gc.collect()
    assert seen() is None


@pytest.mark.parametrize(
    ("given", "match"),
    [
        (torch.optim.SGD(nn.Linear(1, 1).parameters()), r"optimizers=\[optimizer\]"),
        (3, r"optimizers=\[optimizer\]"),
        ([nn.Linear(1, 1)], "no torch.optim.Optimizer"),
        ([torch.optim.LBFGS(nn.Linear(1, 1).parameters())], "LBFGS"),
    ],
)
def test_what_cannot_be_guarded_is_refused(given: Any, match: str) -> None:
    with pytest.raises(UsageError, match=match):
        ElasticMBS(nn.Linear(1, 1), optimizers=given)


def test_a_disabled_runtime_guards_no_step() -> None:
    world = World("SGD", "loop")
    with ElasticMBS(world.model, optimizers=[world.optimizer], enabled=False, **quiet()):
        assert "step" not in vars(world.optimizer)
