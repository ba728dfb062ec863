"""Edits in place around a module that runs again: exact, or refused before anything is wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from elastic_mbs import ReplayUnsafeError
from elastic_mbs.escalation import tile
from stress.reference.state import error_of
from tests.helpers.steps import grads, through, whole_gradient
from tests.promises.test_tiles import Made, loss_of, samples, tiled

Use = Callable[[nn.Module, Tensor], Tensor]

RUNGS = [("tile",), ("checkpoint",), ("checkpoint", "tile"), ("tile", "checkpoint", "offload")]


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the smallest modules in tiles, too, and in few of them."""
    monkeypatch.setattr(tile, "SMALL", 0)
    monkeypatch.setattr(tile, "FEWEST", 2)
    monkeypatch.setattr(tile, "WORTH", 1)


class Net(nn.Module):
    """Blocks that keep nothing of their input by themselves, and a use of each."""

    def __init__(self, use: Use) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(
            Made(lambda m, x: m.two(m.one(x * 1.5).sin())) for _ in range(2)
        )
        self.use = use
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        x = (x * self.blocks[0].one.weight[0]).cumsum(-2)  # type: ignore[union-attr, index]
        for block in self.blocks:
            x = self.use(block, x)
        return x


def adds(m: nn.Module, x: Tensor) -> Tensor:
    x += m(x)
    return x


def scales_afterwards(m: nn.Module, x: Tensor) -> Tensor:
    out: Tensor = m(x)
    x.mul_(2)
    return out + x


def scales_inside(m: nn.Module, x: Tensor) -> Tensor:
    x = x * 1.0
    m.function = lambda m, x: m.two(m.one(x.mul_(1.5)).sin())  # type: ignore[assignment]
    out: Tensor = m(x)
    return out


def scales_a_slice(m: nn.Module, x: Tensor) -> Tensor:
    out: Tensor = m(x)
    out[:, :3].mul_(2)
    return out


EDITS: dict[str, Use] = {"adds": adds, "scales": scales_afterwards}

OF_THE_OUTPUT: dict[str, Use] = {
    "relu_": lambda m, x: m(x).relu_(),
    "mul_": lambda m, x: x + m(x).mul_(2),
    "masked_fill_": lambda m, x: x + m(x).masked_fill_(x > 0, 0.0),
    "dropout": lambda m, x: x + functional.dropout(m(x), 0.3, True, True),
    "add_": lambda m, x: m(x).add_(x),
    "a slice": scales_a_slice,
}


def refusal_of(mbs: Any, loss_fn: Callable[[Tensor], Tensor], batch: Tensor, door: int) -> str:
    with pytest.raises(ReplayUnsafeError) as refused:
        through(door, mbs, loss_fn, batch)
    return str(refused.value)


def with_all_rungs(net: nn.Module, batch: Tensor, rungs: tuple[str, ...], door: int) -> Any:
    """Return a runtime in which all rungs are in use, and its loss function."""
    own, net.use = net.use, lambda m, x: x + m(x)  # type: ignore[assignment]
    found = tiled(net, batch, door, escalate=rungs)
    net.use = own
    return found


@pytest.mark.parametrize("door", [1, 3])
@pytest.mark.parametrize("rungs", RUNGS)
@pytest.mark.parametrize("edit", EDITS)
def test_an_edit_of_an_input_is_refused_before_backward(
    edit: str, rungs: tuple[str, ...], door: int
) -> None:
    net, batch = Net(EDITS[edit]), samples(1)
    mbs, loss_fn = with_all_rungs(net, batch, rungs, door)
    text = refusal_of(mbs, loss_fn, batch, door)
    assert "was edited in place" in text
    assert "x = x + m(x)" in text
    assert 'escalate=("logits", "offload")' in text
    assert all(gradient is None for gradient in grads(net))
    net.use = lambda m, x: x + m(x)  # as the error says
    wanted = whole_gradient(net, lambda twin: loss_of(twin)(batch))
    through(door, mbs, loss_fn, batch)
    assert error_of(grads(net), wanted) <= 1e-12


def test_a_block_that_edits_its_own_input_is_refused() -> None:
    net, batch = Net(scales_inside), samples(1)
    mbs, loss_fn = with_all_rungs(net, batch, ("checkpoint",), 1)
    assert "an input of Made of shape (1, 13, 6)" in refusal_of(mbs, loss_fn, batch, 1)


@pytest.mark.parametrize("edit", EDITS)
def test_the_rungs_that_the_refusal_names_are_exact(edit: str) -> None:
    net, batch = Net(EDITS[edit]), samples(1)
    wanted = whole_gradient(net, lambda twin: loss_of(twin)(batch))
    mbs, loss_fn = tiled(net, batch, escalate=("logits", "offload"))
    mbs.backward(loss_fn, batch)
    assert error_of(grads(net), wanted) <= 1e-12


@pytest.mark.parametrize("rungs", RUNGS)
@pytest.mark.parametrize("edit", OF_THE_OUTPUT)
def test_an_edit_of_an_output_is_exact(edit: str, rungs: tuple[str, ...]) -> None:
    net, batch = Net(OF_THE_OUTPUT[edit]), samples(1)
    mbs, loss_fn = tiled(net, batch, escalate=rungs)
    torch.manual_seed(3)
    wanted = whole_gradient(net, lambda twin: loss_of(twin)(batch))
    torch.manual_seed(3)
    mbs.backward(loss_fn, batch)
    assert error_of(grads(net), wanted) <= 1e-12
