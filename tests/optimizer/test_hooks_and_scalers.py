"""Hooks, schedulers and scalers in a guarded step; a plain step that did not end."""

from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from elastic_mbs import ElasticMBS, MisuseError, OptimizerStepError, StepInsideError, Warned
from elastic_mbs.optimizer.snapshot import OptimizerSnapshot
from elastic_mbs.testing import InjectOOM
from tests.helpers.guarded import IMPLEMENTATIONS, World, same
from tests.helpers.steps import calls_of, elastic
from tests.helpers.strikes import AtLine, Everywhere, until_clean


def test_step_hooks_run_once_however_often_the_step_is_tried() -> None:
    world = World("Adam", "foreach")
    calls: list[str] = []
    world.optimizer.register_step_pre_hook(lambda *a: calls.append("before"))
    world.optimizer.register_step_post_hook(lambda *a: calls.append("after"))
    with Everywhere(at=[28, 70]) as inject:
        world.guarded()
    assert len(inject.hits) == 2
    assert calls == ["before", "after"]
    with Everywhere(always_from=28), pytest.raises(OptimizerStepError):
        world.guarded()
    assert calls == ["before", "after", "before"]
    world.optimizer.step()
    # All values are back.
    assert calls == ["before", "after", "before", "before", "after"]


def test_hooks_of_all_optimizers_run_once_for_a_step_that_is_tried_again() -> None:
    world, other = World("Adam", "foreach"), World("Adam", "foreach")
    seen: list[tuple[str, int]] = []

    def note(name: str) -> Any:
        return lambda optimizer, *a: seen.append((name, id(optimizer)))

    handles = [
        register_optimizer_step_pre_hook(note("before")),
        register_optimizer_step_post_hook(note("after")),
    ]
    try:
        with Everywhere(at=[28, 70]) as inject:
            world.guarded()
        assert len(inject.hits) == 2
        other.optimizer.step()
        world.optimizer.step()
    finally:
        for handle in handles:
            handle.remove()
    steps = [world.optimizer, other.optimizer, world.optimizer]
    assert seen == [(name, id(each)) for each in steps for name in ("before", "after")]
    world.guarded()
    assert len(seen) == 6


def test_hooks_before_a_step_do_not_run_again_when_it_is_called_again() -> None:
    world = World("Adam", "foreach")
    calls: list[str] = []
    world.optimizer.register_step_pre_hook(lambda *a: calls.append("before"))
    world.optimizer.register_step_post_hook(lambda *a: calls.append("after"))
    with Everywhere(always_from=28), pytest.raises(OptimizerStepError):
        world.guarded()
    world.guarded()
    assert calls == ["before", "after"]
    with Everywhere(always_from=28), pytest.raises(OptimizerStepError):
        world.guarded()
    for parameter in world.optimizer.param_groups[0]["params"]:
        parameter.grad.zero_()  # another gradient: it is another step
    world.guarded()
    assert calls == ["before", "after", "before", "before", "after"]


@pytest.mark.parametrize("hooked", ["", "this optimizer", "all optimizers"])
def test_values_are_copied_a_second_time_only_after_hooks_of_others(
    hooked: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World("Adam", "foreach")
    # From its first call on the runtime has a hook of its own on every step.
    world.mbs.backward(lambda x: world.model(x).mean(), torch.ones(4, 3, dtype=torch.float64))
    hook = world.optimizer.register_step_pre_hook
    if hooked == "all optimizers":
        hook = register_optimizer_step_pre_hook
    handle = hook(lambda *a: None) if hooked else None
    take, taken = OptimizerSnapshot.take, []

    def counted(snapshot: OptimizerSnapshot, *, host: bool) -> None:
        taken.append(len(snapshot.tensors))
        take(snapshot, host=host)

    monkeypatch.setattr(OptimizerSnapshot, "take", counted)
    for _ in range(2):
        world.guarded()
    if handle is not None:
        handle.remove()
    # of each parameter: itself, the number of steps, two averages and amsgrad's maximum
    state = len(world.optimizer.param_groups) * 2 * (1 + 4)
    assert taken == [state] * (4 if hooked else 2)


@pytest.mark.parametrize("scaled", [False, True])
def test_out_of_memory_at_any_line_around_hooks_loses_none_and_repeats_none(scaled: bool) -> None:
    # Each changes weights and gradients, in a way that shows if it is done twice.
    def hooked(world: World, ran: list[str]) -> World:
        def before(optimizer: Any, *others: Any) -> None:
            ran.append("before")
            for parameter in world.model.parameters():
                parameter.data.mul_(1.5)
                parameter.grad.mul_(0.5)  # type: ignore[union-attr]  # not None

        def after(*others: Any) -> None:
            ran.append("after")
            for parameter in world.model.parameters():
                parameter.data.add_(parameter.data.square())

        for _ in range(2):
            world.optimizer.register_step_pre_hook(before)
            world.optimizer.register_step_post_hook(after)
        return world

    reference = hooked(World("AdamW", "foreach", scaled=scaled), [])
    reference.plain()
    files = ("optimizer/hooks.py", "optimizer/guarded_step.py")
    spared = ("__call__", "_make", "refuse_closure", "check_optimizer", "_retry")
    for strike in until_clean(
        lambda n: AtLine(
            n, *files, error=MemoryError, spared=lambda frame: frame.f_code.co_name in spared
        ),
        stride=5,
        least=100,
    ):
        ran = list[str]()
        world = hooked(World("AdamW", "foreach", scaled=scaled), ran)
        with strike:
            world.guarded()
        world.update()
        assert ran == ["before", "before", "after", "after"], strike.hits
        assert same(world.values(), reference.values()), strike.hits


@pytest.mark.parametrize("hook", ["pre", "post"])
def test_an_error_in_a_users_hook_passes_without_another_step(hook: str) -> None:
    world = World("Adam", "foreach")
    before, calls = world.values(), []

    def fail(*args: Any) -> None:
        calls.append(hook)
        raise torch.OutOfMemoryError("CUDA out of memory. in the hook")

    getattr(world.optimizer, f"register_step_{hook}_hook")(fail)
    with pytest.raises(torch.OutOfMemoryError, match="in the hook"):
        world.guarded()
    assert calls == [hook]
    assert same(world.values(), before) == (hook == "pre")


def test_a_hook_that_changes_the_arguments_is_refused() -> None:
    world = World("Adam", "foreach")
    before = world.values()
    world.optimizer.register_step_pre_hook(lambda optimizer, args, kwargs: (args, kwargs))
    with pytest.raises(MisuseError, match="changes the arguments"):
        world.guarded()
    assert same(world.values(), before)


@pytest.mark.parametrize("implementation", ["loop", "foreach", "fused"])
@pytest.mark.parametrize("unscaled", [False, True])
def test_the_scaler_leaves_a_step_out_where_a_gradient_is_not_finite(
    implementation: str, unscaled: bool
) -> None:
    world = World("AdamW", implementation, scaled=True)
    assert world.scaler is not None
    before, after = world.values(), []
    world.optimizer.register_step_post_hook(lambda *a: after.append(1))
    next(world.model.parameters()).grad.fill_(float("inf"))  # type: ignore[union-attr]  # not None
    if unscaled:
        world.scaler.unscale_(world.optimizer)
    with InjectOOM(at=[3]):
        world.guarded()
    world.update()
    assert same(world.values()["model"], before["model"])
    assert world.scaler.get_scale() == 512.0
    # A fused optimizer is stepped, and leaves its values alone.
    assert after == ([1] if implementation == "fused" else [])


def test_gradients_of_several_types_are_unscaled_once_each() -> None:
    def make() -> tuple[nn.Module, torch.optim.Optimizer, torch.amp.GradScaler, ElasticMBS]:
        torch.manual_seed(0)
        model = nn.ModuleList(
            [nn.Linear(3, 3).double(), nn.Linear(3, 3), nn.Embedding(5, 3, sparse=True)]
        )
        scaler, x = torch.amp.GradScaler("cpu", init_scale=1024.0), torch.ones(2, 3)
        loss = (
            model[0](x.double()).sum().float()
            + model[1](x).sum()
            + model[2](torch.tensor([1, 1, 3])).sum()
        )
        scaler.scale(loss).backward()
        return (
            model,
            torch.optim.SGD(model.parameters(), lr=0.1),
            scaler,
            elastic(model, scaler=scaler),
        )

    reference, optimizer, scaler, _ = make()
    scaler.step(optimizer)
    for inject in until_clean(lambda at: Everywhere(at=[at]), least=15):
        model, optimizer, _, mbs = make()
        with inject:
            mbs.optimizer_step(optimizer)
        assert same(model.state_dict(), reference.state_dict()), inject.hits
    model, optimizer, _, mbs = make()
    with InjectOOM(always_from=1), pytest.raises(OptimizerStepError, match="no room to unscale"):
        mbs.optimizer_step(optimizer)
    mbs.optimizer_step(optimizer)
    assert same(model.state_dict(), reference.state_dict())


def test_a_hook_that_removes_itself_stays_off() -> None:
    world, calls = World("SGD", "loop"), list[str]()
    scheduler = torch.optim.lr_scheduler.StepLR(world.optimizer, 1)

    def once(*args: Any) -> None:
        calls.append("once")
        handle.remove()

    handle = world.optimizer.register_step_pre_hook(once)
    for _ in range(3):
        world.guarded()
    assert calls == ["once"]
    scheduler.step()  # warns, and so fails, if it has seen no step


def test_a_hook_sees_every_group_when_steps_go_one_by_one() -> None:
    world, seen = World("AdamW", "foreach"), list[int]()
    with Everywhere(at=[28, 70]):
        world.guarded()
    world.optimizer.register_step_pre_hook(
        lambda optimizer, *a: seen.append(
            sum(len(group["params"]) for group in optimizer.param_groups)
        )
    )
    world.guarded()
    assert seen == [4]


BATCH = torch.ones(2, 3, dtype=torch.float64)


def warned(world: World) -> list[Warned]:
    """Return the warnings of two more calls."""
    for _ in range(2):
        world.mbs.backward(lambda x: world.model(x).sum(), BATCH)
    return [event for event in world.events if isinstance(event, Warned)]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_failed_step_is_reported_with_what_to_do(implementation: str) -> None:
    world = World("Adam", implementation, steps=0)
    with pytest.raises(torch.OutOfMemoryError) as caught, world.mbs, InjectOOM(at=[2]):
        world.optimizer.step()
    assert caught.value.__notes__ == [
        "elastic_mbs: `Adam.step()` did not end; parameters and state may be half changed: load "
        "the last checkpoint, and step by `mbs.optimizer_step` from then on."
    ]


def test_a_failed_step_that_was_caught_is_told_by_the_next_call() -> None:
    world = World("Adam", "foreach")
    with world.mbs:
        with InjectOOM(at=[2]), pytest.raises(torch.OutOfMemoryError):
            world.optimizer.step()
        (told,) = warned(world)
    assert told.topic == "optimizer-step"
    assert told.message.startswith("`Adam.step()` did not end")


def test_a_failed_step_that_was_caught_is_told_before_a_guarded_one() -> None:
    world = World("Adam", "foreach")
    with world.mbs:
        with InjectOOM(at=[2]), pytest.raises(torch.OutOfMemoryError):
            world.optimizer.step()
        # torch's own error, where it finds its state half made
        with suppress(KeyError):
            world.mbs.optimizer_step(world.optimizer)
    (told,) = (event for event in world.events if isinstance(event, Warned))
    assert told.message.startswith("`Adam.step()` did not end")


def test_clean_steps_guarded_steps_and_other_errors_get_no_note() -> None:
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
    assert calls_of(world.mbs)._steps.begun is None
