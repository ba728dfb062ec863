"""Mistakes are caught, named with a way out, and leave the runtime usable."""

from __future__ import annotations

import gc
from collections import UserDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence

from elastic_mbs import (
    BackwardInsideError,
    BatchError,
    CountError,
    ElasticMBS,
    ElasticMBSError,
    GradientsChangedError,
    IncompleteBatchError,
    LossError,
    MisuseError,
    NestedCallError,
    OptimizerInBackwardError,
    StepInsideError,
    UnsupportedError,
    UsageError,
    elastic_step,
)
from elastic_mbs.guards import leave_call, running_call
from elastic_mbs.testing import InjectOOM
from tests.helpers.steps import FailOn, Pair, cross_entropy, elastic, loop, mlp, off_by, pairs, still_works, through, whole_gradient

DOORS = [1, 3]


@pytest.fixture
def model() -> nn.Sequential:
    return mlp()


@pytest.fixture(autouse=True)
def nothing_left_open() -> Iterator[None]:
    """A call that one test leaves open must not be met by the next."""
    yield

    call = running_call()
    if call is not None:
        call.abort(RuntimeError("left open by a test"))
        leave_call(call)


# ---------------------------------------------------------------------- inside the step function


@pytest.mark.parametrize("door", DOORS)
def test_an_optimizer_step_inside_the_step_function(model: nn.Module, door: int) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    values = [p.detach().clone() for p in model.parameters()]

    def loss_fn(b: Pair) -> Tensor:
        loss: Tensor = cross_entropy(model)(b)
        optimizer.step()
        return loss

    mbs = elastic(model, micro_batch_size=4)
    with pytest.raises(StepInsideError, match=r"SGD.step\(\)"):
        through(door, mbs, loss_fn, pairs())
    assert all(torch.equal(p, v) for p, v in zip(model.parameters(), values, strict=True))
    assert all(p.grad is None for p in model.parameters())
    assert still_works(mbs, model)
    optimizer.step()


@pytest.mark.no_oom_injection
@pytest.mark.parametrize("on", ["first", "second"])
@pytest.mark.parametrize("then", ["returns", "runs out of memory"])
@pytest.mark.parametrize("door", DOORS)
def test_a_backward_inside_the_step_function(model: nn.Module, door: int, then: str, on: str) -> None:
    calls = [0]

    def loss_fn(b: Pair) -> Tensor:
        loss: Tensor = cross_entropy(model)(b)
        calls[0] += 1
        if calls[0] == (1 if on == "first" else 2):
            loss.backward(retain_graph=True)
            if then == "runs out of memory":
                raise torch.OutOfMemoryError("CUDA out of memory.")
        return loss

    mbs = elastic(model, micro_batch_size=4)
    with pytest.raises(BackwardInsideError, match="leave backward to the engine"):
        through(door, mbs, loss_fn, pairs())
    assert all(p.grad is None for p in model.parameters())
    assert still_works(mbs, model)


def test_a_backward_in_the_block_and_none_by_the_engine(model: nn.Module) -> None:
    mbs = elastic(model, micro_batch_size=4)
    with pytest.raises(BackwardInsideError):
        for micro in mbs.micro_batches(pairs()):
            with micro:
                cross_entropy(model)(micro.data).backward()
    assert all(p.grad is None for p in model.parameters())
    assert still_works(mbs, model)


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("door", DOORS)
def test_zero_grad_in_the_middle(model: nn.Module, door: int, set_to_none: bool) -> None:
    def loss_fn(b: Pair) -> Tensor:
        model.zero_grad(set_to_none=set_to_none)
        loss: Tensor = cross_entropy(model)(b)
        return loss

    mbs = elastic(model, micro_batch_size=4)
    with pytest.raises(GradientsChangedError, match="after the whole batch"):
        through(door, mbs, loss_fn, pairs())
    assert still_works(mbs, model)


def test_clipping_between_two_pieces(model: nn.Module) -> None:
    mbs = elastic(model, micro_batch_size=4)
    with pytest.raises(GradientsChangedError):
        for micro in mbs.micro_batches(pairs()):
            with micro:
                micro.backward(cross_entropy(model)(micro.data))
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-4)
    assert still_works(mbs, model)


@pytest.mark.parametrize("outer", ["backward", "loop", "eval"])
@pytest.mark.parametrize("own", [True, False])
def test_training_inside_a_call(model: nn.Module, own: bool, outer: str) -> None:
    mbs = elastic(model, micro_batch_size=4)
    other = mbs if own else elastic(mlp(seed=5), micro_batch_size=4)

    def loss_fn(b: Pair) -> Tensor:
        other.backward(cross_entropy(model), b)
        raise AssertionError("it is refused")

    with pytest.raises(NestedCallError, match="inside"):
        if outer == "eval":
            mbs.eval(loss_fn, pairs())
        else:
            through(1 if outer == "backward" else 3, mbs, loss_fn, pairs())
    assert still_works(mbs, model)


def test_eval_by_the_same_runtime_inside_a_call_is_refused(model: nn.Module) -> None:
    mbs = elastic(model, micro_batch_size=4)
    with pytest.raises(NestedCallError):
        mbs.backward(lambda b: mbs.eval(model, b[0]).sum(), pairs())
    assert still_works(mbs, model)


@pytest.mark.no_oom_injection
@pytest.mark.parametrize("door", DOORS)
def test_eval_by_another_runtime_inside_a_call_is_allowed_and_recovers_by_itself(model: nn.Module, door: int) -> None:
    teacher, batch = mlp(seed=9), pairs()
    fail = FailOn(2, 5)
    judge = elastic(teacher, micro_batch_size=2)

    def answers(x: Tensor) -> Tensor:
        fail()
        out: Tensor = teacher(x)
        return out

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


def test_verify_inside_a_call_is_refused_because_it_would_undo_what_the_call_remembers(model: nn.Module) -> None:
    batch = pairs()
    mbs = elastic(model, micro_batch_size=4)

    def loss_fn(b: Pair) -> Tensor:
        mbs.verify(cross_entropy(model), batch)
        loss: Tensor = cross_entropy(model)(b)
        return loss

    with pytest.raises(NestedCallError):
        mbs.backward(loss_fn, batch)
    assert still_works(mbs, model)


def _step_in_backward(model: nn.Module, how: str) -> Callable[[], None]:
    optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}

    def hook(parameter: Tensor) -> None:
        if how == "optimizer":
            optimizers[parameter].step()  # type: ignore[index]  # the hook is given the parameter
        else:
            assert parameter.grad is not None
            with torch.no_grad():
                parameter -= 0.1 * parameter.grad
        parameter.grad = None

    handles = [p.register_post_accumulate_grad_hook(hook) for p in model.parameters()]

    def remove() -> None:
        for handle in handles:
            handle.remove()

    return remove


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("how", ["optimizer", "by hand"])
@pytest.mark.parametrize("door", DOORS)
def test_an_optimizer_inside_backward(model: nn.Module, door: int, how: str, known: bool) -> None:
    mbs = elastic(model, micro_batch_size=4)
    if known:  # the hooks come later than the first clean call
        through(door, mbs, cross_entropy(model), pairs())
        model.zero_grad()
    remove = _step_in_backward(model, how)
    with pytest.raises((OptimizerInBackwardError, StepInsideError), match="step"):
        through(door, mbs, cross_entropy(model), pairs())
    remove()
    assert still_works(mbs, model)


# ---------------------------------------------------------------------- the loop of door 3


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
@pytest.mark.parametrize("how", LEFT)
def test_a_loop_left_early_is_named_by_the_next_call(model: nn.Module, how: str) -> None:
    mbs = elastic(model, micro_batch_size=4)
    _leave_early(mbs, model, how)
    with pytest.raises(IncompleteBatchError, match="4:8"):
        mbs.backward(cross_entropy(model), pairs())
    assert all(p.grad is None for p in model.parameters())
    assert still_works(mbs, model)


@pytest.mark.parametrize("how", LEFT)
def test_a_loop_left_early_is_named_by_the_optimizer(model: nn.Module, how: str) -> None:
    mbs, optimizer = elastic(model, micro_batch_size=4), torch.optim.SGD(model.parameters(), lr=1.0)
    _leave_early(mbs, model, how)
    with pytest.raises(IncompleteBatchError, match="4:8"):
        optimizer.step()
    assert all(p.grad is None for p in model.parameters())
    assert still_works(mbs, model)
    optimizer.step()


@pytest.mark.no_oom_injection
@pytest.mark.parametrize("how", LEFT)
def test_a_loop_left_early_is_named_by_the_end_of_the_with_block(model: nn.Module, how: str) -> None:
    mbs = elastic(model, micro_batch_size=4)
    with pytest.raises(IncompleteBatchError, match="4:8"), mbs:
        _leave_early(mbs, model, how)
    assert all(p.grad is None for p in model.parameters())
    assert still_works(mbs, model)


@pytest.mark.parametrize("dropped", [False, True])
@pytest.mark.parametrize("how", LEFT)
def test_a_loop_left_early_is_named_once_by_another_runtime(model: nn.Module, how: str, dropped: bool) -> None:
    mbs, other = elastic(model, micro_batch_size=4), mlp(seed=5)
    second = elastic(other, micro_batch_size=4)
    _leave_early(mbs, model, how)
    if dropped:
        del mbs
        gc.collect()
    with pytest.raises(IncompleteBatchError):
        second.backward(cross_entropy(other), pairs())
    assert all(p.grad is None for p in model.parameters())
    assert still_works(second, other)


def test_the_with_block_ends_with_its_own_error_even_if_a_loop_was_left_early(model: nn.Module) -> None:
    mbs = elastic(model, micro_batch_size=4)
    with pytest.raises(ValueError, match="mine"), mbs:
        _leave_early(mbs, model, "after the block")
        raise ValueError("mine")
    assert all(p.grad is None for p in model.parameters())
    assert still_works(mbs, model)


def test_a_micro_batch_that_is_not_entered(model: nn.Module) -> None:
    mbs = elastic(model, micro_batch_size=4)
    with pytest.raises(IncompleteBatchError, match="with micro:"):
        for micro in mbs.micro_batches(pairs()):
            cross_entropy(model)(micro.data)
    assert still_works(mbs, model)


@pytest.mark.parametrize("when", ["again", "later", "inside itself"])
def test_a_micro_batch_that_is_entered_twice(model: nn.Module, when: str) -> None:
    mbs = elastic(model, micro_batch_size=4)
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
    assert all(p.grad is None for p in model.parameters())
    assert still_works(mbs, model)


def test_a_block_without_backward(model: nn.Module) -> None:
    mbs = elastic(model, micro_batch_size=4)
    with pytest.raises(LossError, match=r"without micro.backward"):
        for micro in mbs.micro_batches(pairs()):
            with micro:
                cross_entropy(model)(micro.data)
    assert still_works(mbs, model)


@pytest.mark.parametrize("where", ["twice", "outside", "of an older one"])
def test_backward_not_once_and_not_inside_its_block(model: nn.Module, where: str) -> None:
    mbs = elastic(model, micro_batch_size=4)
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
    assert all(p.grad is None for p in model.parameters())
    assert still_works(mbs, model)


def test_the_loss_of_a_failed_attempt_handed_to_the_next(model: nn.Module) -> None:
    mbs = elastic(model, micro_batch_size=8)
    losses: list[Tensor] = []
    fail = FailOn(1)
    with pytest.raises(RuntimeError, match="ran out of memory, and its saved tensors are gone"):
        for micro in mbs.micro_batches(pairs()):
            with micro:
                losses.append(cross_entropy(model)(micro.data))
                fail()
                micro.backward(losses[0])
    assert all(p.grad is None for p in model.parameters())
    assert still_works(mbs, model)


# ---------------------------------------------------------------------- losses


LOSSES: list[tuple[str, Callable[[nn.Module, Pair], Any], str]] = [
    ("none", lambda m, b: None, "None"),
    ("a vector", lambda m, b: nn.functional.cross_entropy(m(b[0]), b[1], reduction="none"), r"shape \(4,\)"),
    ("no graph", lambda m, b: cross_entropy(m)(b).detach(), "no graph"),
    ("a number", lambda m, b: cross_entropy(m)(b).item(), "float"),
    ("integers", lambda m, b: torch.tensor(3), "dtype|int64"),
    ("complex", lambda m, b: cross_entropy(m)(b).to(torch.complex128), "complex"),
    ("a dict without it", lambda m, b: {"cost": cross_entropy(m)(b)}, "without 'loss'"),
    ("a dict with None", lambda m, b: {"loss": None}, "NoneType"),
    ("an empty tuple", lambda m, b: (), "tuple"),
    ("a text", lambda m, b: "loss", "str"),
    ("a nested tuple", lambda m, b: ((cross_entropy(m)(b),),), "tuple"),
]


@pytest.mark.no_oom_injection
@pytest.mark.parametrize(("kind", "make", "says"), LOSSES, ids=[case[0] for case in LOSSES])
@pytest.mark.parametrize("door", DOORS)
def test_what_is_no_loss(model: nn.Module, door: int, kind: str, make: Callable[[nn.Module, Pair], Any], says: str) -> None:
    mbs = elastic(model, micro_batch_size=4)
    with pytest.raises(LossError, match=says):
        through(door, mbs, lambda b: make(model, b), pairs())
    assert still_works(mbs, model)


@pytest.mark.parametrize(
    ("losses", "says"),
    [
        (lambda m, b: cross_entropy(m)(b), "dict of losses"),
        (lambda m, b: {"a": cross_entropy(m)(b)}, r"missing \['b'\]"),
        (lambda m, b: {"a": cross_entropy(m)(b), "b": cross_entropy(m)(b), "c": cross_entropy(m)(b)}, r"without a count \['c'\]"),
    ],
)
def test_losses_that_do_not_fit_the_names_of_the_counts(model: nn.Module, losses: Callable[[nn.Module, Pair], Any], says: str) -> None:
    mbs = elastic(model, micro_batch_size=4, count={"a": None, "b": None})
    with pytest.raises(LossError, match=says):
        mbs.backward(lambda b: losses(model, b), pairs())
    mbs.close()
    assert still_works(elastic(model), model)


def test_a_model_without_anything_to_train(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    mbs = elastic(model, micro_batch_size=4)
    with pytest.raises(LossError, match="frozen"):
        mbs.backward(cross_entropy(model), pairs())
    for parameter in model.parameters():
        parameter.requires_grad_(True)
    assert still_works(mbs, model)


# ---------------------------------------------------------------------- settings


BAD: list[tuple[dict[str, Any], str]] = [
    ({"micro_batch_size": 0}, "micro_batch_size=0"),
    ({"micro_batch_size": -3}, "micro_batch_size=-3"),
    ({"micro_batch_size": "big"}, "'big'"),
    ({"micro_batch_size": 2.5}, "2.5"),
    ({"micro_batch_size": True}, "True"),
    ({"micro_batch_size": None}, "None"),
    ({"min_micro_batch_size": 0}, "min_micro_batch_size=0"),
    ({"min_micro_batch_size": 1.5}, "1.5"),
    ({"max_micro_batch_size": 0}, "max_micro_batch_size=0"),
    ({"min_micro_batch_size": 8, "max_micro_batch_size": 4}, "max_micro_batch_size=4"),
    ({"max_micro_batch_size": "8"}, "'8'"),
    ({"micro_batch_size": 2, "min_micro_batch_size": 4}, "micro_batch_size=2"),
    ({"micro_batch_size": 9, "max_micro_batch_size": 4}, "micro_batch_size=9"),
    ({"align": 0}, "align=0"),
    ({"align": "8"}, "'8'"),
    ({"align": 8, "max_micro_batch_size": 4}, "align=8"),
    ({"reduction": "none"}, "'none'"),
    ({"replay": "never"}, "'never'"),
    ({"accumulate_dtype": torch.float16}, "float16"),
    ({"accumulate_dtype": "float32"}, "float32"),
    ({"outputs": "gpu"}, "'gpu'"),
    ({"scaler": torch.amp.GradScaler("cpu"), "backward": lambda loss: None}, "scaler"),
    ({"wait_for_memory": -1.0}, "wait_for_memory=-1.0"),
    ({"wait_for_memory": float("nan")}, "nan"),
    ({"monitor_interval": -1.0}, "-1.0"),
    ({"monitor_interval": float("inf")}, "inf"),
    ({"count": 3}, "count=3"),
    ({"count": "labels"}, "'labels'"),
    ({"device": "nowhere"}, "'nowhere'"),
    ({"device": 3.5}, "3.5"),
    ({"generators": [3]}, "int"),
    ({"generators": ["state"]}, "str"),
]


@pytest.mark.parametrize(("options", "says"), BAD, ids=[f"{i}, {', '.join(case[0])}" for i, case in enumerate(BAD)])
def test_a_setting_that_makes_no_sense_is_refused_by_value(model: nn.Module, options: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError, match=says) as caught:
        ElasticMBS(model, **options)
    assert isinstance(caught.value, ValueError)
    assert not [hook for p in model.parameters() for hook in (p._post_accumulate_grad_hooks or {}).values()], "a refused runtime leaves no hooks"


NOT_CALLABLE: list[tuple[str, Any]] = [
    ("is_oom", "CUDA"),
    ("on_fatal", 3),
    ("backward", "loss"),
    ("on_event", 3),
    ("on_event", [print, 3]),
    ("scaler", 2.0),
    ("wait_for_memory", "30"),
    ("wait_for_memory", float("inf")),
    ("sensor", "nvml"),
    ("policy", {"patience": 3}),
    ("generators", 7),
    ("monitor_interval", "1"),
]


@pytest.mark.parametrize(("key", "value"), NOT_CALLABLE, ids=[f"{i}, {key}" for i, (key, _) in enumerate(NOT_CALLABLE)])
def test_a_setting_of_the_wrong_type_is_refused_when_it_is_given_and_not_when_memory_runs_out(model: nn.Module, key: str, value: Any) -> None:
    with pytest.raises(UsageError, match=key):
        ElasticMBS(model, **{key: value})


@pytest.mark.parametrize(("bad", "says"), [(None, "NoneType"), ([], "empty"), ("model", "str"), ([3], "int"), (lambda self: self, "function")])
def test_what_is_no_model(bad: Any, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        ElasticMBS(bad)


def test_a_class_in_place_of_a_model_for_the_decorator() -> None:
    with pytest.raises(UsageError, match="class"):
        elastic_step(nn.Linear)  # type: ignore[arg-type]  # the mistake


def test_data_parallel_wrappers_are_refused_by_name(model: nn.Module) -> None:
    with pytest.raises(UnsupportedError, match="DataParallel"):
        ElasticMBS(nn.DataParallel(model))
    with pytest.raises(UnsupportedError, match="DataParallel"):
        ElasticMBS([mlp(), nn.Sequential(nn.DataParallel(model))])
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]  # HashStore
    try:
        with pytest.raises(UnsupportedError, match="DistributedDataParallel"):
            ElasticMBS(nn.parallel.DistributedDataParallel(model))
    finally:
        torch.distributed.destroy_process_group()


# ---------------------------------------------------------------------- batches and counts


@dataclass
class _Opaque:
    value: int


class _Foreign:
    pass


BATCHES: list[tuple[str, Callable[[], Any], str]] = [
    ("empty", lambda: (torch.zeros(0, 6), torch.zeros(0)), "empty"),
    ("disagreeing", lambda: {"x": torch.zeros(8, 6), "y": torch.zeros(7)}, r"x.*\n?.*8.*\n?.*y.*7"),
    ("packed", lambda: pack_padded_sequence(torch.zeros(3, 4, 2), torch.tensor([3, 2, 1]), batch_first=True), "PackedSequence"),
    ("unknown", _Foreign, "_Foreign"),
    ("unknown, nested", lambda: {"x": torch.zeros(8, 6), "meta": _Foreign()}, "_Foreign"),
    ("nothing to cut", lambda: {"n": 3}, "cut|tensor"),
    ("none", lambda: None, "None"),
    ("a number", lambda: 3, "int|cut"),
    ("a scalar tensor", lambda: torch.tensor(3.0), "cut|0-d|dimension"),
    ("a set", lambda: {1, 2, 3}, "set"),
    ("a generator", lambda: (i for i in range(8)), "generator"),
    ("an empty dict", dict, "cut|empty"),
    ("a user dict that disagrees", lambda: UserDict(x=torch.zeros(8, 6), y=torch.zeros(7)), "7"),
]


@pytest.mark.parametrize(("kind", "make", "says"), BATCHES, ids=[case[0] for case in BATCHES])
@pytest.mark.parametrize("door", [1, 3, "eval"])
def test_a_batch_that_cannot_be_cut(model: nn.Module, door: int | str, kind: str, make: Callable[[], Any], says: str) -> None:
    mbs = elastic(model, micro_batch_size=4)
    with pytest.raises(BatchError, match=says):
        if door == "eval":
            mbs.eval(lambda b: b, make())
        else:
            through(int(door), mbs, cross_entropy(model), make())
    assert still_works(mbs, model)


COUNTS: list[tuple[str, Callable[[Pair], Any], str]] = [
    ("negative", lambda b: torch.tensor([1, 2, -1, 1, 1, 1, 1, 1]), "-1"),
    ("nan", lambda b: torch.tensor([1.0, float("nan"), 1, 1, 1, 1, 1, 1]), "nan"),
    ("infinite", lambda b: [float("inf")] * 8, "inf"),
    ("all zero", lambda b: torch.zeros(8), "zero"),
    ("of another length", lambda b: torch.ones(7), "7 counts for a batch of 8"),
    ("a total", lambda b: torch.tensor(8), "single number"),
    ("a matrix", lambda b: torch.ones(8, 2), r"\(8, 2\)"),
    ("words", lambda b: ["one"] * 8, "one"),
    ("nothing", lambda b: None, "None"),
    ("a dict", lambda b: {"a": torch.ones(8)}, "dict of functions"),
]


@pytest.mark.parametrize(("kind", "count", "says"), COUNTS, ids=[case[0] for case in COUNTS])
@pytest.mark.parametrize("door", DOORS)
def test_counts_that_make_no_sense(model: nn.Module, door: int, kind: str, count: Callable[[Pair], Any], says: str) -> None:
    wrong = [True]
    mbs = elastic(model, micro_batch_size=4, count=lambda b: count(b) if wrong[0] else torch.ones(8))
    with pytest.raises(CountError, match=says):
        through(door, mbs, cross_entropy(model), pairs())
    wrong[0] = False
    assert still_works(mbs, model)


def test_total_outside_of_a_call(model: nn.Module) -> None:
    mbs = elastic(model, micro_batch_size=4)
    with pytest.raises(UsageError, match="inside loss_fn"):
        _ = mbs.total
    mbs.backward(cross_entropy(model), pairs())
    with pytest.raises(UsageError, match="inside loss_fn"):
        _ = mbs.total


def test_verify_of_too_few_samples(model: nn.Module) -> None:
    mbs = elastic(model)
    with pytest.raises(UsageError, match="at least 2"):
        mbs.verify(cross_entropy(model), pairs(1))
    assert still_works(mbs, model)


@pytest.mark.no_oom_injection
@pytest.mark.parametrize(
    "state",
    [{}, {"version": 2, "controller": {}}, {"version": 1}, {"version": 1, "controller": 3}, None, [], {"version": 1, "controller": {"tracks": 5}}],
)
def test_a_state_that_is_none_changes_nothing(model: nn.Module, state: Any) -> None:
    mbs = elastic(model, micro_batch_size=4)
    mbs.backward(cross_entropy(model), pairs())
    before = mbs.state_dict()
    with pytest.raises(UsageError):
        mbs.load_state_dict(state)
    assert mbs.state_dict() == before
    assert still_works(mbs, model)


def test_after_any_of_these_mistakes_failures_are_recovered_as_before(model: nn.Module) -> None:
    batch, mbs = pairs(), elastic(model, micro_batch_size=4)
    mistakes: list[Callable[[], object]] = [
        lambda: mbs.backward(lambda b: None, batch),
        lambda: mbs.backward(lambda b: cross_entropy(model)(b).backward(), batch),
        lambda: mbs.backward(lambda b: mbs.backward(cross_entropy(model), b), batch),
        lambda: mbs.backward(cross_entropy(model), (batch[0], batch[1][:3])),
    ]
    wanted = whole_gradient(model, lambda net: cross_entropy(net)(batch))
    for n in range(2, 30, 3):
        for mistake in mistakes:
            with pytest.raises(ElasticMBSError):
                mistake()
        model.zero_grad()
        with InjectOOM(at=[n]):
            loop(mbs, cross_entropy(model), batch)
        assert off_by(model, wanted) <= 1e-12


def test_every_mistake_is_a_misuse_or_usage_error() -> None:
    for kind in (StepInsideError, BackwardInsideError, GradientsChangedError, OptimizerInBackwardError, IncompleteBatchError, NestedCallError):
        assert issubclass(kind, MisuseError)
    for usage in (BatchError, CountError, LossError):
        assert issubclass(usage, UsageError)


@pytest.mark.parametrize("door", DOORS)
def test_a_batch_that_carries_a_graph(model: nn.Module, door: int) -> None:
    x, y = pairs(4)
    encoder = nn.Linear(x.shape[1], x.shape[1], dtype=x.dtype)
    with pytest.raises(BatchError, match=r"the tensor '0' carries a graph \(AddmmBackward0\).*model=\[\.\.\.\], or detach it"):
        through(door, elastic(model), cross_entropy(model), (encoder(x), y))
    assert encoder.weight.grad is None
    assert running_call() is None


@pytest.mark.parametrize("door", ["backward", "eval", "verify"])
def test_a_loss_or_a_batch_in_the_place_of_the_function(model: nn.Module, door: str) -> None:
    mbs, batch = elastic(model), pairs(4)
    for wrong in (cross_entropy(model)(batch), batch):
        with pytest.raises(UsageError, match=rf"mbs\.{door}\(.*the function comes first and is called on pieces of the batch; got a (Tensor|tuple)"):
            getattr(mbs, door)(wrong, batch)


def test_the_decorator_without_its_model() -> None:
    def train_step(batch: Pair) -> Tensor:
        raise AssertionError("never called")

    decorated: Any = elastic_step(train_step)
    with pytest.raises(UsageError, match=r"train_step was decorated without its model: write @elastic_step\(model\) above it"):
        decorated(pairs(4))
