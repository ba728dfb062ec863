"""Each thread is inside at most one call, and no optimizer steps while a call runs on any of them."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn

from elastic_mbs.engine.misuse import enter_call, leave_call, running_call


class Refusal(Exception):
    pass


class Call:
    finished = False

    def check_step(self, optimizer: torch.optim.Optimizer) -> None:
        raise Refusal(type(optimizer).__name__)


@pytest.fixture(autouse=True)
def _outside_of_any_call() -> Iterator[None]:
    assert running_call() is None
    yield
    leave_call(running_call())


def in_a_thread(work: Callable[[], object]) -> None:
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


def test_a_thread_is_inside_the_call_that_it_entered_until_it_leaves_or_the_call_has_finished() -> None:
    call, seen = Call(), list[object]()
    enter_call(call)
    leave_call(Call())  # another one
    assert running_call() is call
    in_a_thread(lambda: seen.append(running_call()))
    assert seen == [None]
    call.finished = True
    assert running_call() is None
    call.finished = False
    leave_call(call)
    leave_call(call)
    assert running_call() is None


def test_a_step_is_refused_while_a_call_runs_on_any_thread_and_changes_nothing() -> None:
    model, errors = nn.Linear(2, 1), list[Refusal]()
    model(torch.ones(1, 2)).sum().backward()
    optimizer = torch.optim.Adam(model.parameters())

    def step() -> None:
        try:
            optimizer.step()
        except Refusal as error:
            errors.append(error)

    before = model.weight.detach().clone()
    call = Call()
    enter_call(call)
    step()
    in_a_thread(step)  # as a backward on a GPU
    assert [str(error) for error in errors] == ["Adam", "Adam"]
    assert torch.equal(model.weight, before)
    leave_call(call)
    step()
    assert not torch.equal(model.weight, before)


def test_every_call_that_runs_is_asked_and_one_that_has_finished_is_dropped() -> None:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)])
    asked: list[Call] = []

    class Asked(Call):
        def check_step(self, optimizer: torch.optim.Optimizer) -> None:
            asked.append(self)

    outer, inner = Asked(), Asked()
    enter_call(outer)
    enter_call(inner)
    assert running_call() is outer
    optimizer.step()
    inner.finished = True  # an interrupt has struck before it left
    optimizer.step()
    gone = weakref.ref(inner)
    assert asked == [outer, inner, outer]
    leave_call(outer)
    optimizer.step()
    assert len(asked) == 3
    del inner
    asked.clear()
    assert gone() is None
