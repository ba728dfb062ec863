"""Promise 1 for BatchNorm over groups: the whole batch's gradient and running statistics."""

from __future__ import annotations

import copy
from collections import Counter
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from elastic_mbs import OutOfMemory
from elastic_mbs.events import Event
from elastic_mbs.recipes import convert_ghost_batchnorm
from tests.helpers.steps import elastic, grads, off_by, through
from tests.helpers.strikes import every_operation


class Branched(nn.Module):
    """A model of two branches: where one fails, the other can have committed."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv1d(3, 4, 3, padding=1, bias=False)
        self.branches = nn.ModuleList(self._branch() for _ in range(2))
        self.head = nn.Linear(12, 3)

    def _branch(self) -> nn.Module:
        return nn.Sequential(
            nn.BatchNorm1d(4),
            nn.Tanh(),
            nn.Conv1d(4, 4, 1, bias=False),
            nn.BatchNorm1d(4),
            nn.Tanh(),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        out: Tensor = self.head((self.branches[0](x) + self.branches[1](x)).flatten(1))
        return out


@pytest.mark.parametrize("door", [1, 3])
@pytest.mark.parametrize("warm", [False, True])
def test_any_failure_gives_the_whole_batchs_gradient_and_statistics(door: int, warm: bool) -> None:
    torch.manual_seed(0)
    start = convert_ghost_batchnorm(Branched().double(), group=2)
    batch = torch.randn(10, 3, 3, dtype=torch.float64), torch.randint(0, 3, (10,))

    def loss(net: nn.Module, b: tuple[Tensor, Tensor]) -> Tensor:
        return functional.cross_entropy(net(b[0]), b[1])

    twin = copy.deepcopy(start)
    loss(twin, batch).backward()
    modes: Counter[tuple[str, bool]] = Counter()
    mixed = 0

    def note(event: Event) -> None:
        if isinstance(event, OutOfMemory):
            modes[event.mode, event.committed > 0] += 1

    for strike in every_operation(stride=11):
        model = copy.deepcopy(start)
        mbs = elastic(model, micro_batch_size=8, on_event=note)
        loss_fn = partial(loss, model)
        if warm:
            through(door, mbs, loss_fn, batch)
            model.load_state_dict(start.state_dict())
            model.zero_grad()
        with strike:
            result = through(door, mbs, loss_fn, batch)
        lengths = [stop - first for first, stop in result.partition]
        assert all(length % 2 == 0 for length in lengths)
        mixed += len(set(lengths)) > 1
        assert off_by(model, grads(twin)) <= 1e-12, strike.hits
        for (name, mine), theirs in zip(model.named_buffers(), twin.buffers(), strict=True):
            assert torch.allclose(mine.double(), theirs.double(), rtol=1e-12, atol=1e-14), (
                name,
                strike.hits,
            )
    assert mixed
    # A partly committed piece restarts the batch. Any other piece runs again by itself.
    assert modes["step", True] > 0
    assert modes["piece", False] > 0
    assert not modes["piece", True]
