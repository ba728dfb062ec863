"""What is said of torch's optimizers is what they do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from elastic_mbs import MemoryBudget
from elastic_mbs.optimizer.known import Need, need_of, one_by_one, only_in_place

SIDE, LAYERS = 128, 8
SIZE = SIDE * SIDE * 4  # bytes of a parameter

OPTIONS: list[tuple[str, dict[str, Any]]] = [
    ("SGD", {}),
    ("SGD", {"momentum": 0.9}),
    ("SGD", {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    ("SGD", {"maximize": True}),
    ("Adam", {}),
    ("Adam", {"weight_decay": 0.1, "amsgrad": True}),
    ("Adam", {"maximize": True}),
    ("AdamW", {}),
    ("AdamW", {"amsgrad": True}),
    ("Adamax", {"weight_decay": 0.1}),
    ("NAdam", {}),
    ("NAdam", {"weight_decay": 0.1}),
    ("RAdam", {}),
    ("RAdam", {"weight_decay": 0.1, "decoupled_weight_decay": True}),
    ("Adadelta", {}),
    ("Adagrad", {}),
    ("Adagrad", {"weight_decay": 0.1}),
    ("RMSprop", {}),
    ("RMSprop", {"momentum": 0.5, "centered": True}),
    ("Rprop", {}),
    ("ASGD", {}),
    ("Adafactor", {}),
    ("Muon", {}),
]
WITHOUT_IMPLEMENTATIONS = {"Muon"}
FUSED = {"SGD", "Adam", "AdamW", "Adagrad"}


def prepared(name: str, **options: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    cls = getattr(torch.optim, name, None)
    if cls is None:
        pytest.skip(f"this torch has no {name}")
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(SIDE, SIDE, bias=False) for _ in range(LAYERS)))
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    return model, cls(model.parameters(), **options)


@pytest.mark.parametrize("foreach", [False, True], ids=["loop", "foreach"])
@pytest.mark.parametrize(("name", "options"), OPTIONS, ids=lambda value: "-".join(value) if isinstance(value, dict) else value)
def test_what_a_step_is_said_to_need_bounds_what_it_takes_closely(name: str, options: dict[str, Any], foreach: bool) -> None:
    implementation = {} if name in WITHOUT_IMPLEMENTATIONS else {"foreach": foreach}
    model, optimizer = prepared(name, **options, **implementation)
    with MemoryBudget("1GiB", track=(model, optimizer)) as budget:
        for first in (True, False):
            need = need_of(optimizer)
            budget.reset_peak()
            before = budget.live
            optimizer.step()
            kept, peak = budget.live - before, budget.peak - before
            small = LAYERS * 2**10  # counters, and what is there once a row
            assert kept <= need.state + small
            assert peak <= need.total + small
            assert need.total - peak <= 4 * SIZE + (LAYERS * SIZE if foreach else 0), "a bound that says nothing"
            assert (need.state > 0) == (first and kept > small)


@pytest.mark.parametrize("name", sorted(FUSED))
def test_a_fused_step_whose_state_is_there_needs_nothing(name: str) -> None:
    model, optimizer = prepared(name, fused=True, **({"momentum": 0.9} if name == "SGD" else {}))
    if name != "Adagrad":  # its state comes with the optimizer
        assert not only_in_place(optimizer)
        optimizer.step()
    assert only_in_place(optimizer)
    assert need_of(optimizer) == Need(0, 0)
    with MemoryBudget("1GiB", track=(model, optimizer)) as budget:
        before = budget.live
        optimizer.step()
        assert (budget.peak, budget.live) == (before, before)


def test_a_subclass_of_torchs_may_couple_its_parameters() -> None:
    class Mine(torch.optim.Adam):
        pass

    model, optimizer = prepared("Adam", foreach=True)
    assert one_by_one(optimizer)
    assert not one_by_one(Mine(model.parameters()))
    assert not one_by_one(torch.optim.LBFGS(model.parameters()))


def test_of_an_optimizer_of_others_two_of_each_parameter_are_reckoned_with_until_it_is_learned() -> None:
    class Mine(torch.optim.Adam):
        pass

    model, _ = prepared("Adam")
    optimizer = Mine(model.parameters())
    assert need_of(optimizer) == Need(0, 2 * LAYERS * SIZE)
    assert need_of(optimizer, learned=5) == Need(0, 5)
