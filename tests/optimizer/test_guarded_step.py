"""A guarded step is made whole or not at all, wherever memory runs out in it."""

import gc
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from elastic_mbs import (
    ElasticMBS,
    MemoryBudget,
    OptimizerOutOfMemory,
    OptimizerStepError,
    StepInsideError,
    UsageError,
)
from elastic_mbs.optimizer.guarded_step import LONGEST_PAUSE, AttemptOrder
from elastic_mbs.optimizer.known import one_by_one, only_in_place
from elastic_mbs.testing import InjectOOM
from tests.helpers.guarded import IMPLEMENTATIONS, OPTIMIZERS, World, copied, layers, same
from tests.helpers.steps import elastic
from tests.helpers.strikes import COPIES, AtLine, Everywhere, until_clean

CASES = [
    (name, implementation, False)
    for name in OPTIMIZERS
    for implementation in IMPLEMENTATIONS
    if (name, implementation) != ("RMSprop", "fused")
]
CASES += [
    (name, implementation, True) for name in ("SGD", "Adam") for implementation in IMPLEMENTATIONS
]


@pytest.fixture(autouse=True)
def quick_collections() -> Iterator[None]:
    """Keep objects of other tests out of the garbage collection that every failure runs."""
    gc.freeze()
    yield
    gc.unfreeze()


def stepped(world: World) -> Any:
    """Return the values after a step without a failure."""
    world.plain()
    return world.values()


@pytest.mark.parametrize("steps", [0, 2], ids=["first", "later"])
@pytest.mark.parametrize(("name", "implementation", "scaled"), CASES)
def test_out_of_memory_anywhere_leaves_a_whole_step_or_none(
    name: str, implementation: str, scaled: bool, steps: int
) -> None:
    reference = World(name, implementation, steps=steps, scaled=scaled)
    wanted = stepped(reference)
    reference.backward()
    following = stepped(reference)
    allocates_nothing = only_in_place(
        World(name, implementation, steps=steps, scaled=scaled).optimizer
    )
    # Where copies are taken, operations in place fail as well. On a real device their errors are
    # not about memory, but they leave a step half made all the same.
    harness = InjectOOM if allocates_nothing else Everywhere
    patterns = [
        (5, lambda at: harness(at=[at])),
        (11, lambda at: harness(at=[at, at + 3])),
        (11, lambda at: harness(always_from=at)),
    ]
    points = 0
    for stride, make in patterns:
        for number, inject in enumerate(until_clean(make, stride=stride, least=0)):
            world = World(name, implementation, steps=steps, scaled=scaled)
            before = world.values()
            try:
                with inject:
                    world.guarded()
            except OptimizerStepError:
                assert same(world.values(), before), inject.hits
                world.guarded()  # a second call is allowed
            world.update()
            points += bool(inject.hits)
            assert same(world.values(), wanted), inject.hits
            if stride == 5 and number % 3 == 0:
                world.backward()
                world.guarded()
                world.update()
                assert same(world.values(), following), inject.hits
    assert points > 0 or (allocates_nothing and not scaled)


SECOND: list[type[BaseException] | None] = [
    None,
    torch.OutOfMemoryError,
    MemoryError,
    KeyboardInterrupt,
]


def at_two(gap: int, errors: list[type[BaseException]], at: int) -> Everywhere:
    return Everywhere(at=[at, at + gap], errors=errors)


@pytest.mark.parametrize("second", SECOND, ids=lambda kind: kind.__name__ if kind else "alone")
@pytest.mark.parametrize(
    "first", [torch.OutOfMemoryError, MemoryError, KeyboardInterrupt, ValueError]
)
def test_an_error_at_any_operation_leaves_a_whole_step_or_none(
    first: type[BaseException], second: type[BaseException] | None
) -> None:
    # The second error strikes while the first is rolled back, or in the next try.
    wanted, passed = stepped(World("AdamW", "foreach")), 0
    for gap in (1, 2, 3, 5) if second is not None else (0,):
        errors = [first] if second is None else [first, second]
        for inject in until_clean(partial(at_two, gap, errors), stride=3 if second is None else 13):
            world = World("AdamW", "foreach")
            before = world.values()
            try:
                with inject:
                    world.guarded()
            except (OptimizerStepError, KeyboardInterrupt, ValueError) as error:
                passed += isinstance(error, KeyboardInterrupt | ValueError)
                if not same(world.values(), wanted):
                    assert same(world.values(), before), (gap, inject.hits)
                    world.guarded()
            assert same(world.values(), wanted), (gap, inject.hits)
    assert bool(passed) == (not {first, second} <= {torch.OutOfMemoryError, MemoryError, None})


@pytest.mark.parametrize(
    ("implementation", "scaled"),
    [("foreach", False), ("loop", True), ("fused", False), ("fused", True)],
)
@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_an_error_at_any_line_of_the_guard_leaves_a_whole_step_or_none(
    error: type[BaseException], implementation: str, scaled: bool
) -> None:
    # The guard recovers from out-of-memory. Any other error passes. Then nothing has been done, or
    # a note says that all is done or that nothing is known.
    def spared(frame: FrameType) -> bool:
        """Return whether errors pass unchanged: before the step, and in a user's hook."""
        in_hook = error is MemoryError and getattr(frame.f_locals.get("self"), "running", False)
        before = ("__call__", "_make", "refuse_closure", "check_optimizer", "_retry")
        return in_hook or frame.f_code.co_name in before

    wanted = stepped(World("AdamW", implementation, scaled=scaled))
    for strike in until_clean(
        lambda n: AtLine(n, "optimizer/guarded_step.py", error=error, spared=spared),
        stride=7,
        least=70,
    ):
        world, hooks = World("AdamW", implementation, scaled=scaled), list[str]()
        world.optimizer.register_step_pre_hook(lambda *a, ran=hooks: ran.append("before"))
        world.optimizer.register_step_post_hook(lambda *a, ran=hooks: ran.append("after"))
        before, caught = world.values(), None
        # The first try fails half-way.
        with Everywhere(at=[30] if implementation == "foreach" else []):
            try:
                with strike:
                    world.guarded()
            except BaseException as ended:
                caught = ended
        notes = " ".join(getattr(caught, "__notes__", []))
        assert caught is None or type(caught) is error, strike.hits
        if caught is not None and "half-way" in notes:
            assert implementation == "fused", strike.hits
            continue
        assert caught is None or error is KeyboardInterrupt, strike.hits
        if caught is not None and same(world.values()["model"], before["model"]):
            assert "after" not in hooks, strike.hits
            world.guarded()
        else:
            assert hooks == ["before", "after"] or (
                caught is not None and "this step has been made" in notes
            ), strike.hits
        world.update()
        assert same(world.values(), wanted), strike.hits


def test_a_step_that_cannot_be_rolled_back_says_so() -> None:
    world = World("AdamW", "foreach")

    class NoCopies(InjectOOM):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if func._schema.name == "aten::_foreach_addcdiv_" or (
                self.hits and func._schema.name in COPIES
            ):
                self.hits.append(func._schema.name)
                raise torch.OutOfMemoryError("the device is lost")
            return func(*args, **(kwargs or {}))

    with (
        NoCopies(),
        pytest.raises(
            OptimizerStepError,
            match=r"parameters may be half changed: load the last checkpoint.*the device is lost",
        ),
    ):
        world.guarded()


def test_a_recovered_step_is_reported() -> None:
    world = World("AdamW", "foreach", steps=0)
    says = (
        r"AdamW\.step\(\) ran out of memory each time it was tried, at last one parameter at a time"
        ".*may be called again"
    )
    with InjectOOM(always_from=4), pytest.raises(OptimizerStepError, match=says):
        world.guarded()
    told = [event for event in world.events if isinstance(event, OptimizerOutOfMemory)]
    assert [event.action for event in told] == [
        "with the caches let go of",
        "one parameter at a time",
    ]
    assert (
        told[0]
        .line()
        .startswith(
            "out of memory in AdamW.step(), which has been taken back; trying again with the "
            "caches let go of: injected"
        )
    )


def test_a_step_without_room_for_one_state_changes_nothing() -> None:
    model, optimizer = layers("Adam", foreach=True)
    before = copied(model.state_dict())
    with MemoryBudget("8MiB", track=(model, optimizer)) as budget:
        mbs = elastic(model, sensor=None)
        budget.limit = budget.live + 2**14
        with pytest.raises(
            OptimizerStepError,
            match=r"16\.0 KiB of 8\.0 MiB were free at the last look, 7\.5 MiB held by "
            r"others.*fused=True",
        ):
            mbs.optimizer_step(optimizer)
        assert not optimizer.state
        assert same(model.state_dict(), before)
        live, budget.limit = budget.live, "8MiB"
        mbs.optimizer_step(optimizer)
        gc.collect()
        # Only the state has come; nothing is left of copies or of the failed step.
        assert budget.live == live + 2 * 16 * 2**14 + 16 * 4


@pytest.mark.parametrize(
    ("way", "room", "copies"),
    [("foreach", True, 2 * 16 * 2**14), ("foreach", False, 0), ("fused", True, 0)],
)
def test_copies_are_on_the_device_if_they_fit_and_else_on_the_host(
    way: str, room: bool, copies: int
) -> None:
    model, optimizer = layers("SGD", lr=0.1, momentum=0.9, **{way: True})
    optimizer.step()
    with MemoryBudget("64MiB", track=(model, optimizer)) as budget:
        mbs = elastic(model, sensor=None)
        if not room:
            budget.limit = budget.live + 2**16
        budget.reset_peak()
        before = budget.live
        mbs.optimizer_step(optimizer)
        assert (budget.peak - before >= 2 * 16 * 2**14) == bool(copies)
        assert budget.peak == before or way != "fused"
        gc.collect()
        assert budget.live == before


@pytest.mark.parametrize(
    ("implementation", "at", "error", "said"),
    [
        (
            "loop",
            40,
            KeyboardInterrupt,
            "parameters and optimizer state are as they were before this step.",
        ),
        # On a real device nothing there can allocate.
        (
            "fused",
            4,
            torch.OutOfMemoryError,
            "a fused step, of which no copies are taken, ended half-way: load the last checkpoint.",
        ),
    ],
)
def test_any_other_error_passes_with_a_note_on_the_state(
    implementation: str, at: int, error: type[BaseException], said: str
) -> None:
    world = World("AdamW", implementation)
    with pytest.raises(error, match="injected") as caught, Everywhere(at=[at], errors=[error]):
        world.guarded()
    assert caught.value.__notes__ == [f"elastic_mbs: {said}"]


@pytest.mark.parametrize("scaled", [False, True])
def test_without_gradients_or_when_disabled_the_step_is_a_plain_one(
    scaled: bool,
) -> None:
    world = World("Adam", "foreach", scaled=scaled)
    ElasticMBS(world.model, scaler=world.scaler, enabled=False).optimizer_step(world.optimizer)
    world.update()
    wanted, calls = stepped(World("Adam", "foreach", scaled=scaled)), list[int]()
    assert same(world.values(), wanted)
    world.optimizer.zero_grad()
    world.optimizer.register_step_post_hook(lambda *a: calls.append(1))
    world.guarded()
    assert same(world.values(), wanted)
    assert calls == [1]


def test_an_impossible_guarded_step_is_refused_by_name() -> None:
    world = World("Adam", "foreach")
    wrapper = type("Wrapper", (), {"optimizer": world.optimizer})()
    accelerated: Any = type(
        "Accelerated",
        (torch.optim.Optimizer,),
        {"__init__": lambda self, inner: setattr(self, "optimizer", inner)},
    )
    private = type("DPOptimizer", (accelerated,), {"__module__": "opacus.optimizers.optimizer"})
    wrong: dict[str, tuple[Any, ...]] = {
        "got a DPOptimizer.*cannot be made again: call its own": (private(world.optimizer),),
        "LBFGS runs its closure": (torch.optim.LBFGS(world.model.parameters()),),
        "takes no closure": (world.optimizer, lambda: 1.0),
        "got a int, which is no torch": (3,),
        "got a Wrapper.*pass the Adam inside it": (wrapper,),
        r"got a Accelerated, which never called Optimizer.__init__: pass the Adam inside it, its "
        r"\.optimizer, if": (accelerated(world.optimizer),),
    }
    for says, arguments in wrong.items():
        with pytest.raises(UsageError, match=says):
            world.mbs.optimizer_step(*arguments)
    for micro in world.mbs.micro_batches(torch.ones(4, 3, dtype=torch.float64)):
        with pytest.raises(StepInsideError), micro:
            world.guarded()
        break


def test_the_way_that_worked_comes_first_and_the_fastest_returns() -> None:
    reference, plain = layers("AdamW", foreach=True)
    for _ in range(45):
        plain.step()
    model, optimizer = layers("AdamW", foreach=True)
    events, failed = list[Any](), list[int]()
    with MemoryBudget("8MiB", track=(model, optimizer)) as budget:
        mbs = elastic(model, sensor=None, on_event=events.append)
        for step in range(45):
            if step == 1:
                budget.limit = budget.live + 4 * 2**14  # foreach needs 16 of them
            if step == 34:
                budget.limit = "8MiB"
            budget.reset_peak()
            mbs.optimizer_step(optimizer)
            if any(isinstance(event, OptimizerOutOfMemory) for event in events):
                failed.append(step)
            events.clear()
        assert budget.peak - budget.live > 3 * 16 * 2**14  # copies on the device again
    assert failed == [1, 3, 6, 11, 20]
    assert same(model.state_dict(), reference.state_dict())


def test_the_fastest_way_is_tried_again_at_growing_intervals() -> None:
    order, began = AttemptOrder(), list[int]()
    for _ in range(400):
        began.append(order.first("adam"))
        order.worked("adam", began[-1], 2)
    tries = [step for step, way in enumerate(began) if way == 0]
    assert [b - a for a, b in pairwise(tries)] == [2, 3, 5, 9, 17, 33, 65, *[LONGEST_PAUSE + 1] * 4]
    assert order.first("sgd") == 0
    order.worked("adam", 0, 0)
    assert [order.first("adam") for _ in range(3)] == [0] * 3


@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW", "Adagrad"])
def test_a_fused_step_whose_state_is_there_needs_nothing(name: str) -> None:
    model, optimizer = layers(name, fused=True, **({"momentum": 0.9} if name == "SGD" else {}))
    if name != "Adagrad":  # Adagrad makes its state with the optimizer
        assert not only_in_place(optimizer)
        optimizer.step()
    assert only_in_place(optimizer)
    with MemoryBudget("1GiB", track=(model, optimizer)) as budget:
        before = budget.live
        optimizer.step()
        assert (budget.peak, budget.live) == (before, before)


@pytest.mark.parametrize(
    "name",
    [
        "SGD",
        "Adamax",
        "NAdam",
        "RAdam",
        "Adadelta",
        "RMSprop",
        "Rprop",
        "ASGD",
        "Adafactor",
        "Muon",
    ],
)
def test_torchs_optimizers_give_the_same_result_one_parameter_at_a_time(name: str) -> None:
    if not hasattr(torch.optim, name):
        pytest.skip(f"this torch has no {name}")
    (model, together), (twin, apart) = layers(name), layers(name)
    assert one_by_one(apart)
    for _ in range(2):
        together.step()
        groups = apart.param_groups
        for parameter in twin.parameters():
            apart.param_groups = [{**groups[0], "params": [parameter]}]
            apart.step()
        apart.param_groups = groups
    assert same(model.state_dict(), twin.state_dict())


def test_a_subclass_of_torchs_may_couple_its_parameters() -> None:
    model, optimizer = layers("Adam", foreach=True)
    assert one_by_one(optimizer)
    assert not one_by_one(type("Mine", (torch.optim.Adam,), {})(model.parameters()))
    assert not one_by_one(torch.optim.LBFGS(model.parameters()))


def test_gradients_stay_enabled_after_an_interrupt() -> None:
    class Interrupted(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]  # torch has two overloads
            torch.set_grad_enabled(False)  # as an interrupted no_grad block does
            raise KeyboardInterrupt

    model, _ = layers("SGD")
    with pytest.raises(KeyboardInterrupt):
        elastic(model).optimizer_step(Interrupted(model.parameters()))
    assert torch.is_grad_enabled()


def test_no_class_of_the_users_and_nothing_behind_it_outlives_the_runtime() -> None:
    def trained() -> tuple[weakref.ref[Any], ...]:
        model = nn.Linear(3, 1)

        class Loss:
            def __call__(self, x: Tensor) -> Tensor:
                loss: Tensor = model(x).mean()
                return loss

        class Clipped(torch.optim.SGD):
            def step(self, closure: Any = None) -> Any:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                return super().step(closure)

        @dataclass
        class Samples:
            x: Tensor

            def loss(self) -> Tensor:
                loss: Tensor = Loss()(self.x)
                return loss

        optimizer = Clipped(model.parameters(), 0.1)
        with elastic(model, micro_batch_size=2) as mbs:
            for _ in range(2):
                mbs.backward(lambda batch: batch.loss(), Samples(torch.ones(4, 3)))
                mbs.optimizer_step(optimizer)
        return tuple(map(weakref.ref, (model, Loss, Samples, Clipped)))

    alive = trained()
    gc.collect()
    assert [each() for each in alive] == [None] * 4
