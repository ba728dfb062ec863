"""Gradients that lie in one place, made so by the user or by autograd, get each piece once wherever memory runs out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from elastic_mbs import OutOfMemory
from elastic_mbs.events import Event
from elastic_mbs.testing import InjectOOM
from tests.helpers.settled import settled
from tests.helpers.steps import cross_entropy, elastic, mlp, off_by, pairs, through, whole_gradient

pytestmark = pytest.mark.no_oom_injection

DOORS = [1, 3]


def flat_gradients(model: nn.Module) -> None:
    """Gradients that are views of one buffer."""
    parameters = list(model.parameters())
    buffer, at = torch.zeros(sum(p.numel() for p in parameters), dtype=parameters[0].dtype), 0
    for p in parameters:
        p.grad = buffer[at : at + p.numel()].view_as(p)
        at += p.numel()


@pytest.mark.parametrize("door", DOORS)
def test_gradients_that_are_views_of_one_buffer_are_exact_wherever_memory_runs_out(door: int) -> None:
    model, batch = mlp(), pairs()
    loss_fn = cross_entropy(model)
    wanted = whole_gradient(model, lambda twin: cross_entropy(twin)(batch))
    mbs = settled(model, loss_fn, batch, door)
    for at in range(1, 45):
        flat_gradients(model)
        with InjectOOM(at=[at]):
            through(door, mbs, loss_fn, batch)
        assert off_by(model, wanted) <= 1e-12


@pytest.mark.parametrize("door", DOORS)
def test_gradients_that_come_to_share_memory_in_the_middle_of_a_batch_are_not_trusted_to_tell_what_committed(door: int) -> None:
    """Two leaves of one element get the seed itself for their gradient: one tensor, seen through two views."""

    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.apart = True
            self.a, self.b, self.w = (nn.Parameter(torch.ones(1, dtype=torch.float64)) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            late = (x * self.w).exp().mean()  # made first, so its backward comes last
            a, b = (leaf.view(()) * 2 if self.apart else leaf.view(()) for leaf in (self.a, self.b))
            return a + b + late

    events: list[Event] = []
    batch = torch.linspace(0, 1, 8, dtype=torch.float64)
    wanted = [torch.ones(1, dtype=torch.float64)] * 2 + [(batch * batch.exp()).mean().reshape(1)]  # w is one
    for at in range(1, 45):
        model = Sum()
        mbs = settled(model, model, batch, door, on_event=events.append)
        through(door, mbs, model, batch)
        model.zero_grad()
        model.apart = False
        with InjectOOM(at=[at]):
            through(door, mbs, model, batch)
        assert off_by(model, [*wanted]) <= 1e-12
    modes = [(event.start, event.mode) for event in events if isinstance(event, OutOfMemory) and event.committed]
    # Once a piece has made them in one place, they are separated.
    assert {(0, "step"), (3, "piece"), (6, "piece")} == set(modes)


class Meeting(nn.Module):
    """Two leaves that meet in one addition, each through a view: autograd gives both the same memory for their gradient."""

    def __init__(self, apart: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.apart = apart
        self.a, self.b, self.w = (nn.Parameter(torch.randn(4, dtype=torch.float64)) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        late = (x * self.w).exp().mean()  # made first, so its backward comes last
        a, b = (leaf[None] * 2 if self.apart else leaf[None] for leaf in (self.a, self.b))
        return (x + (a + b)).pow(2).mean() + late


def rows(n: int = 8) -> Tensor:
    return torch.linspace(-1, 1, 4 * n, dtype=torch.float64).view(n, 4)


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("options", [{}, {"replay": "isolate"}, {"accumulate_dtype": torch.float32}])
def test_leaves_whose_gradients_autograd_makes_in_one_place_get_each_piece_once(door: int, options: dict[str, Any]) -> None:
    model, batch = Meeting(), rows()
    wanted = whole_gradient(model, lambda twin: twin(batch))
    mbs = elastic(model, micro_batch_size=3, **options)
    for _ in range(4):
        model.zero_grad()
        through(door, mbs, model, batch)
        assert off_by(model, wanted) <= 1e-12


def test_leaves_outside_the_model_whose_gradients_are_made_in_one_place_get_each_piece_once() -> None:
    model, batch = mlp(), pairs()
    weights = [torch.ones(1, dtype=torch.float64, requires_grad=True) for _ in range(2)]

    def loss_fn(piece: tuple[Tensor, Tensor]) -> Tensor:
        loss: Tensor = cross_entropy(model)(piece) + weights[0].squeeze() + weights[1].squeeze()
        return loss

    mbs = elastic(model, micro_batch_size=3)
    for _ in range(3):
        for weight in weights:
            weight.grad = None
        mbs.backward(loss_fn, batch)
        assert off_by(weights, [torch.ones(1, dtype=torch.float64)] * 2) <= 1e-12


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("settle", [0, 1, 2])
@pytest.mark.parametrize("apart", [False, True])
def test_gradients_in_one_place_are_exact_wherever_memory_runs_out(door: int, settle: int, apart: bool) -> None:
    """`apart`: they come to lie in one place only when the loss function is known."""
    batch = rows()
    wanted = whole_gradient(Meeting(), lambda twin: twin(batch))
    at, clean = 0, False
    while not clean:
        at += 1
        model = Meeting(apart)
        mbs = elastic(model, micro_batch_size=3)
        for _ in range(settle):
            through(door, mbs, model, batch)
        model.zero_grad()
        model.apart = False
        with InjectOOM(at=[at]) as inject:
            through(door, mbs, model, batch)
        assert off_by(model, wanted) <= 1e-12
        clean = not inject.hits
    assert at > 30
