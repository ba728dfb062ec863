"""A rehearsal before the first call leaves modules and generators that nobody gave as they are."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.helpers.steps import elastic


class Beside(nn.Module):
    """A module of the loss, with state of every kind."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.drop, self.lin = nn.BatchNorm1d(8), nn.Dropout(), nn.Linear(8, 1)
        self.calls, self.log = 0, list[int]()
        self.own = random.Random(3)
        self.numpys = np.random.default_rng(3)
        self.torchs = torch.Generator().manual_seed(3)

    def forward(self, x: Tensor) -> Tensor:
        """Return x of shape (samples, 1), and change everything."""
        self.calls += 1
        self.log.append(1)
        self.drop.train(not self.drop.training)
        self.lin.requires_grad_(False)
        noise = self.own.random() + float(self.numpys.random())
        drawn = torch.rand(1, generator=self.torchs)
        found: Tensor = self.lin(self.drop(self.norm(x))) * noise + drawn
        return found

    def everything(self) -> list[Any]:
        """Return all that a forward changes."""
        return [
            (self.calls, len(self.log), self.own.getstate(), self.numpys.bit_generator.state),
            self.torchs.get_state().tolist(),
            [module.training for module in self.modules()],
            [parameter.requires_grad for parameter in self.parameters()],
            [(name, value.tolist()) for name, value in self.state_dict().items()],
        ]


@pytest.mark.parametrize("rehearse", ["verify", "plan"])
@pytest.mark.parametrize("trains", [True, False])
def test_a_rehearsal_leaves_what_the_loss_brings_along(rehearse: str, trains: bool) -> None:
    model, beside = nn.Linear(8, 8), Beside().train(trains)
    before = beside.everything()
    mbs = elastic(model, sensor=None)
    loss_fn: Callable[[Tensor], Tensor] = lambda x: (model(x).mean(1) + beside(model(x))).mean()  # noqa: E731  # the closure is what is looked into
    report: Any = getattr(mbs, rehearse)(loss_fn, torch.randn(4, 8))
    assert rehearse == "verify" or report.reason is None
    assert beside.everything() == before
