"""Promise 3 for state that the first batch makes: a queue or a centre that is None until then."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from elastic_mbs.testing import InjectOOM
from tests.helpers.steps import elastic, mlp, pairs
from tests.helpers.strikes import every_operation
from tests.helpers.unnamed import Step, by_hand, same

pytestmark = pytest.mark.no_oom_injection


class Centre(nn.Module):
    """A centre that is None until the first batch, and moves with each."""

    def __init__(self, *, in_place: bool) -> None:
        super().__init__()
        self.in_place = in_place
        self.at: Tensor | None = None

    def forward(self, z: Tensor) -> Tensor:
        new, at = z.detach().mean(0), self.at
        if at is None:
            self.at = new
            return z
        out = z - at.clone()
        if self.in_place:
            at.mul_(0.9).add_(new, alpha=0.1)
        else:
            self.at = 0.9 * at + 0.1 * new
        return out


class Bank(nn.Module):
    """A bank of features that is not there until the first batch, and grows."""

    rows: Tensor

    def forward(self, z: Tensor) -> Tensor:
        known = getattr(self, "rows", z.detach()[:0])
        self.rows = torch.cat([known, z.detach()])
        return z + known.mean(0) if len(known) else z


class Window(Bank):
    """A bank that grows to six rows, of which the oldest ones leave."""

    def forward(self, z: Tensor) -> Tensor:
        out = super().forward(z)
        self.rows = self.rows[-6:]
        return out


class Queue(nn.Module):
    """A queue in a list that the first batch makes."""

    def __init__(self) -> None:
        super().__init__()
        self.items: list[Tensor] | None = None

    def forward(self, z: Tensor) -> Tensor:
        items = self.items or []
        self.items = [*items, z.detach().mean(0)] if self.items is None else items
        if items:
            items.append(z.detach().mean(0))
        return z + sum(items[:-1], torch.zeros((), dtype=z.dtype))


KINDS: dict[str, Callable[[], nn.Module]] = {
    "a centre edited in place": lambda: Centre(in_place=True),
    "a centre replaced": lambda: Centre(in_place=False),
    "a bank": Bank,
    "a window": Window,
    "a queue": Queue,
}


def step_of(kind: str, *, given: bool) -> Step:
    model, late = mlp(), KINDS[kind]()
    if given:
        model.append(late)
        return Step(model, lambda b: functional.cross_entropy(model(b[0]), b[1]), [late])
    return Step(model, lambda b: functional.cross_entropy(late(model(b[0])), b[1]), [late])


@pytest.mark.parametrize("given", [True, False], ids=["given", "found"])
@pytest.mark.parametrize("call", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_what_the_first_batch_makes_goes_back(kind: str, call: int, *, given: bool) -> None:
    batch = pairs(8)
    for inject in every_operation(stride=7, least=10):
        step, twin = step_of(kind, given=given), step_of(kind, given=given)
        mbs = elastic(step.model, micro_batch_size=4, min_micro_batch_size=2)
        for _ in range(call - 1):
            by_hand(twin, mbs.backward(step.loss_fn, batch).partition, batch)
            for each in (step, twin):
                each.zero_grad()
        with inject:
            result = mbs.backward(step.loss_fn, batch)
        by_hand(twin, result.partition, batch)
        assert same(step.state(), twin.state()), (inject.hits, result.partition)


@pytest.mark.parametrize("kind", KINDS)
def test_a_call_that_ends_by_an_error_leaves_none_of_it(kind: str) -> None:
    step = step_of(kind, given=True)
    before = vars(step.others[0]).copy()

    def loss_fn(b: Any) -> Tensor:
        loss = step.loss_fn(b)
        step.call += 1
        if step.call == 2:
            raise ValueError("the user's")
        return loss

    with pytest.raises(ValueError, match="the user's"):
        elastic(step.model, micro_batch_size=4).backward(loss_fn, pairs(8))
    assert vars(step.others[0]) == before


class Table(nn.Module):
    """A table that the first forward makes and none changes."""

    table: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.table is None:
            self.table = torch.arange(x.shape[1], dtype=x.dtype)
        return x + self.table


def test_a_table_that_the_first_batch_makes_is_not_copied_for_good() -> None:
    model = nn.Sequential(Table(), *mlp())
    mbs, batch = elastic(model, micro_batch_size=4), pairs(8)
    loss_fn = lambda b: functional.cross_entropy(model(b[0]), b[1])  # noqa: E731
    with InjectOOM(at=[4]):
        assert mbs.backward(loss_fn, batch).ooms == 1
    for _ in range(2):
        mbs.backward(loss_fn, batch)
    buffers = mbs._resources.buffers
    assert buffers._layout.changing.names == []
    assert set(buffers._kept(buffers._layout, frozenset()).copies) == {None}


@pytest.mark.parametrize("call", [1, 2])
def test_what_was_there_before_the_first_batch_stays(call: int) -> None:
    batch = pairs(8)
    for inject in every_operation(stride=3, least=10):
        model, late = mlp(), Centre(in_place=True)
        model.append(late)
        kept: list[Any] = [[1, 2], {"a": 3}, torch.ones(2), {4}]
        for name, value in zip("abcd", kept, strict=True):
            setattr(late, name, value)

        def loss_fn(b: Any, model: nn.Module = model) -> Tensor:
            return functional.cross_entropy(model(b[0]), b[1])

        mbs = elastic(model, micro_batch_size=4, min_micro_batch_size=2)
        for _ in range(call - 1):
            mbs.backward(loss_fn, batch)
            model.zero_grad()
        with inject:
            mbs.backward(loss_fn, batch)
        for name, value in zip("abcd", kept, strict=True):
            assert getattr(late, name) is value
        assert kept[:2] == [[1, 2], {"a": 3}]
