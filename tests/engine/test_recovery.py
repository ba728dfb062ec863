"""Which replay a failure gets, what is put back for it, and what it keeps alive."""

import copy
import gc
import random
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from elastic_mbs import OutOfMemory
from elastic_mbs.batch.schedule import Range
from elastic_mbs.engine.recovery import Mode, choose_replay
from elastic_mbs.engine.state import Attempt, CallState, Failure, Phase
from elastic_mbs.events import Event
from elastic_mbs.memory.oom import Kind, Verdict
from elastic_mbs.rollback.buffers import BufferCopies
from elastic_mbs.rollback.isolation import Isolation
from tests.helpers.steps import (
    FailOn,
    Pair,
    calls_of,
    cross_entropy,
    elastic,
    mlp,
    off_by,
    pairs,
    settled,
    there,
    through,
    whole_gradient,
)
from tests.helpers.strikes import every_operation


@pytest.fixture
def state() -> Iterator[CallState]:
    """A call to which every rule applies by which a batch is replayed from its start, as far as it is the call that decides."""
    model = nn.Sequential(*mlp(), nn.BatchNorm1d(4).double())
    mbs = elastic(model, micro_batch_size=4, backward=Tensor.backward)
    micro_batches = mbs.micro_batches(pairs())
    next(micro_batches)
    state = there(calls_of(mbs).current).state
    state.committed.append(Attempt(Range(0, 4)))
    state.profile.normalises_batch = True
    torch.rand(())
    random.random()
    model(pairs()[0])
    yield state
    mbs.close()


Row = tuple[dict[str, Any], Mode, str]


def rows(state: CallState) -> Iterator[Row]:
    """What is changed, and the rule that then decides: with each change the one before does not apply any more, but all that follow still do."""
    streams, plain = state.context.streams, replace(state.context.settings.gradients, backward=None)
    yield {}, Mode.REFUSED, "samples 4:8 were changed in place by loss_fn"
    yield {"failure.edited": False}, Mode.REFUSED, "a leaf of shape (3,) outside the model appeared"
    # on the host
    yield (
        {"failure.unknown": ()},
        Mode.STEP,
        "random numbers were drawn from streams that were not read",
    )
    # since the call began
    yield (
        {"failure.streams": state.streams},
        Mode.STEP,
        "random numbers were drawn from streams that were not read",
    )
    yield (
        {"failure.streams": there(state.streams)._replace()},
        Mode.STEP,
        "can belong to an earlier operation",
    )
    yield {"state.training": False}, Mode.PIECE, ""
    yield {"state.training": True, "state.committed": []}, Mode.PIECE, ""
    yield {"failure.phase": Phase.WAITING}, Mode.PIECE, ""
    yield (
        {"failure.phase": Phase.BACKWARD, "state.isolation": Isolation(None)},
        Mode.STEP,
        "the error can be asynchronous",
    )
    yield {"failure.verdict": Verdict(Kind.ALLOCATOR, "")}, Mode.ISOLATED, ""
    yield (
        {"state.isolation": None},
        Mode.STEP,
        "no backward of this loss function has succeeded yet",
    )
    yield {"profile.commits": {4}}, Mode.STEP, "its backward may have run another one inside"
    yield {"failure.surprising": False}, Mode.PIECE, ""
    yield (
        {"failure.committed": frozenset({1})},
        Mode.STEP,
        "gradients share memory or have new hooks",
    )
    yield {"failure.indistinct": False}, Mode.STEP, "backward= gives no way"
    yield (
        {"context.settings": replace(state.context.settings, gradients=plain)},
        Mode.STEP,
        "depends on which samples are in it",
    )
    yield {"profile.normalises_batch": False}, Mode.STEP, "depends on which samples are in it"
    yield {"failure.normalises_batch": False}, Mode.STEP, "depends on which samples are in it"
    yield {"context.buffers": BufferCopies()}, Mode.STEP, "partly committed and drew random numbers"
    yield {"failure.streams": streams.read(hosts=True)}, Mode.PIECE, ""


def cases(state: CallState) -> Iterator[tuple[Failure, Mode, str]]:
    early = there(state.streams)._replace(hosts=None)
    verdict = Verdict(Kind.RUNTIME, "")
    failure = Failure(
        Range(4, 8), Phase.FORWARD, verdict, frozenset(), ("(3,)",), True, True, True, True, early
    )
    for changes, mode, words in rows(state):
        for name, value in changes.items():
            owner, _, attribute = name.partition(".")
            if owner == "failure":
                failure = replace(failure, **{attribute: value})
            else:
                setattr(
                    {"state": state, "profile": state.profile, "context": state.context}[owner],
                    attribute,
                    value,
                )
        yield failure, mode, words


def facts(*things: object) -> list[dict[str, Any]]:
    """What objects hold, as they hold it now."""
    held = [
        {name: getattr(thing, name) for name in getattr(thing, "__slots__", None) or vars(thing)}
        for thing in things
    ]
    return [
        {
            name: copy.copy(value) if isinstance(value, list | dict | set) else value
            for name, value in each.items()
        }
        for each in held
    ]


def test_the_first_rule_that_applies_chooses_the_replay_and_writes_nothing(
    state: CallState,
) -> None:
    context = state.context
    things = [
        state,
        state.profile,
        state.schedule,
        context,
        context.ledger,
        context.buffers,
        context.model,
        context.streams,
    ]
    for failure, mode, words in cases(state):
        before = facts(*things)
        replay = choose_replay(state, failure)
        assert facts(*things) == before, words
        assert replay.mode is mode, words
        assert replay.reason.startswith(words) if mode is Mode.REFUSED else words in replay.reason


@pytest.mark.parametrize(
    ("obstacle", "told"),
    [({"had_gradient": {1}}, "zero_grad()"), ({"edited": True}, "work on a copy")],
)
def test_what_would_start_over_and_cannot_is_refused(
    state: CallState, obstacle: dict[str, Any], told: str
) -> None:
    for name, value in obstacle.items():
        setattr(state, name, value)
    for failure, mode, words in cases(state):
        replay = choose_replay(state, failure)
        assert replay.mode is (Mode.REFUSED if mode is Mode.STEP else mode)
        assert words in replay.reason
        assert (told in replay.reason) or mode is not Mode.STEP


@pytest.mark.parametrize(
    "draw",
    [torch.rand, lambda n: torch.tensor([random.random() for _ in range(n)])],
    ids=["torch", "python"],
)
def test_a_step_that_begins_to_draw_in_the_very_call_that_fails_ends_as_one_that_never_failed(
    door: int, draw: Callable[[int], Tensor]
) -> None:
    """Streams are read once a call, until a step has been seen to draw: then what failed is run again from the call's start."""
    events, batch = list[Event](), pairs()
    for inject in every_operation(stride=3):
        model, twin = mlp(), mlp()

        def loss_fn(b: Pair, net: nn.Module = model) -> Tensor:
            each = nn.functional.cross_entropy(net(b[0]), b[1], reduction="none")
            return (each * draw(len(each))).mean() if drawing else each.mean()  # noqa: B023  # it is called within this turn

        drawing = False
        mbs = settled(door, model, loss_fn, batch, on_event=events.append)
        drawing = True
        random.seed(3)
        torch.manual_seed(3)
        with inject:
            result = through(door, mbs, loss_fn, batch)
        after = random.getstate(), torch.get_rng_state()
        random.seed(3)
        torch.manual_seed(3)
        for start, stop in result.partition:
            (
                loss_fn((batch[0][start:stop], batch[1][start:stop]), twin) * ((stop - start) / 8)
            ).backward()
        assert off_by(model, [p.grad for p in twin.parameters()]) <= 1e-12
        assert after[0] == random.getstate()
        assert torch.equal(after[1], torch.get_rng_state())
    assert {event.mode for event in events if isinstance(event, OutOfMemory)} == {"piece", "step"}


def test_the_gradients_that_a_replay_has_dropped_are_not_kept_alive() -> None:
    model, batch, events = mlp(), pairs(), list[Event]()
    held: list[weakref.ref[Tensor]] = []
    alive: list[bool] = []

    def loss_fn(piece: Pair) -> Tensor:
        if held:
            gc.collect()
            alive.append(held[0]() is not None)
        elif (grad := next(model.parameters()).grad) is not None:
            held.append(weakref.ref(grad))
            raise RuntimeError("CUDA error: out of memory")  # perhaps of the first piece
        return cross_entropy(model)(piece)

    elastic(model, micro_batch_size=4, on_event=events.append).backward(loss_fn, batch)
    assert [event.mode for event in events if isinstance(event, OutOfMemory)] == ["step"]
    assert alive[0] is False
    assert off_by(model, whole_gradient(model, lambda twin: cross_entropy(twin)(batch))) <= 1e-12


def test_a_scaler_that_ran_out_of_memory_between_its_two_tensors_makes_both_the_next_time() -> None:
    """It had its scale and looked ready, but no growth tracker: the optimizer's step ended by an AssertionError of torch's."""
    struck = 0
    for inject in every_operation():
        model, batch, scaler = mlp(), pairs(4), torch.amp.GradScaler("cpu", init_scale=4.0)
        mbs = elastic(model, micro_batch_size=4, scaler=scaler)
        with inject:
            mbs.backward(cross_entropy(model), batch)
        struck += inject.hits == ["aten::full"]
        scaler.step(torch.optim.SGD(model.parameters(), lr=0.1))
        scaler.update()
    assert struck >= 2


def test_unscaling_that_runs_out_of_pythons_own_memory_is_tried_again() -> None:
    """Only a RuntimeError was looked at there; a MemoryError passed through as it was."""
    model, fail = mlp(), FailOn(1, error=MemoryError)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    class Scaler(torch.amp.GradScaler):
        def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
            fail()
            super().unscale_(optimizer)

    mbs = elastic(model, scaler=Scaler("cpu", init_scale=4.0))
    mbs.backward(cross_entropy(model), pairs(4))
    before = [p.detach().clone() for p in model.parameters()]
    mbs.optimizer_step(optimizer)
    assert fail.count == 2
    assert not any(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
