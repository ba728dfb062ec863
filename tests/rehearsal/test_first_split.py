"""The comparison that runs by itself after the first call that was split."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from elastic_mbs import GradientOptions, UsageError, elastic_step
from elastic_mbs.engine.shared.running import running_call
from elastic_mbs.events import Event, Warned
from elastic_mbs.testing import InjectOOM
from tests.engine.test_verify import Traced
from tests.helpers.right_losses import RIGHT
from tests.helpers.steps import (
    Pair,
    cross_entropy,
    elastic,
    grads,
    loop,
    mlp,
    off_by,
    pairs,
    quiet,
    whole_gradient,
)

LossFn = Callable[..., Any]

pytestmark = pytest.mark.verifies


def warned(events: list[Event]) -> list[str]:
    return [each.message for each in events if isinstance(each, Warned)]


def contrastive(model: nn.Module, runs: list[int]) -> LossFn:
    def loss_fn(b: Pair) -> Any:
        runs.append(len(b[0]))
        features = nn.functional.normalize(model(b[0]), dim=1)
        wanted = torch.arange(len(features))
        return nn.functional.cross_entropy(features @ features.T / 0.1, wanted)

    return loss_fn


def counted(model: nn.Module, runs: list[int]) -> LossFn:
    def loss_fn(b: Pair) -> Any:
        runs.append(len(b[0]))
        return cross_entropy(model)(b)

    return loss_fn


@pytest.mark.parametrize("kind", RIGHT)
def test_a_right_loss_is_split_without_a_word(kind: str) -> None:
    torch.manual_seed(0)
    case, events = RIGHT[kind](), list[Event]()
    mbs = elastic(case.model, micro_batch_size=2, on_event=events.append, **case.options)
    for _ in range(2):
        mbs.backward(case.loss_fn, case.batch)
    told = warned(events)
    if kind == "drawn on the host":  # draws that cannot be made equal are told once
        assert "were not compared" in told.pop()
    assert told == []


def test_a_wrong_loss_is_warned_of_once_in_one_line_with_the_way_out(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model, runs, events = mlp(), list[int](), list[Event]()
    mbs = elastic(model, micro_batch_size=8, on_event=events.append)
    mbs.backward(contrastive(model, runs), pairs())
    assert (runs, warned(events)) == ([8], [])  # it was not split
    mbs = elastic(model, micro_batch_size=4, on_event=events.append)
    with caplog.at_level(logging.WARNING, logger="elastic_mbs"):
        for _ in range(3):
            mbs.backward(contrastive(model, runs), pairs())
    (message,) = warned(events)
    assert "the pieces of a batch do not make up the loss of contrastive" in message
    assert "mbs.backward_embeddings(embed_fn, loss_fn, batch)" in message
    assert 'GradientOptions(verify="off")' in message
    assert "\n" not in message
    assert sum(message in record.getMessage() for record in caplog.records) == 1


def test_a_right_loss_is_compared_once_on_as_many_samples_as_fit() -> None:
    model, runs = mlp(), list[int]()
    mbs = elastic(model, micro_batch_size=4)
    for _ in range(3):
        mbs.backward(counted(model, runs), pairs())
    compared = [4, 1, 1, 1, 1, 2, 2]
    compared += [2, 2, 2]  # state that moves in training
    assert runs == [4, 4, *compared, 4, 4, 4, 4]
    mbs.backward(lambda b: counted(model, runs)(b), pairs())  # another function
    assert runs[16:] == [4, 4, *compared]


def test_switched_off_nothing_runs() -> None:
    model, runs = mlp(), list[int]()
    mbs = elastic(model, micro_batch_size=4, verify="off")
    mbs.backward(contrastive(model, runs), pairs())
    assert runs == [4, 4]
    with pytest.raises(UsageError, match="verify='never' is not known: use 'warn'"):
        GradientOptions(verify="never")  # type: ignore[arg-type]


def test_as_an_error_it_empties_the_gradients_it_made() -> None:
    model, runs = mlp(), list[int]()
    mbs = elastic(model, micro_batch_size=4, verify="error")
    with pytest.raises(UsageError, match="do not make up the loss") as caught:
        mbs.backward(contrastive(model, runs), pairs())
    assert not hasattr(caught.value, "__notes__")
    assert grads(model) == [None] * 4
    model.zero_grad()
    full = elastic(model, micro_batch_size=4, verify="error")
    cross_entropy(model)(pairs()).backward()
    with pytest.raises(UsageError) as caught:
        full.backward(contrastive(model, runs), pairs())
    assert "zero_grad()" in caught.value.__notes__[0]
    model.zero_grad()
    full.backward(cross_entropy(model), pairs())
    right = whole_gradient(model, lambda twin: cross_entropy(twin)(pairs()))
    assert off_by(model, right) <= 1e-12


def test_the_decorator_compares_and_the_loop_cannot() -> None:
    model, events = mlp(), list[Event]()
    step = elastic_step(model, **quiet(micro_batch_size=4, on_event=events.append))(
        contrastive(model, [])
    )
    step(pairs())
    assert len(warned(events)) == 1
    mbs = elastic(model, micro_batch_size=4, on_event=events.append)
    loop(mbs, contrastive(model, []), pairs())
    assert len(warned(events)) == 1


def test_what_follows_the_batch_is_passed_on() -> None:
    model, events = mlp(), list[Event]()

    def loss_fn(b: Pair, scale: float, *, sign: int) -> Any:
        return cross_entropy(model)(b) * scale * sign

    mbs = elastic(model, micro_batch_size=4, on_event=events.append)
    mbs.backward(loss_fn, pairs(), 2.0, sign=-1)
    assert warned(events) == []


def test_the_total_is_that_of_the_samples_compared() -> None:
    model, events = mlp(), list[Event]()
    mbs = elastic(model, micro_batch_size=4, reduction="sum", on_event=events.append)

    def loss_fn(b: Pair) -> Any:
        return cross_entropy(model)(b) * len(b[0]) / mbs.total

    mbs.backward(loss_fn, pairs())
    assert warned(events) == []
    with pytest.raises(UsageError, match="known only while a batch runs"):
        _ = mbs.total


def test_it_leaves_no_trace() -> None:
    on, off = Traced(), Traced()
    for traced, verify in ((on, "warn"), (off, "off")):
        traced.model.zero_grad()
        mbs = elastic(traced.model, micro_batch_size=4, verify=verify)
        runs = 0

        def loss_fn(b: Pair, traced: Traced = traced) -> Any:
            nonlocal runs
            runs += 1
            noise = torch.rand(()) + 0 * traced.model.get_buffer("calls").add_(1.0)
            traced.model[2].train(runs % 2 == 0)
            return cross_entropy(traced.model)(b) * (1 + noise)

        torch.manual_seed(7)
        mbs.backward(loss_fn, traced.batch)
        traced.grads = [parameter.grad for parameter in traced.model.parameters()]
        assert (runs > 2) == (verify == "warn")
    assert on.state() == off.state()


class Around:
    """What a loss function can edit that nobody has named: as a momentum encoder and a queue do."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.student, self.teacher = mlp(), mlp(seed=1).requires_grad_(False)
        self.judge = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 4)).double()
        self.judge.requires_grad_(False)
        self.queue = torch.randn(16, 4, dtype=torch.float64)
        self.own = torch.Generator().manual_seed(3)
        self.runs = 0

    def loss_fn(self, b: Pair) -> Any:
        self.runs += 1
        with torch.no_grad():
            for old, new in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
                old.mul_(0.9).add_(new, alpha=0.1)
            keys = self.judge(self.teacher(b[0]))
            self.queue[: len(keys)] = keys
        noise = torch.randn(4, generator=self.own, dtype=torch.float64)
        return ((self.student(b[0]) + noise) @ self.queue.T).square().mean()

    def state(self) -> list[Any]:
        modules = (self.student, self.teacher, self.judge)
        parts = [value.tolist() for each in modules for value in each.state_dict().values()]
        return [*parts, self.queue.tolist(), self.own.get_state().tolist(), self.judge.training]


def test_what_nobody_has_named_is_put_back_too() -> None:
    on, off = Around(), Around()
    for each, verify in ((on, "warn"), (off, "off")):
        elastic(each.student, micro_batch_size=4, verify=verify).backward(each.loss_fn, pairs())
        assert (each.runs > 2) == (verify == "warn")
    assert on.state() == off.state()


def test_a_lack_of_memory_in_it_is_no_ones_and_it_tries_again_three_times_at_most() -> None:
    model, events, few = mlp(), list[Event](), list[int]()
    mbs = elastic(model, micro_batch_size=4, on_event=events.append)
    fails = 2

    def loss_fn(b: Pair) -> Any:
        if len(b[0]) == 4 and running_call() is None:  # the comparison's whole
            few.append(4)
            if len(few) <= fails:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB.")
        return cross_entropy(model)(b)

    for _ in range(5):
        mbs.backward(loss_fn, pairs())
    assert len(few) == 3  # the third one found room
    assert mbs.stats.ooms == 0
    few.clear()
    fails = 100
    mbs = elastic(model, micro_batch_size=4, on_event=events.append)
    for _ in range(5):
        mbs.backward(loss_fn, pairs())
    assert len(few) == 3
    assert warned(events) == []


def test_an_error_of_the_step_is_told_and_not_raised() -> None:
    model, events = mlp(), list[Event]()

    def loss_fn(b: Pair) -> Any:
        if len(b[0]) == 1:
            raise ZeroDivisionError("of a single sample")
        return cross_entropy(model)(b)

    mbs = elastic(model, micro_batch_size=4, verify="error", on_event=events.append)
    for _ in range(2):
        mbs.backward(loss_fn, pairs())
    (message,) = warned(events)
    assert "could not be compared" in message
    assert "ZeroDivisionError: of a single sample" in message
    twice = whole_gradient(model, lambda twin: 2 * cross_entropy(twin)(pairs()))
    assert off_by(model, twice) <= 1e-12


def test_an_index_that_is_not_said_is_told_of_with_the_way_to_say_it() -> None:
    model, events = nn.Linear(4, 4), list[Event]()
    batch = {
        "img": torch.rand(4, 4),
        "boxes": torch.rand(4, 4),
        "image_index": torch.tensor([0, 0, 1, 1]),
    }
    mbs = elastic(model, micro_batch_size=2, on_event=events.append)
    mbs.backward(lambda b: (model(b["img"])[b["image_index"]] - b["boxes"]).square().mean(), batch)
    (message,) = warned(events)
    assert "could not be compared" in message
    assert "cut.ragged(..., by=...)" in message


def test_a_whole_batch_beside_the_piece_is_told_of_and_following_it_is_right() -> None:
    model, events = nn.Linear(4, 1).double(), list[Event]()
    x, y = torch.rand(8, 4).double(), torch.rand(8, 1).double()

    def beside(b: Any) -> Any:
        return (model(b) - y).square().mean()  # one row of a piece is compared with all targets

    mbs = elastic(model, micro_batch_size=1, on_event=events.append)
    mbs.backward(beside, x)
    (message,) = warned(events)
    assert "could not be compared on a few samples: RuntimeError: The size of tensor" in message
    assert "Then the gradient just made is wrong: put it into the batch" in message

    def inside(b: Pair) -> torch.Tensor:
        error: torch.Tensor = model(b[0]) - b[1]
        return error.square().mean()

    model.zero_grad()
    mbs.backward(inside, (x, y))
    assert len(warned(events)) == 1
    (right,) = torch.autograd.grad(beside(x), model.weight)
    torch.testing.assert_close(model.weight.grad, right, rtol=0, atol=1e-12)


@pytest.mark.parametrize("n", [45, 60, 75, 90, 105, 120])
def test_an_out_of_memory_error_anywhere_in_it_leaves_the_call_as_it_is(n: int) -> None:
    model, batch = mlp(), pairs()
    mbs = elastic(model, micro_batch_size=4)
    with InjectOOM(at=[n]):
        mbs.backward(cross_entropy(model), batch)
    assert off_by(model, whole_gradient(model, lambda m: cross_entropy(m)(batch))) <= 1e-12


def test_a_compiled_model_is_compared_as_it_was_written() -> None:
    made = list[int]()

    def count(graph: Any, examples: Any) -> Any:
        made.append(1)
        return graph.forward

    model, events = mlp(), list[Event]()
    compiled: Any = torch.compile(model, backend=count)
    mbs = elastic(model, micro_batch_size=4, on_event=events.append)

    def loss_fn(b: Pair) -> Any:
        return nn.functional.cross_entropy(compiled(b[0]), b[1])

    mbs.backward(loss_fn, pairs())
    assert warned(events) == []
    graphs = len(made)
    mbs.backward(loss_fn, pairs())
    assert len(made) == graphs == 1


_ALIVE = """
import gc, sys, weakref
from tests.helpers.steps import cross_entropy, elastic, mlp, pairs

assert "torch._dynamo" not in sys.modules  # an optimizer would have imported it
gc.disable()
model = mlp()

def call():
    batch = pairs()
    elastic(model, micro_batch_size=4).backward(cross_entropy(model), batch)
    return weakref.ref(batch[0])

assert call()() is None
"""


def test_the_first_batch_of_a_process_is_gone_without_a_collection() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _ALIVE], capture_output=True, text=True, check=False
    )
    assert not done.returncode, done.stderr


def test_modules_that_nobody_gave_stay_in_their_mode() -> None:
    model = mlp()
    judge = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 1)).double()
    teacher = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4)).double().eval()
    teacher[0].train()
    before = [each.training for each in (*judge.modules(), *teacher.modules())]

    def loss_fn(b: Pair) -> Any:
        return (judge(model(b[0])).squeeze(1) - teacher(b[0]).mean(1)).square().mean()

    elastic(model, micro_batch_size=4).backward(loss_fn, pairs(8))
    assert [each.training for each in (*judge.modules(), *teacher.modules())] == before


def test_a_refused_first_split_leaves_no_gradient_outside_the_model_either() -> None:
    model, batch = mlp(), pairs()
    given = [torch.ones(4, dtype=torch.float64, requires_grad=True)]
    mbs = elastic(model, micro_batch_size=2, gradients=GradientOptions(verify="error"))

    def loss(piece: Pair) -> torch.Tensor:
        out: torch.Tensor = (model(piece[0]) * given[0].sum()).sum()  # a sum, under the mean
        return out

    with pytest.raises(UsageError):
        mbs.backward(loss, batch)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert given[0].grad is None
