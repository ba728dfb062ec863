"""What is known of torch's optimizers is what they do."""

import pytest
import torch

from elastic_mbs import MemoryBudget
from elastic_mbs.optimizer.known import one_by_one, only_in_place
from tests.helpers.guarded import layers, same


@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW", "Adagrad"])
def test_a_fused_step_whose_state_is_there_needs_nothing(name: str) -> None:
    model, optimizer = layers(name, fused=True, **({"momentum": 0.9} if name == "SGD" else {}))
    if name != "Adagrad":  # its state comes with the optimizer
        assert not only_in_place(optimizer)
        optimizer.step()
    assert only_in_place(optimizer)
    with MemoryBudget("1GiB", track=(model, optimizer)) as budget:
        before = budget.live
        optimizer.step()
        assert (budget.peak, budget.live) == (before, before)


@pytest.mark.parametrize("name", ["SGD", "Adamax", "NAdam", "RAdam", "Adadelta", "RMSprop", "Rprop", "ASGD", "Adafactor", "Muon"])
def test_torchs_optimizers_give_the_same_result_one_parameter_at_a_time(name: str) -> None:
    if not hasattr(torch.optim, name):
        pytest.skip(f"this torch has no {name}")
    (model, together), (twin, apart) = layers(name), layers(name)
    assert one_by_one(apart)
    for _ in range(2):
        together.step()
        groups = apart.param_groups
        for parameter in twin.parameters():
            apart.param_groups = [{**groups[0], "params": [parameter]}]
            apart.step()
        apart.param_groups = groups
    assert same(model.state_dict(), twin.state_dict())


def test_a_subclass_of_torchs_may_couple_its_parameters() -> None:
    model, optimizer = layers("Adam", foreach=True)
    assert one_by_one(optimizer)
    assert not one_by_one(type("Mine", (torch.optim.Adam,), {})(model.parameters()))
    assert not one_by_one(torch.optim.LBFGS(model.parameters()))
