"""Promise 3 for state that begins to change, or that is new, after a function's first call."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from elastic_mbs import ElasticMBS, StepResult
from elastic_mbs.errors import ReplayUnsafeError
from elastic_mbs.testing import InjectOOM
from tests.helpers.steps import elastic, mlp, pairs, there
from tests.helpers.strikes import every_operation
from tests.helpers.unnamed import Metric, Step, by_hand, same

pytestmark = pytest.mark.no_oom_injection


class Confusion(nn.Module):
    """A metric with a table of more than a few kilobytes."""

    def __init__(self, *, in_place: bool) -> None:
        super().__init__()
        self.in_place = in_place
        self.register_buffer("table", torch.zeros(40, 40, dtype=torch.int64))

    def forward(self, scores: Tensor, labels: Tensor) -> None:
        table, at = self.get_buffer("table"), (labels, scores.detach().argmax(1))
        one = torch.ones(len(labels), dtype=torch.int64)
        if self.in_place:
            table.index_put_(at, one, accumulate=True)
        else:
            self.table = table.index_put(at, one, accumulate=True)


class Judge(nn.Module):
    """A discriminator with running statistics."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.net = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 1)).double()

    def forward(self, scores: Tensor, labels: Tensor) -> Tensor:
        loss: Tensor = self.net(scores).square().mean() * 0.1
        return loss


METRICS: dict[str, Callable[[], nn.Module]] = {
    "tensors in place": lambda: Metric(in_place=True),
    "tensors put in place of others": lambda: Metric(in_place=False),
    "a large table": lambda: Confusion(in_place=True),
    "a large table put in place of another": lambda: Confusion(in_place=False),
    "running statistics": Judge,
}


def closure(model: nn.Module, beside: nn.Module) -> Step:
    """Return a step over another module, as a function makes it that is called in each epoch."""

    def loss_fn(b: Any) -> Tensor:
        scores = model(b[0])
        return functional.cross_entropy(scores, b[1]) + (beside(scores, b[1]) or 0.0)

    return Step(model, loss_fn, [beside])


class Holder:
    """An object whose module is put in the place of another."""

    def __init__(self, model: nn.Module, beside: nn.Module) -> None:
        self.model, self.parts = model, {"metrics": [beside]}

    def step(self, b: Any) -> Tensor:
        scores = self.model(b[0])
        more = self.parts["metrics"][0](scores, b[1])
        return functional.cross_entropy(scores, b[1]) + (more or 0.0)


def anew_in_each_epoch(make: Callable[[], nn.Module]) -> Callable[[nn.Module, int], Step]:
    return lambda model, call: closure(model, make())


def swapped_in_a_holder(make: Callable[[], nn.Module]) -> Callable[[nn.Module, int], Step]:
    holders: list[Holder] = []

    def step(model: nn.Module, call: int) -> Step:
        if not holders:
            holders.append(Holder(model, make()))
        new = make()
        holders[0].parts["metrics"][0] = new
        return Step(model, holders[0].step, [new])

    return step


def in_turns(make: Callable[[], nn.Module]) -> Callable[[nn.Module, int], Step]:
    two: list[Step] = []

    def step(model: nn.Module, call: int) -> Step:
        if len(two) < 2:
            two.append(closure(model, make()))
        return two[call % 2]

    return step


def switched_on_later(make: Callable[[], nn.Module]) -> Callable[[nn.Module, int], Step]:
    kept: list[nn.Module] = []

    def step(model: nn.Module, call: int) -> Step:
        if not kept:
            kept.append(make())
        beside = kept[0]

        def loss_fn(b: Any) -> Tensor:
            scores = model(b[0])
            more = beside(scores, b[1]) if call else None
            return functional.cross_entropy(scores, b[1]) + (more or 0.0)

        return Step(model, loss_fn, [beside])

    return step


WAYS = {way.__name__: way for way in (anew_in_each_epoch, swapped_in_a_holder, in_turns)}


def run(mbs: ElasticMBS, loss_fn: Callable[[Any], Tensor], door: int, batch: Any) -> StepResult:
    if door == 1:
        return mbs.backward(loss_fn, batch)
    for micro in mbs.micro_batches(batch):
        with micro:
            micro.backward(loss_fn(micro.data))
    return there(mbs.last_result)


def check(
    steps: Callable[[nn.Module, int], Step],
    twins: Callable[[nn.Module, int], Step],
    inject: InjectOOM,
    door: int,
    calls: int,
) -> None:
    batch, model, twin_model = pairs(8), mlp(), mlp()
    mbs = elastic(model, micro_batch_size=4, min_micro_batch_size=2)
    for call in range(calls):
        step, twin = steps(model, call), twins(twin_model, call)
        with inject if call == calls - 1 else nullcontext():
            result = run(mbs, step.loss_fn, door, batch)
        by_hand(twin, result.partition, batch)
        assert same(step.state(), twin.state()), (inject.hits, result.partition)
        for each in (step, twin):
            each.zero_grad()


@pytest.mark.parametrize("door", [1, 3])
@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("way", WAYS)
def test_state_of_a_module_that_is_new_in_a_later_call_is_put_back(
    way: str, metric: str, door: int
) -> None:
    for inject in every_operation(stride=7, least=6):
        check(WAYS[way](METRICS[metric]), WAYS[way](METRICS[metric]), inject, door, calls=2)


@pytest.mark.parametrize("metric", ["tensors in place", "tensors put in place of others"])
def test_state_of_a_metric_that_is_switched_on_later_is_put_back(metric: str) -> None:
    for inject in every_operation(stride=2, least=6):
        make = METRICS[metric]
        check(switched_on_later(make), switched_on_later(make), inject, 1, calls=3)


def test_a_module_of_an_epoch_that_is_over_is_let_go() -> None:
    model, batch = mlp(), pairs(8)
    mbs = elastic(model, micro_batch_size=4)
    epochs: list[weakref.ref[nn.Module]] = []
    for _ in range(6):
        beside = Metric(in_place=True)
        epochs.append(weakref.ref(beside))
        mbs.backward(closure(model, beside).loss_fn, batch)
        model.zero_grad()
    del beside
    gc.collect()
    # The first is kept with what its call has learned, the last until the next call.
    assert [ref() is not None for ref in epochs] == [True, False, False, False, False, True]


def test_a_generator_that_is_new_in_a_later_call_is_put_back() -> None:
    def draws(model: nn.Module, seed: int) -> Callable[[Any], Tensor]:
        own = torch.Generator().manual_seed(seed)

        def loss_fn(b: Any) -> Tensor:
            noise = torch.rand(b[0].shape, generator=own, dtype=torch.float64)
            return functional.cross_entropy(model(b[0] + noise), b[1])

        return loss_fn

    batch = pairs(8)
    for inject in every_operation(stride=2, least=6):
        model, twin = mlp(), mlp()
        mbs = elastic(model, micro_batch_size=4, min_micro_batch_size=2)
        mbs.backward(draws(model, 0), batch)
        model.zero_grad()
        with inject:
            result = mbs.backward(draws(model, 1), batch)
        by_hand(Step(twin, draws(twin, 1)), result.partition, batch)
        for ours, wanted in zip(model.parameters(), twin.parameters(), strict=True):
            assert torch.allclose(there(ours.grad), there(wanted.grad), rtol=1e-12, atol=1e-14)


class Noting(nn.Module):
    """A layer that notes a loss, as layers of experts do."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.losses = nn.Linear(6, 6).double(), list[Tensor]()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x)
        self.losses.append(out.square().mean())
        return out


def noting() -> tuple[nn.Module, Callable[[Any], Tensor]]:
    torch.manual_seed(0)
    first, second = Noting(), Noting()
    model = nn.Sequential(first, nn.Tanh(), second)

    def loss_fn(b: Any) -> Tensor:
        loss = functional.cross_entropy(model(b[0]), b[1])
        for layer in (first, second):
            loss = loss + sum(layer.losses)
            layer.losses.clear()
        return loss

    return model, loss_fn


def test_a_list_that_each_piece_fills_and_empties_is_empty_after_a_failure() -> None:
    batch = pairs(8)
    for inject in every_operation(stride=3, least=20):
        (model, loss_fn), (twin, its) = noting(), noting()
        mbs = elastic(model, micro_batch_size=4, min_micro_batch_size=2)
        mbs.backward(loss_fn, batch)
        model.zero_grad()
        with inject:
            mbs.backward(loss_fn, batch)
        its(batch).backward()
        for ours, wanted in zip(model.parameters(), twin.parameters(), strict=True):
            assert torch.allclose(there(ours.grad), there(wanted.grad), rtol=1e-12, atol=1e-14)


class Reentrant(nn.Module):
    """A layer with a flag, a depth and a name that are as before when its forward has ended."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6).double()
        self.busy, self.depth, self.at, self.late = False, 0, "rest", False

    def forward(self, x: Tensor) -> Tensor:
        assert not self.busy
        self.busy, self.depth, self.at = True, self.depth + 1, "in forward"
        self.since = 1.0  # not there outside of forward
        out: Tensor = self.inner(x) * self.depth
        self.busy, self.depth, self.at = False, self.depth - 1, "rest"
        del self.since
        if self.late:
            self.count = getattr(self, "count", 0) + 1
        return out


@pytest.mark.parametrize("late", [False, True], ids=["at rest", "and begins to count"])
@pytest.mark.parametrize("given", [True, False], ids=["given", "found"])
def test_a_flag_that_each_piece_raises_and_lowers_is_lowered_after_a_failure(
    *, given: bool, late: bool
) -> None:
    batch = pairs(8)
    for inject in every_operation(stride=5, least=15):
        layer, head = Reentrant(), mlp()
        model = nn.Sequential(layer, *head) if given else head

        def loss_fn(b: Any, layer: Reentrant = layer, head: nn.Module = head) -> Tensor:
            return functional.cross_entropy(head(layer(b[0])), b[1])

        mbs = elastic(model, micro_batch_size=4, min_micro_batch_size=2)
        mbs.backward(loss_fn, batch)
        model.zero_grad()
        layer.zero_grad()
        layer.late = late
        with inject:
            result = mbs.backward(loss_fn, batch)
        assert (layer.busy, layer.depth, layer.at) == (False, 0, "rest"), inject.hits
        assert not hasattr(layer, "since")
        assert getattr(layer, "count", 0) == (len(result.partition) if late else 0)


class Noted(nn.Module):
    """A layer that notes its output where a number was."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.loss = nn.Linear(6, 6).double(), 0.0

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x)
        vars(self)["loss"] = out
        return out


def test_an_output_that_a_module_keeps_is_not_kept_alive_until_the_next_piece_ends() -> None:
    torch.manual_seed(0)
    model, kept = nn.Sequential(Noted(), *mlp()), list[weakref.ref[Tensor]]()

    def loss_fn(b: Any) -> Tensor:
        scores = model(b[0])
        assert all(ref() is None for ref in kept)
        kept.append(weakref.ref(vars(model[0])["loss"]))
        return functional.cross_entropy(scores, b[1])

    mbs = elastic(model, micro_batch_size=2)
    for _ in range(3):
        mbs.backward(loss_fn, pairs(8))
        vars(model[0])["loss"] = 0.0
    assert len(kept) == 12


class Late(nn.Module):
    """A layer whose frozen parameter, or tensor, begins to move when it is switched on."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.on = kind, False
        self.inner = nn.Linear(6, 6).double()
        self.teacher = nn.Parameter(torch.ones(6, dtype=torch.float64), requires_grad=False)
        self.mean = torch.zeros(6, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        new = x.detach().mean(0)
        if self.on and self.kind == "a parameter":
            self.teacher.mul_(0.9).add_(new, alpha=0.1)
        elif self.on and self.kind == "a tensor in place":
            self.mean.mul_(0.9).add_(new, alpha=0.1)
        elif self.on:
            self.mean = 0.9 * self.mean + 0.1 * new
        out: Tensor = self.inner(x * self.teacher - self.mean)
        return out


def late(kind: str) -> tuple[Step, Late]:
    torch.manual_seed(0)
    layer, head = Late(kind), mlp()
    model = nn.Sequential(layer, *head)
    return Step(model, lambda b: functional.cross_entropy(model(b[0]), b[1])), layer


@pytest.mark.parametrize("after", [1, 2])
@pytest.mark.parametrize("kind", ["a parameter", "a tensor in place", "another tensor"])
def test_state_of_the_model_that_begins_to_change_later_goes_back_or_is_refused(
    kind: str, after: int
) -> None:
    batch, refused = pairs(8), 0
    for inject in every_operation(stride=3, least=8):
        (step, layer), (twin, its) = late(kind), late(kind)
        mbs = elastic(step.model, micro_batch_size=4, min_micro_batch_size=2)
        for call in range(after + 1):
            layer.on = its.on = call > 0
            try:
                with inject if call == after else nullcontext():
                    result = mbs.backward(step.loss_fn, batch)
            except ReplayUnsafeError as error:
                assert "Late." in str(error)
                refused += 1
                break
            by_hand(twin, result.partition, batch)
            assert same(step.state(), twin.state()), (inject.hits, result.partition)
            for each in (step, twin):
                each.zero_grad()
    # Only the first batch in which it changes in place has no value to go back to.
    assert (refused > 0) == (after == 1 and kind != "another tensor")
