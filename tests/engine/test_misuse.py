from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from elastic_mbs.engine.misuse import check_gradients_stayed, enter_call, leave_call, running_call
from elastic_mbs.errors import OptimizerInBackwardError


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


def in_a_thread(work: object) -> None:
    thread = threading.Thread(target=work)  # type: ignore[arg-type]  # any callable
    thread.start()
    thread.join()


def test_a_thread_is_inside_the_call_that_it_entered_until_it_leaves() -> None:
    call = Call()
    enter_call(call)
    assert running_call() is call
    leave_call(call)
    assert running_call() is None


def test_a_call_that_has_finished_is_no_longer_running() -> None:
    call = Call()
    enter_call(call)
    call.finished = True
    assert running_call() is None
    leave_call(call)
    call.finished = False
    assert running_call() is None


def test_only_the_running_call_can_be_left() -> None:
    call = Call()
    enter_call(call)
    leave_call(Call())
    assert running_call() is call


def test_another_thread_is_in_no_call() -> None:
    enter_call(Call())
    seen: list[object] = []
    in_a_thread(lambda: seen.append(running_call()))
    assert seen == [None]


# ---------------------------------------------------------------------- optimizers


def trained() -> tuple[nn.Linear, torch.optim.Optimizer]:
    model = nn.Linear(2, 1)
    model(torch.ones(1, 2)).sum().backward()
    return model, torch.optim.Adam(model.parameters())


def test_a_step_is_refused_while_a_call_runs_and_changes_nothing() -> None:
    model, optimizer = trained()
    before = model.weight.detach().clone()
    call = Call()
    optimizer.step()
    stepped = model.weight.detach().clone()
    assert not torch.equal(before, stepped)
    enter_call(call)
    try:
        with pytest.raises(Refusal, match="Adam"):
            optimizer.step()
        assert torch.equal(model.weight, stepped)
    finally:
        leave_call(call)
    leave_call(call)
    optimizer.step()
    assert not torch.equal(model.weight, stepped)


def test_a_step_on_another_thread_is_seen_too_as_a_backward_on_a_gpu_has_its_own() -> None:
    _, optimizer = trained()
    call, errors = Call(), []

    def work() -> None:
        try:
            optimizer.step()
        except Refusal as error:
            errors.append(error)

    enter_call(call)
    try:
        in_a_thread(work)
    finally:
        leave_call(call)
    assert len(errors) == 1


def test_every_call_that_runs_is_asked_not_the_outermost_alone() -> None:
    _, optimizer = trained()
    asked: list[int] = []

    class Asked(Call):
        def check_step(self, optimizer: torch.optim.Optimizer) -> None:
            asked.append(id(self))

    outer, inner = Asked(), Asked()
    enter_call(outer)
    enter_call(inner)
    assert running_call() is outer
    optimizer.step()
    leave_call(inner)
    optimizer.step()
    leave_call(outer)
    optimizer.step()
    assert asked == [id(outer), id(inner), id(outer)]


def test_a_call_that_has_left_is_not_kept_alive() -> None:
    def use() -> weakref.ref[Call]:
        call = Call()
        enter_call(call)
        leave_call(call)
        return weakref.ref(call)

    gc.disable()
    try:
        assert use()() is None
    finally:
        gc.enable()


# ---------------------------------------------------------------------- gradients


def leaves(count: int) -> list[Tensor]:
    made = [torch.zeros(2, requires_grad=True) for _ in range(count)]
    for leaf in made:
        leaf.grad = torch.ones(2)
    return made


def test_gradients_that_stayed_are_accepted() -> None:
    check_gradients_stayed(leaves(3), lambda leaf: "w")


def test_a_leaf_that_lost_its_gradient_inside_backward_is_named() -> None:
    model = leaves(3)
    model[1].grad = None
    with pytest.raises(OptimizerInBackwardError, match=r"parameter 'head' lost its gradient during backward.*step once after the batch"):
        check_gradients_stayed(model, lambda leaf: "parameter 'head'" if leaf is model[1] else "another")
