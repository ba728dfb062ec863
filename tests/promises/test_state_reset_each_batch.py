"""Promise 3 for state that the user empties before each batch: a hidden state, a cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.helpers.steps import elastic, mlp, pairs
from tests.helpers.strikes import every_operation
from tests.helpers.unnamed import Step, by_hand, same

pytestmark = pytest.mark.no_oom_injection


class Hidden(nn.Module):
    """A hidden state that is None when a batch begins."""

    h: Tensor | None

    def __init__(self) -> None:
        super().__init__()
        self.empty()

    def empty(self) -> None:
        self.h = None

    def forward(self, z: Tensor) -> Tensor:
        h = getattr(self, "h", None)
        before = torch.zeros_like(z[0]) if h is None else h
        self.h = 0.5 * before + z.detach().mean(0)
        return z + before


class Deleted(Hidden):
    """A hidden state that is not there when a batch begins."""

    def empty(self) -> None:
        vars(self).pop("h", None)


class Listed(Hidden):
    """A list of what was seen, which is None when a batch begins."""

    def empty(self) -> None:
        self.seen: list[float] | None = None

    def forward(self, z: Tensor) -> Tensor:
        if getattr(self, "seen", None) is None:
            self.seen = []
        assert self.seen is not None
        self.seen.append(float(z.detach().mean()))
        return z * (1 + 0.1 * len(self.seen))


class ListDeleted(Listed):
    """A list of what was seen, which is not there when a batch begins."""

    def empty(self) -> None:
        vars(self).pop("seen", None)


KINDS: dict[str, Callable[[], Hidden]] = {
    kind.__name__: kind for kind in (Hidden, Deleted, Listed, ListDeleted)
}


def step_of(kind: str) -> tuple[Step, Hidden]:
    model, late = mlp(), KINDS[kind]()
    model.append(late)
    return Step(model, lambda b: functional.cross_entropy(model(b[0]), b[1]), [late]), late


@pytest.mark.parametrize("sizes", [(4, 4, 4), (8, 4, 4), (8, 8, 4)])
@pytest.mark.parametrize("kind", KINDS)
def test_state_that_is_emptied_before_each_batch_goes_back(
    kind: str, sizes: tuple[int, ...]
) -> None:
    batch = pairs(8)
    for inject in every_operation(stride=5, least=4):
        (step, late), (twin, its) = step_of(kind), step_of(kind)
        mbs = elastic(step.model, micro_batch_size=4, min_micro_batch_size=2)
        for call, size in enumerate(sizes):
            part: Any = tuple(each[:size] for each in batch)
            if call < len(sizes) - 1:
                result = mbs.backward(step.loss_fn, part)
            else:
                part = batch
                with inject:
                    result = mbs.backward(step.loss_fn, part)
            by_hand(twin, result.partition, part)
            assert same(step.state(), twin.state()), (inject.hits, result.partition)
            for trained in (step, twin):
                trained.zero_grad()
            for each in (late, its):
                each.empty()
