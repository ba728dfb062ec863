"""A guarded step is made whole or not at all, wherever memory runs out in it."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from itertools import pairwise
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

from elastic_mbs import ElasticMBS, MemoryBudget, OptimizerOutOfMemory, OptimizerStepError, StepInsideError, UsageError
from elastic_mbs.optimizer import guarded_step
from elastic_mbs.optimizer.guarded_step import LONGEST_PAUSE, AttemptOrder
from elastic_mbs.optimizer.known import only_in_place
from elastic_mbs.testing import InjectOOM
from stress.exhaustive.run import run
from stress.exhaustive.strike import Lines, Operations
from stress.exhaustive.target import builtin
from tests.helpers.guarded import COPIES, IMPLEMENTATIONS, OPTIMIZERS, Everywhere, World, off_by
from tests.helpers.steps import elastic

CASES = [(name, implementation, False) for name, (_, _, offered) in OPTIMIZERS.items() for implementation in offered]
CASES += [(name, implementation, True) for name in ("SGD", "Adam") for implementation in IMPLEMENTATIONS]


@pytest.fixture(autouse=True)
def quick_collections() -> Iterator[None]:
    """Every failure collects garbage, and what the whole suite has imported is looked through each time."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.no_oom_injection
@pytest.mark.parametrize("steps", [0, 2], ids=["first", "later"])
@pytest.mark.parametrize(("name", "implementation", "scaled"), CASES)
def test_wherever_it_runs_out_of_memory_a_step_is_made_whole_or_not_at_all(name: str, implementation: str, scaled: bool, steps: int) -> None:
    reference = World(name, implementation, steps=steps, scaled=scaled)
    reference.plain()
    wanted = reference.values()
    reference.backward()
    reference.plain()
    following = reference.values()
    allocates_nothing = only_in_place(World(name, implementation, steps=steps, scaled=scaled).optimizer)
    # Where copies are taken, operations in place fail as well: their errors are others than memory's on a real device, but no less half-way.
    harness = InjectOOM if allocates_nothing else Everywhere
    points = 0
    for pattern in ("once", "twice", "for good"):
        number, hit = 0, True
        while hit:
            number += 1
            world = World(name, implementation, steps=steps, scaled=scaled)
            before = world.values()
            inject = harness(always_from=number) if pattern == "for good" else harness(at=[number, number + 3] if pattern == "twice" else [number])
            try:
                with inject:
                    world.guarded()
            except OptimizerStepError:
                assert off_by(world.values(), before) == 0.0, (pattern, number, inject.hits)
                world.guarded()  # it may be called again
            world.update()
            hit = bool(inject.hits)
            points += hit
            assert off_by(world.values(), wanted) == 0.0, (pattern, number, inject.hits)
            if pattern == "once" and number % 7 == 1:
                world.backward()
                world.guarded()
                world.update()
                assert off_by(world.values(), following) == 0.0, number
    assert points > 0 or (allocates_nothing and not scaled)


SECOND: list[type[BaseException] | None] = [None, torch.OutOfMemoryError, MemoryError, KeyboardInterrupt]


@pytest.mark.no_oom_injection
@pytest.mark.parametrize("second", SECOND, ids=lambda kind: kind.__name__ if kind else "alone")
@pytest.mark.parametrize("first", [torch.OutOfMemoryError, MemoryError, KeyboardInterrupt, ValueError])
def test_an_error_at_any_operation_ours_included_leaves_a_whole_step_or_none(first: type[BaseException], second: type[BaseException] | None) -> None:
    # the second one strikes while the first is being rolled back, or in the next try
    reference = World("AdamW", "foreach", steps=1, scaled=False)
    reference.plain()
    wanted, passed = reference.values(), 0
    for gap in (1, 2, 3, 5) if second is not None else (0,):
        number, hit = 0, True
        while hit:
            number += 1
            world = World("AdamW", "foreach", steps=1, scaled=False)
            before = world.values()
            inject = Everywhere(at=[number, number + gap], errors=[first] if second is None else [first, second])
            try:
                with inject:
                    world.guarded()
            except (OptimizerStepError, KeyboardInterrupt, ValueError) as error:
                passed += isinstance(error, KeyboardInterrupt | ValueError)
                if off_by(world.values(), wanted) > 0.0:
                    assert off_by(world.values(), before) == 0.0, (number, gap, inject.hits)
                    world.guarded()
            assert off_by(world.values(), wanted) == 0.0, (number, gap, inject.hits)
            hit = bool(inject.hits)
    assert bool(passed) == (not {first, second} <= {torch.OutOfMemoryError, MemoryError, None})


@pytest.mark.no_oom_injection
@pytest.mark.parametrize(("implementation", "scaled"), [("foreach", False), ("loop", True), ("fused", False), ("fused", True)])
@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_an_error_at_any_line_of_the_guard_leaves_a_whole_step_or_none(error: type[BaseException], implementation: str, scaled: bool) -> None:
    # Out of memory is ours to recover from there, and all else passes: with nothing done, or with a note that all is done, or that nothing is known.
    reference = World("AdamW", implementation, steps=1, scaled=scaled)
    reference.plain()
    wanted, number, struck = reference.values(), 0, True
    while struck:
        number += 1
        world, hooks = World("AdamW", implementation, steps=1, scaled=scaled), list[str]()
        world.optimizer.register_step_pre_hook(lambda *a, ran=hooks: ran.append("before"))
        world.optimizer.register_step_post_hook(lambda *a, ran=hooks: ran.append("after"))
        before, left, caught = world.values(), number, None

        def trace(frame: FrameType, event: str, arg: object) -> Any:
            nonlocal left
            # what comes before the step, and our own way into a hook of the user's, whose errors are passed on as they are
            in_hook = error is MemoryError and getattr(frame.f_locals.get("self"), "running", False)
            outside = in_hook or frame.f_code.co_name in ("__call__", "_check", "_retry")
            if frame.f_code.co_filename == guarded_step.__file__ and not outside:
                left -= event == "line"
                if left == 0:
                    sys.settrace(None)
                    raise error
            return trace

        outer = sys.gettrace()
        with Everywhere(at=[30] if implementation == "foreach" else []):  # the first try fails half-way
            sys.settrace(trace)
            try:
                world.guarded()
            except BaseException as ended:
                caught = ended
            finally:
                sys.settrace(outer)
        struck = left <= 0
        notes = " ".join(getattr(caught, "__notes__", []))
        assert caught is None or type(caught) is error, number
        if caught is not None and "half-way" in notes:
            assert implementation == "fused", number
            continue
        assert caught is None or error is KeyboardInterrupt, number
        if caught is not None and off_by(world.values()["model"], before["model"]) == 0.0:
            assert "after" not in hooks, number
            world.guarded()
        elif caught is not None:
            assert "this step has been made" in notes or hooks == ["before", "after"], number
        else:
            assert hooks == ["before", "after"], number
        world.update()
        assert off_by(world.values(), wanted) == 0.0, number
    assert number > 70


@pytest.mark.no_oom_injection
def test_the_exhaustive_tool_lets_an_interrupt_after_a_whole_step_leave_it_whole() -> None:
    seen = Lines(Operations(30))
    run(builtin("mlp"), seen, call="optimizer_step", warm=True)
    (file, line), times = list(seen.seen.items())[-1]
    outcome = run(builtin("mlp"), Lines(Operations(30), (file, line, times), KeyboardInterrupt), call="optimizer_step", warm=True)
    assert (outcome.error, outcome.found) == ("KeyboardInterrupt", {})


def test_a_step_that_cannot_be_rolled_back_says_so() -> None:
    world = World("AdamW", "foreach", steps=1, scaled=False)

    class NoCopies(InjectOOM):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func._schema.name == "aten::_foreach_addcdiv_" or (self.hits and func._schema.name in COPIES):
                self.hits.append(func._schema.name)
                raise torch.OutOfMemoryError("the device is lost")
            return func(*args, **(kwargs or {}))

    with NoCopies(), pytest.raises(OptimizerStepError, match=r"parameters may be half changed: load the last checkpoint.*the device is lost"):
        world.guarded()


def test_a_recovered_step_is_told_of() -> None:
    world = World("AdamW", "foreach", steps=0, scaled=False)
    says = r"AdamW\.step\(\) does not fit, not even one parameter at a time.*may be called again"
    with InjectOOM(always_from=4), pytest.raises(OptimizerStepError, match=says):
        world.guarded()
    told = [event for event in world.events if isinstance(event, OptimizerOutOfMemory)]
    assert [event.action for event in told] == ["with the caches let go of", "one parameter at a time"]
    assert told[0].line().startswith("out of memory in AdamW.step(), which has been taken back; trying again with the caches let go of: injected")


# ---------------------------------------------------------------------- under a budget


def _wide(cls: type[torch.optim.Optimizer], **options: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(16)))  # 16 × 16 KiB
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    return model, cls(model.parameters(), **options)


def test_where_not_even_one_parameters_state_fits_everything_stays_as_it_was() -> None:
    model, optimizer = _wide(torch.optim.Adam, foreach=True)
    before = [p.detach().clone() for p in model.parameters()]
    with MemoryBudget("8MiB", track=(model, optimizer)) as budget:
        mbs = elastic(model, sensor=None)
        budget.limit = budget.live + 2**14
        with pytest.raises(OptimizerStepError, match=r"16\.0 KiB of 8\.0 MiB were free at the last look, 7\.5 MiB held by others.*fused=True"):
            mbs.optimizer_step(optimizer)
        assert not optimizer.state
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), before, strict=True))
        live = budget.live
        budget.limit = "8MiB"
        mbs.optimizer_step(optimizer)
        gc.collect()
        assert budget.live == live + 2 * 16 * 2**14 + 16 * 4  # the state, and nothing of the copies or of what failed


@pytest.mark.parametrize(
    ("options", "room", "copies"), [({"foreach": True}, True, 2 * 16 * 2**14), ({"foreach": True}, False, 0), ({"fused": True}, True, 0)]
)
def test_copies_are_on_the_device_where_they_fit_and_on_the_host_otherwise_and_a_fused_step_takes_none(
    options: dict[str, Any], room: bool, copies: int
) -> None:
    model, optimizer = _wide(torch.optim.SGD, lr=0.1, momentum=0.9, **options)
    optimizer.step()
    with MemoryBudget("64MiB", track=(model, optimizer)) as budget:
        mbs = elastic(model, sensor=None)
        if not room:
            budget.limit = budget.live + 2**16
        budget.reset_peak()
        before = budget.live
        mbs.optimizer_step(optimizer)
        assert (budget.peak - before >= 2 * 16 * 2**14) == bool(copies)
        assert budget.peak == before or "fused" not in options
        gc.collect()
        assert budget.live == before


# ---------------------------------------------------------------------- what passes through, and what is refused


@pytest.mark.parametrize(
    ("implementation", "at", "error", "said"),
    [
        ("loop", 40, KeyboardInterrupt, "parameters and optimizer state are as they were before this step."),
        # nothing there can allocate on a real device
        ("fused", 4, torch.OutOfMemoryError, "a fused step, of which no copies are taken, ended half-way: load the last checkpoint."),
    ],
)
def test_any_other_error_passes_through_with_a_note_of_what_it_leaves(implementation: str, at: int, error: type[BaseException], said: str) -> None:
    world = World("AdamW", implementation, steps=1, scaled=False)
    with pytest.raises(error, match="injected") as caught, Everywhere(at=[at], errors=[error]):
        world.guarded()
    assert caught.value.__notes__ == [f"elastic_mbs: {said}"]


def test_without_gradients_nothing_happens_but_the_hooks() -> None:
    world = World("Adam", "foreach", steps=1, scaled=False)
    world.optimizer.zero_grad()
    before, calls = world.values(), []
    world.optimizer.register_step_post_hook(lambda *a: calls.append(1))
    world.guarded()
    assert off_by(world.values(), before) == 0.0
    assert calls == [1]


@pytest.mark.parametrize("scaled", [False, True])
def test_a_runtime_that_is_not_enabled_steps_plainly(scaled: bool) -> None:
    reference = World("Adam", "foreach", steps=1, scaled=scaled)
    reference.plain()
    world = World("Adam", "foreach", steps=1, scaled=scaled)
    ElasticMBS(world.model, scaler=world.scaler, enabled=False).optimizer_step(world.optimizer)
    world.update()
    assert off_by(world.values(), reference.values()) == 0.0


def test_what_cannot_be_stepped_is_refused_by_name() -> None:
    world = World("Adam", "foreach", steps=1, scaled=False)
    with pytest.raises(UsageError, match="LBFGS runs its closure"):
        world.mbs.optimizer_step(torch.optim.LBFGS(world.model.parameters()))
    with pytest.raises(UsageError, match="takes no closure"):
        world.mbs.optimizer_step(world.optimizer, lambda: 1.0)
    with pytest.raises(UsageError, match="got a int, which is no torch"):
        world.mbs.optimizer_step(3)  # type: ignore[arg-type]  # the mistake
    wrapper = type("Wrapper", (), {"optimizer": world.optimizer})()
    with pytest.raises(UsageError, match=r"got a Wrapper.*pass the Adam inside it"):
        world.mbs.optimizer_step(wrapper)
    accelerated = type("Accelerated", (torch.optim.Optimizer,), {"__init__": lambda self, inner: setattr(self, "optimizer", inner)})
    with pytest.raises(UsageError, match=r"got a Accelerated, which never called Optimizer.__init__: pass the Adam inside it, its \.optimizer, if"):
        world.mbs.optimizer_step(accelerated(world.optimizer))
    for micro in world.mbs.micro_batches(torch.ones(4, 3, dtype=torch.float64)):
        with pytest.raises(StepInsideError), micro:
            world.guarded()
        break


@pytest.mark.no_oom_injection
def test_a_step_that_fits_one_parameter_at_a_time_does_not_fail_first_every_time_and_finds_back() -> None:
    reference, plain = _wide(torch.optim.AdamW, foreach=True)
    for _ in range(45):
        plain.step()
    model, optimizer = _wide(torch.optim.AdamW, foreach=True)
    events: list[Any] = []
    failed: list[int] = []
    with MemoryBudget("8MiB", track=(model, optimizer)) as budget:
        mbs = elastic(model, sensor=None, on_event=events.append)
        for step in range(45):
            if step == 1:
                budget.limit = budget.live + 4 * 2**14  # foreach needs sixteen
            if step == 34:
                budget.limit = "8MiB"
            budget.reset_peak()
            mbs.optimizer_step(optimizer)
            if any(isinstance(event, OptimizerOutOfMemory) for event in events):
                failed.append(step)
            events.clear()
        assert budget.peak - budget.live > 3 * 16 * 2**14  # copies on the device again
    assert failed == [1, 3, 6, 11, 20]
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), reference.parameters(), strict=True))


def test_the_fastest_way_is_tried_again_at_longer_and_longer_intervals_for_each_kind_of_step() -> None:
    order, tries = AttemptOrder(), []
    for step in range(400):
        began = order.first("adam")
        if began == 0:
            tries.append(step)
        order.worked("adam", began, 2)
    gaps = [b - a for a, b in pairwise(tries)]
    assert gaps[:7] == [2, 3, 5, 9, 17, 33, 65]
    assert set(gaps[6:]) == {LONGEST_PAUSE + 1}
    assert order.first("sgd") == 0
    order.worked("adam", 0, 0)
    assert [order.first("adam") for _ in range(3)] == [0] * 3
