"""Blocks that keep something, or are set up for each use, are exact when they run again."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from elastic_mbs.escalation import tile
from stress.reference.state import error_of
from tests.helpers.steps import grads, whole_gradient
from tests.helpers.strikes import every_operation
from tests.promises.test_tiles import WIDTH, loss_of, samples, tiled

RUNGS = [("tile",), ("checkpoint",), ("checkpoint", "tile")]


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the smallest modules in tiles, too, and in few of them."""
    monkeypatch.setattr(tile, "SMALL", 0)
    monkeypatch.setattr(tile, "FEWEST", 2)
    monkeypatch.setattr(tile, "WORTH", 1)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.scale: Any = 1.0
        self.losses: list[Tensor] = []
        self.config = SimpleNamespace(pools=False)

    def forward(self, x: Tensor) -> Tensor:
        hidden = (self.scale * self.one(x)).sin()
        if self.config.pools:
            hidden = hidden + hidden.mean(-2, keepdim=True)
        found: Tensor = self.two(hidden)
        return found


class Net(nn.Module):
    """Two position-wise blocks after a mean over all positions."""

    def __init__(self, layer: type[Layer] = Layer) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(layer() for _ in range(2))
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        x = x + x.mean(-2, keepdim=True)
        for block in self.blocks:
            x = x + block(x)
        return x


class OneForAll(Net):
    """A block that is used three times, with another tensor each time."""

    def forward(self, x: Tensor) -> Tensor:
        x = x + x.mean(-2, keepdim=True)
        block: Any = self.blocks[0]
        for scale in (1.0, 2.0, 3.0):
            block.scale = torch.tensor(scale, dtype=torch.float64)
            x = x + block(x) + self.blocks[1](x)
        return x


class WithLosses(Layer):
    def forward(self, x: Tensor) -> Tensor:
        found = super().forward(x)
        self.losses.append(found.square().mean((-2, -1), keepdim=True))
        return found


class Summed(Net):
    """Blocks that note a loss each, which the net adds up and clears."""

    def __init__(self) -> None:
        super().__init__(WithLosses)

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        for block in self.blocks:
            losses: Any = block.losses
            x = x + sum(losses)
            losses.clear()
        return x


class WithCheckpoint(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.Tanh(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = checkpoint(self.inner, super().forward(x), use_reentrant=False)
        return found


@pytest.mark.parametrize("escalate", RUNGS, ids="+".join)
@pytest.mark.parametrize(
    "make", [OneForAll, Summed, lambda: Net(WithCheckpoint)], ids=["set up", "notes", "checkpoint"]
)
def test_a_block_is_the_same_when_it_runs_again(make: Any, escalate: tuple[str, ...]) -> None:
    model, batch = make(), samples(2, 6)
    wanted = whole_gradient(model, lambda twin: loss_of(twin)(batch))
    mbs, loss_fn = tiled(model, batch, escalate=escalate)
    for strike in every_operation(stride=83):
        with strike:
            mbs.backward(loss_fn, batch)
        assert error_of(grads(model), wanted) <= 1e-12, strike.hits
        assert all(not layer.losses for layer in model.blocks)
        model.zero_grad()


def test_a_switch_in_a_configuration_is_part_of_the_verdict() -> None:
    model, batch = Net(), samples()
    mbs, loss_fn = tiled(model, batch)
    for block in model.blocks:
        config: Any = block.config
        config.pools = True
    wanted = whole_gradient(model, lambda twin: loss_of(twin)(batch))
    mbs.backward(loss_fn, batch)
    assert error_of(grads(model), wanted) <= 1e-12
