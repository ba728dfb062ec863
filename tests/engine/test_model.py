"""The inventory of a model: its modules, leaves and devices.

A model that cannot be trained in pieces is refused by name.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from elastic_mbs.engine.shared.trained_model import _WRAPPERS, TrainedModel
from elastic_mbs.errors import UnsupportedError, UsageError


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2), nn.Linear(2, 1))


def agrees(inventory: TrainedModel, *roots: nn.Module) -> bool:
    """Return whether it has exactly the modules and trainable parameters of `roots`, each once."""
    modules = {id(module) for root in roots for module in root.modules()}
    leaves = {
        id(parameter)
        for root in roots
        for parameter in root.parameters()
        if parameter.requires_grad
    }
    found = list(map(id, inventory.modules)), list(map(id, inventory.leaves))
    return (set(found[0]), set(found[1])) == (modules, leaves) and (
        len(found[0]),
        len(found[1]),
    ) == (len(modules), len(leaves))


def test_every_module_and_trainable_leaf_is_there_once() -> None:
    first, second = net(), net().append(nn.Linear(1, 1, bias=False))
    second[2].weight = first[2].weight  # a tied weight
    first[0].weight.requires_grad_(False)
    assert agrees(TrainedModel([first, second, first[0]]), first, second)


CHANGES: dict[str, Callable[[nn.Sequential], object]] = {
    "freeze": lambda model: model[0].weight.requires_grad_(False),
    "add child": lambda model: model.append(nn.Linear(1, 1)),
    "replace child": lambda model: model.__setitem__(2, nn.Linear(2, 1)),
    "remove child": lambda model: model.__delitem__(2),
    "replace parameter": lambda model: setattr(model[0], "weight", nn.Parameter(torch.zeros(2, 3))),
    "parametrize": lambda model: nn.utils.parametrizations.weight_norm(model[0]),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_change_of_the_model_is_found_once(change: Callable[[nn.Sequential], object]) -> None:
    model = net()
    inventory = TrainedModel([model])
    generation = inventory.generation
    assert not inventory.refresh()
    change(model)
    assert inventory.refresh()
    assert inventory.generation == generation + 1
    assert agrees(inventory, model)
    assert not inventory.refresh()


def test_leaves_go_by_their_parameter_names() -> None:
    first, second = net(), nn.Linear(1, 1)
    inventory = TrainedModel([first, second])
    assert inventory.name_of(dict(first.named_parameters())["2.bias"]) == "parameter '2.bias'"
    assert inventory.name_of(second.weight) == "parameter 'weight'"
    assert inventory.name_of(torch.zeros(2, 3)) == "a leaf of shape (2, 3) outside the model"


def test_devices_come_in_the_order_met() -> None:
    mixed = nn.Sequential(nn.Linear(1, 1, device="meta"), nn.Linear(1, 1))
    assert TrainedModel([mixed]).devices() == [torch.device("meta"), torch.device("cpu")]
    assert TrainedModel([nn.Identity()]).devices() == [torch.device("cpu")]
    assert TrainedModel([nn.BatchNorm1d(1, affine=False, device="meta")]).devices() == [
        torch.device("meta")
    ]


@pytest.mark.parametrize(
    ("module", "training", "expected"),
    [
        (nn.BatchNorm1d(2), True, True),
        (nn.BatchNorm1d(2), False, False),
        (nn.BatchNorm1d(2, track_running_stats=False), False, True),
        (nn.SyncBatchNorm(2), True, True),
        (nn.LayerNorm(2), True, False),
        (nn.InstanceNorm1d(2), True, False),
    ],
)
def test_batch_norm_that_would_use_the_batch_is_known(
    module: nn.Module, training: bool, expected: bool
) -> None:
    assert (
        TrainedModel([nn.Sequential(nn.Identity(), module).train(training)]).normalises_batch()
        is expected
    )


NO_MODEL: list[tuple[Any, str]] = [
    (None, "NoneType"),
    ("model", "str"),
    (lambda self: self, "function"),
    *(
        (value, "is a list; give a torch.nn.Module")
        for value in ([], [net(), 3], [nn.Linear], [torch.zeros(1)])
    ),
    ([nn.Sequential(nn.LazyLinear(3))], "LazyLinear has parameters without a shape yet"),
]


@pytest.mark.parametrize(("value", "says"), NO_MODEL)
def test_non_models_and_lazy_models_are_refused_by_type(value: Any, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        TrainedModel(value)


@pytest.mark.parametrize("name", ["DataParallel", "FullyShardedDataParallel", "FSDPModule"])
def test_wrappers_of_other_ranks_are_refused_by_name_at_any_depth(name: str) -> None:
    # FSDP2 makes a new class for each class that it wraps, too.
    wrapper = type("Own", (type(name, (nn.Module,), {}),), {})()
    for model in (wrapper, nn.Sequential(wrapper)):
        with pytest.raises(UnsupportedError, match="Own runs collectives or replicas"):
            TrainedModel(model)


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")  # torch's own advice
@pytest.mark.filterwarnings("ignore:.*torch.jit.*:FutureWarning")  # the same since torch 2.14
def test_a_module_compiled_by_torch_jit_is_refused_by_name() -> None:
    """Its parameters lie in no dict, so an inventory of them would end in a raw TypeError."""
    traced = torch.jit.trace(nn.Linear(2, 2), torch.zeros(1, 2))
    with pytest.raises(UnsupportedError, match=r"Linear is compiled by torch\.jit"):
        TrainedModel(nn.Sequential(traced))


def test_the_names_of_wrappers_are_those_of_torch() -> None:
    fsdp = pytest.importorskip("torch.distributed.fsdp")
    for name in _WRAPPERS:
        assert hasattr(fsdp, name) or hasattr(nn.parallel, name)
