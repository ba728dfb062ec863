"""Mistakes inside the step function are caught, named with a way out, and leave the runtime usable."""

import gc
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor, nn

from elastic_mbs import (
    BackwardInsideError,
    ElasticMBS,
    Event,
    GradientsChangedError,
    NestedCallError,
    OptimizerInBackwardError,
    OutOfMemory,
    StepInsideError,
)
from elastic_mbs.engine.misuse import enter_call, running_call
from tests.helpers.steps import FailOn, Pair, cross_entropy, elastic, failing, mlp, off_by, pairs, still_works, through, whole_gradient

pytestmark = pytest.mark.injectable

DOORS = [1, 3]


@pytest.mark.parametrize("thread", [False, True])  # a backward on a GPU has one of its own
@pytest.mark.parametrize("door", DOORS)
def test_an_optimizer_step_inside_the_step_function(model: nn.Module, mbs: ElasticMBS, door: int, thread: bool) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    values = [p.detach().clone() for p in model.parameters()]

    def loss_fn(b: Pair) -> Tensor:
        loss = cross_entropy(model)(b)
        with ThreadPoolExecutor() as pool:
            pool.submit(optimizer.step).result() if thread else optimizer.step()
        return loss

    with pytest.raises(StepInsideError, match=r"SGD.step\(\)"):
        through(door, mbs, loss_fn, pairs())
    assert all(torch.equal(p, v) for p, v in zip(model.parameters(), values, strict=True))
    optimizer.step()


@pytest.mark.no_oom_injection
@pytest.mark.parametrize("on", ["first", "second"])
@pytest.mark.parametrize("then", ["returns", "runs out of memory"])
@pytest.mark.parametrize("door", DOORS)
def test_a_backward_inside_the_step_function(model: nn.Module, mbs: ElasticMBS, door: int, then: str, on: str) -> None:
    fail, calls = FailOn(*[1] * (then == "runs out of memory")), [0]

    def loss_fn(b: Pair) -> Tensor:
        loss = cross_entropy(model)(b)
        calls[0] += 1
        if calls[0] == (1 if on == "first" else 2):
            loss.backward(retain_graph=True)
            fail()
        return loss

    # Once gradients are there, a backward changes them as an edit does.
    error = BackwardInsideError if on == "first" else GradientsChangedError
    with pytest.raises(error, match=r"leave backward(\(\))? to the engine"):
        through(door, mbs, loss_fn, pairs())


def test_a_backward_in_the_block_and_none_by_the_engine(model: nn.Module, mbs: ElasticMBS) -> None:
    with pytest.raises(BackwardInsideError):
        for micro in mbs.micro_batches(pairs()):
            with micro:
                cross_entropy(model)(micro.data).backward()


def test_a_call_that_has_finished_is_neither_running_nor_asked_nor_kept(model: nn.Module) -> None:
    """An interrupt can strike between its end and its leaving."""
    optimizer, call = torch.optim.SGD(model.parameters()), Mock(finished=False, check_step=Mock(side_effect=StepInsideError("inside")))
    enter_call(call)
    assert running_call() is call
    with pytest.raises(StepInsideError, match="inside"):
        optimizer.step()
    call.finished, gone = True, weakref.ref(call)
    assert running_call() is None
    optimizer.step()
    del call
    gc.collect()
    assert gone() is None


EDITS: dict[str, Callable[[nn.Module], object]] = {
    "zero_grad": nn.Module.zero_grad,
    "zeros": lambda model: model.zero_grad(set_to_none=False),
    "clipping": lambda model: nn.utils.clip_grad_norm_(model.parameters(), 1e-4),
}


@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize("door", DOORS)
def test_gradients_edited_in_the_middle(model: nn.Module, mbs: ElasticMBS, door: int, edit: str) -> None:
    def loss_fn(b: Pair) -> Tensor:
        EDITS[edit](model)
        return cross_entropy(model)(b)

    with pytest.raises(GradientsChangedError, match=r"middle of a batch|after the whole batch"):
        through(door, mbs, loss_fn, pairs())


@pytest.mark.parametrize("outer", ["backward", "loop", "eval"])
@pytest.mark.parametrize("inner", ["backward", "eval", "verify", "backward of another"])
def test_a_call_inside_a_call_that_would_undo_what_the_outer_one_remembers(model: nn.Module, inner: str, outer: str) -> None:
    mbs, other, batch, net = elastic(model, micro_batch_size=4), elastic(mlp(seed=5), micro_batch_size=4), pairs(), mlp(seed=6)
    third = elastic(net, micro_batch_size=4)
    calls: dict[str, Callable[[Pair], object]] = {
        "backward": lambda b: mbs.backward(cross_entropy(model), b),
        "eval": lambda b: mbs.eval(model, b[0]),
        "verify": lambda b: mbs.verify(cross_entropy(model), batch),
        "backward of another": lambda b: other.backward(cross_entropy(model), b),
    }

    def loss_fn(b: Pair) -> Tensor:
        third.eval(net, b[0])  # allowed; the outer call is still the one that this thread is inside of
        calls[inner](b)
        raise AssertionError("it is refused")

    with pytest.raises(NestedCallError, match="inside"):
        if outer == "eval":
            mbs.eval(loss_fn, batch)
        else:
            through(1 if outer == "backward" else 3, mbs, loss_fn, batch)
    assert still_works(mbs, model)


@pytest.mark.no_oom_injection
@pytest.mark.parametrize("inner", ["eval", "backward", "step", "eval of another"])
def test_a_call_from_a_sink_in_the_middle_of_a_call_is_refused_and_leaves_it_alone(model: nn.Module, inner: str) -> None:
    # eval from a sink ended the outer call as a loop left early, and its gradients were emptied while it went on
    other, optimizer, batch = mlp(seed=5), torch.optim.SGD(model.parameters(), lr=1.0), pairs()
    judge = elastic(other, micro_batch_size=2)
    calls: dict[str, Callable[[], object]] = {
        "eval": lambda: mbs.eval(model, batch[0]),
        "backward": lambda: judge.backward(cross_entropy(other), batch),
        "step": optimizer.step,
        "eval of another": lambda: judge.eval(other, batch[0]),
    }
    refused = list[Exception]()

    def sink(each: Event) -> None:
        if isinstance(each, OutOfMemory):
            try:
                calls[inner]()
            except (NestedCallError, StepInsideError) as error:
                refused.append(error)

    mbs = elastic(model, micro_batch_size=4, on_event=sink)
    result = mbs.backward(failing(model, FailOn(2)), batch)
    assert result.partition == ((0, 4), (4, 6), (6, 8))
    assert off_by(model, whole_gradient(model, lambda net: cross_entropy(net)(batch))) <= 1e-12
    assert len(refused) == (inner != "eval of another")


@pytest.mark.no_oom_injection
@pytest.mark.parametrize("door", DOORS)
def test_eval_by_another_runtime_inside_a_call_is_allowed_and_recovers_by_itself(model: nn.Module, door: int) -> None:
    teacher, batch = mlp(seed=9), pairs()
    fail = FailOn(2, 5)
    judge = elastic(teacher, micro_batch_size=2)

    def answers(x: Tensor) -> Any:
        fail()
        return teacher(x)

    def loss_fn(b: Pair) -> Tensor:
        return nn.functional.mse_loss(model(b[0]), judge.eval(answers, b[0]))

    mbs = elastic(model, micro_batch_size=4)
    result = through(door, mbs, loss_fn, batch)
    assert fail.count >= 5
    assert result.ooms == 0
    with torch.no_grad():
        wanted = teacher(batch[0])
    assert off_by(model, whole_gradient(model, lambda net: nn.functional.mse_loss(net(batch[0]), wanted))) <= 1e-12
    assert all(p.grad is None for p in teacher.parameters())


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("how", ["optimizer", "by hand"])
@pytest.mark.parametrize("door", DOORS)
def test_an_optimizer_inside_backward(model: nn.Module, mbs: ElasticMBS, door: int, how: str, known: bool) -> None:
    if known:  # the hooks come later than the first clean call
        through(door, mbs, cross_entropy(model), pairs())
        model.zero_grad()

    def hook(parameter: Tensor) -> None:
        if how == "optimizer":
            torch.optim.SGD([parameter], lr=0.1).step()
        parameter.grad = None  # the step by hand is no concern of ours

    handles = [p.register_post_accumulate_grad_hook(hook) for p in model.parameters()]
    with pytest.raises((OptimizerInBackwardError, StepInsideError), match="step"):
        through(door, mbs, cross_entropy(model), pairs())
    for handle in handles:
        handle.remove()
