"""Mistakes in a step or a loop are named with a way out, and leave the runtime usable."""

import gc
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor, nn

from elastic_mbs import ElasticMBS, Event, IncompleteBatchError, LossError, OutOfMemory
from elastic_mbs.batch.transfer import Loader
from elastic_mbs.engine.shared.running import enter_call, running_call
from elastic_mbs.errors import (
    BackwardInsideError,
    GradientsChangedError,
    NestedCallError,
    OptimizerInBackwardError,
    StepInsideError,
)
from tests.helpers.steps import (
    FailOn,
    Pair,
    cross_entropy,
    elastic,
    failing,
    mlp,
    off_by,
    pairs,
    settled,
    still_works,
    through,
    whole_gradient,
)

pytestmark = pytest.mark.injectable


@pytest.mark.parametrize("thread", [False, True])  # a backward on a GPU has its own thread
def test_an_optimizer_step_inside_the_step_function(
    model: nn.Module, mbs: ElasticMBS, door: int, thread: bool
) -> None:
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
def test_a_backward_inside_the_step_function(
    model: nn.Module, mbs: ElasticMBS, door: int, then: str, on: str
) -> None:
    fail, calls = FailOn(*[1] * (then == "runs out of memory")), [0]

    def loss_fn(b: Pair) -> Tensor:
        loss = cross_entropy(model)(b)
        calls[0] += 1
        if calls[0] == (1 if on == "first" else 2):
            loss.backward(retain_graph=True)
            fail()
        return loss

    # Once gradients exist, a backward changes them as an edit does.
    error = BackwardInsideError if on == "first" else GradientsChangedError
    with pytest.raises(error, match=r"leave backward(\(\))? to the engine"):
        through(door, mbs, loss_fn, pairs())


def test_a_backward_in_the_block_and_none_by_the_engine(model: nn.Module, mbs: ElasticMBS) -> None:
    with pytest.raises(BackwardInsideError):
        for micro in mbs.micro_batches(pairs()):
            with micro:
                cross_entropy(model)(micro.data).backward()


def test_a_finished_call_is_not_running_not_asked_and_not_kept(model: nn.Module) -> None:
    """An interrupt can strike after a call has finished and before it has left the thread."""
    optimizer, call = torch.optim.SGD(model.parameters()), Mock(finished=False, inside=True)
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
def test_gradients_edited_in_the_middle(
    model: nn.Module, mbs: ElasticMBS, door: int, edit: str
) -> None:
    def loss_fn(b: Pair) -> Tensor:
        EDITS[edit](model)
        return cross_entropy(model)(b)

    with pytest.raises(GradientsChangedError, match=r"middle of a batch|after the whole batch"):
        through(door, mbs, loss_fn, pairs())


PARTLY: dict[str, Callable[[Any], object]] = {
    "edited": lambda model: model[0].bias.grad.mul_(2),
    "cleared": lambda model: model[0].bias.grad.zero_(),
    "dropped": lambda model: setattr(model[0].bias, "grad", None),
    "replaced": lambda model: setattr(model[0].bias, "grad", model[0].bias.grad.clone()),
    "added to": lambda model: model[0].bias.sum().backward(),
}


@pytest.mark.no_oom_injection
@pytest.mark.parametrize("then", ["returns", "runs out of memory"])
@pytest.mark.parametrize("piece", [2, 3])
@pytest.mark.parametrize("change", PARTLY)
def test_a_step_that_one_day_changes_some_gradients_in_the_middle(
    model: nn.Module, door: int, change: str, piece: int, then: str
) -> None:
    """A change is noticed also after two clean calls of the same step."""
    day, fail = [0], FailOn(*[1] * (then == "runs out of memory"))

    def loss_fn(b: Pair) -> Tensor:
        loss = cross_entropy(model)(b)
        day[0] += 1
        if day[0] == 6 + piece:
            PARTLY[change](model)
            fail()
        return loss

    mbs = settled(door, model, loss_fn, pairs())
    with pytest.raises(GradientsChangedError, match="middle of a batch"):
        through(door, mbs, loss_fn, pairs())
    assert all(p.grad is None for p in model.parameters())
    assert still_works(mbs, model)


@pytest.mark.no_oom_injection
@pytest.mark.parametrize("then", ["goes on", "cannot load the next piece"])
@pytest.mark.parametrize("piece", [0, 1, 2])
# the other leaf: no backward reaches it
@pytest.mark.parametrize("other", ["with a gradient", "without", "with a gradient, hooked"])
@pytest.mark.parametrize("change", [*PARTLY, "of the other"])
def test_a_loop_that_one_day_changes_some_gradients_after_a_backward(
    model: Any, change: str, other: str, piece: int, then: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model.register_parameter("other", nn.Parameter(torch.ones(3)))
    if other == "with a gradient, hooked":
        model[2].weight.register_hook(lambda grad: grad * 1.0)
    mbs = settled(3, model, cross_entropy(model), pairs())
    model.other.grad = None if other == "without" else torch.ones(3)

    def meddle(model: Any) -> None:
        if change in PARTLY:
            PARTLY[change](model)
        elif other == "without":
            model[2].bias.grad.mul_(2)
        else:  # the user's gradient is set aside while the piece runs
            model.other.grad = torch.ones(3)

    with (
        pytest.raises((GradientsChangedError, BackwardInsideError)),
        monkeypatch.context() as patch,
    ):
        for index, micro in enumerate(mbs.micro_batches(pairs())):
            with micro:
                micro.backward(cross_entropy(model)(micro.data))
                if index == piece:
                    meddle(model)
            if index == piece and then != "goes on":
                patch.setattr(
                    Loader,
                    "load",
                    Mock(
                        side_effect=torch.OutOfMemoryError(
                            "CUDA out of memory. Tried to allocate 1.00 MiB"
                        )
                    ),
                )
    assert still_works(mbs, model)


@pytest.mark.parametrize("outer", ["backward", "loop", "evaluate"])
@pytest.mark.parametrize("inner", ["backward", "evaluate", "verify", "backward of another"])
def test_a_call_inside_a_call_is_refused(model: nn.Module, inner: str, outer: str) -> None:
    mbs, other, batch, net = (
        elastic(model, micro_batch_size=4),
        elastic(mlp(seed=5), micro_batch_size=4),
        pairs(),
        mlp(seed=6),
    )
    third = elastic(net, micro_batch_size=4)
    calls: dict[str, Callable[[Pair], object]] = {
        "backward": lambda b: mbs.backward(cross_entropy(model), b),
        "evaluate": lambda b: mbs.evaluate(model, b[0]),
        "verify": lambda b: mbs.verify(cross_entropy(model), batch),
        "backward of another": lambda b: other.backward(cross_entropy(model), b),
    }

    def loss_fn(b: Pair) -> Tensor:
        # This call is allowed, and leaves the outer one as the call of this thread.
        third.evaluate(net, b[0])
        calls[inner](b)
        raise AssertionError("it is refused")

    with pytest.raises(NestedCallError, match="inside"):
        if outer == "evaluate":
            mbs.evaluate(loss_fn, batch)
        else:
            through(1 if outer == "backward" else 3, mbs, loss_fn, batch)
    assert still_works(mbs, model)


@pytest.mark.no_oom_injection
@pytest.mark.parametrize("inner", ["evaluate", "backward", "step", "evaluate of another"])
def test_a_call_from_a_sink_inside_a_call_is_refused(model: nn.Module, inner: str) -> None:
    # An evaluation from a sink must not end the outer call as if its loop had been left early.
    other, optimizer, batch = mlp(seed=5), torch.optim.SGD(model.parameters(), lr=1.0), pairs()
    judge = elastic(other, micro_batch_size=2)
    calls: dict[str, Callable[[], object]] = {
        "evaluate": lambda: mbs.evaluate(model, batch[0]),
        "backward": lambda: judge.backward(cross_entropy(other), batch),
        "step": optimizer.step,
        "evaluate of another": lambda: judge.evaluate(other, batch[0]),
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
    assert len(refused) == (inner != "evaluate of another")


@pytest.mark.no_oom_injection
def test_evaluation_by_another_runtime_inside_a_call_is_allowed(
    model: nn.Module, door: int
) -> None:
    teacher, batch = mlp(seed=9), pairs()
    fail = FailOn(2, 5)
    judge = elastic(teacher, micro_batch_size=2)

    def answers(x: Tensor) -> Any:
        fail()
        return teacher(x)

    def loss_fn(b: Pair) -> Tensor:
        return nn.functional.mse_loss(model(b[0]), judge.evaluate(answers, b[0]))

    mbs = elastic(model, micro_batch_size=4)
    result = through(door, mbs, loss_fn, batch)
    assert fail.count >= 5
    assert result.ooms == 0
    with torch.no_grad():
        wanted = teacher(batch[0])
    assert (
        off_by(
            model, whole_gradient(model, lambda net: nn.functional.mse_loss(net(batch[0]), wanted))
        )
        <= 1e-12
    )
    assert all(p.grad is None for p in teacher.parameters())


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("how", ["optimizer", "by hand"])
def test_an_optimizer_inside_backward(
    model: nn.Module, mbs: ElasticMBS, door: int, how: str, known: bool
) -> None:
    if known:  # the hooks come after a clean call
        through(door, mbs, cross_entropy(model), pairs())
        model.zero_grad()

    def hook(parameter: Tensor) -> None:
        if how == "optimizer":
            torch.optim.SGD([parameter], lr=0.1).step()
        parameter.grad = None  # a step by hand is seen by its cleared gradient

    handles = [p.register_post_accumulate_grad_hook(hook) for p in model.parameters()]
    with pytest.raises((OptimizerInBackwardError, StepInsideError), match="step"):
        through(door, mbs, cross_entropy(model), pairs())
    for handle in handles:
        handle.remove()


# ---------------------------------------------------------------------- the blocks of a loop


def _leave_early(mbs: ElasticMBS, model: nn.Module, how: str) -> None:
    for i, micro in enumerate(mbs.micro_batches(pairs())):
        if how == "before the block" and i == 1:
            break
        with micro:
            micro.backward(cross_entropy(model)(micro.data))
        if how == "after the block":
            break


LEFT = ["after the block", "before the block"]


@pytest.mark.no_oom_injection
@pytest.mark.parametrize(
    "by",
    [
        "the next call",
        "the optimizer",
        "the end of the with block",
        "another runtime",
        "another, itself dropped",
    ],
)
@pytest.mark.parametrize("how", LEFT)
def test_a_loop_left_early_is_named_once_by_the_next_use(
    model: nn.Module, how: str, by: str
) -> None:
    mbs, optimizer, net = (
        elastic(model, micro_batch_size=4),
        torch.optim.SGD(model.parameters(), lr=1.0),
        mlp(seed=5),
    )
    other = elastic(net, micro_batch_size=4)
    _leave_early(mbs, model, how)
    if by == "another, itself dropped":
        del mbs
        gc.collect()
    with pytest.raises(IncompleteBatchError, match="4:8"):
        if by == "the next call":
            mbs.backward(cross_entropy(model), pairs())
        elif by == "the optimizer":
            optimizer.step()
        elif by == "the end of the with block":
            mbs.__exit__(None, None, None)
        else:
            other.backward(cross_entropy(net), pairs())
    assert all(p.grad is None for p in model.parameters())
    assert still_works(other, net)
    optimizer.step()


def test_a_loop_left_early_does_not_hide_the_error_of_the_with_block(
    model: nn.Module, mbs: ElasticMBS
) -> None:
    with pytest.raises(ValueError, match="mine"), mbs:
        _leave_early(mbs, model, "after the block")
        raise ValueError("mine")


def test_a_micro_batch_that_is_not_entered(model: nn.Module, mbs: ElasticMBS) -> None:
    with pytest.raises(IncompleteBatchError, match="with micro:"):
        for micro in mbs.micro_batches(pairs()):
            cross_entropy(model)(micro.data)


@pytest.mark.parametrize("when", ["again", "later", "inside itself"])
def test_a_micro_batch_that_is_entered_twice(model: nn.Module, mbs: ElasticMBS, when: str) -> None:
    kept = None
    with pytest.raises(IncompleteBatchError, match="once"):
        for micro in mbs.micro_batches(pairs()):
            if when == "later" and kept is not None:
                with kept:
                    pass
            with micro:
                if when == "inside itself":
                    with micro:
                        pass
                micro.backward(cross_entropy(model)(micro.data))
            kept = micro
            if when == "again":
                with micro:
                    pass
    mbs.close()


def test_a_block_without_backward(model: nn.Module, mbs: ElasticMBS) -> None:
    with pytest.raises(LossError, match=r"without micro.backward"):
        for micro in mbs.micro_batches(pairs()):
            with micro:
                cross_entropy(model)(micro.data)


@pytest.mark.parametrize("where", ["twice", "outside", "of an older one"])
def test_backward_not_once_and_not_inside_its_block(
    model: nn.Module, mbs: ElasticMBS, where: str
) -> None:
    older = None
    with pytest.raises(LossError, match="inside its own"):
        for micro in mbs.micro_batches(pairs()):
            if where == "outside":
                micro.backward(cross_entropy(model)(micro.data))
            with micro:
                loss = cross_entropy(model)(micro.data)
                (older or micro).backward(loss)
                if where == "twice":
                    micro.backward(cross_entropy(model)(micro.data))
            older = micro if where == "of an older one" else None
    mbs.close()


def test_the_loss_of_a_failed_attempt_handed_to_the_next(model: nn.Module) -> None:
    mbs, losses, fail = elastic(model, micro_batch_size=8), list[Tensor](), FailOn(1)
    with pytest.raises(RuntimeError, match="ran out of memory, and its saved tensors are gone"):
        for micro in mbs.micro_batches(pairs()):
            with micro:
                losses.append(cross_entropy(model)(micro.data))
                fail()
                micro.backward(losses[0])
    assert all(p.grad is None for p in model.parameters())
    assert still_works(mbs, model)
