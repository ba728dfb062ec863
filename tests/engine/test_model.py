"""The inventory of a model: its modules, leaves and devices.

A model that cannot be trained in pieces is refused by name.
"""

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from elastic_mbs import ElasticMBS
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
    first, second, third = (torch.device("cuda", index) for index in (1, 0, 2))
    model: Any = net()
    for parameter, device in zip(model.parameters(), (first, second, first), strict=False):
        parameter.__class__ = type("There", (nn.Parameter,), {"device": device})
    model[1].running_mean.__class__ = type("There", (torch.Tensor,), {"device": third})
    cpu = torch.device("cpu")
    assert TrainedModel([model]).devices() == [first, second, cpu, third]
    assert TrainedModel([nn.Identity()]).devices() == [cpu]


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


@pytest.mark.parametrize("name", ["DataParallel", "FullyShardedDataParallel"])
def test_wrappers_of_other_ranks_are_refused_by_name_at_any_depth(name: str) -> None:
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


# ---------------------------------------------------------------------- models without values


def on_meta() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)).to("meta")


def test_a_model_on_meta_is_refused_and_what_the_error_advises_is_exact() -> None:
    torch.manual_seed(0)
    batch = torch.randn(48, 8, dtype=torch.float64)
    nets = [nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)).double() for _ in range(5)]
    params, _ = torch.func.stack_module_state(nets)
    base = on_meta().double()
    with pytest.raises(UsageError, match=r"of Sequential are on 'meta'.*nn\.ParameterList"):
        ElasticMBS(base)
    held = nn.ParameterList(params.values())
    stacked = dict(zip(params, held, strict=True))

    def loss(piece: torch.Tensor) -> torch.Tensor:
        def one(own: Any) -> torch.Tensor:
            result: torch.Tensor = torch.func.functional_call(base, own, (piece,))
            return result

        return torch.vmap(one)(stacked).square().mean()

    wanted = torch.autograd.grad(loss(batch), [*held])
    ElasticMBS(held, micro_batch_size=16).backward(loss, batch)
    for leaf, right in zip(held, wanted, strict=True):
        assert leaf.grad is not None
        assert (leaf.grad - right).abs().max() <= 1e-12 * right.abs().max()


class _BringsValues:
    """A stand-in for accelerate's hook, which has the values while its module runs."""

    def __init__(self, execution_device: Any) -> None:
        self.execution_device = execution_device


class _Hooks:
    """A stand-in for its list of hooks."""

    def __init__(self, *hooks: Any) -> None:
        self.hooks = hooks


def test_the_device_of_an_offloaded_model_is_the_one_that_its_values_are_brought_to() -> None:
    model: Any = on_meta()
    model[0]._hf_hook = _Hooks(_BringsValues(None), _BringsValues("cpu"))
    assert TrainedModel(model).devices() == [torch.device("cpu")]
    model[1]._hf_hook = _BringsValues(torch.device("cuda", 1))
    assert sorted(map(str, TrainedModel(model).devices())) == ["cpu", "cuda:1"]


def test_a_part_of_a_model_on_meta_is_no_place_for_its_batch() -> None:
    model = nn.Sequential(nn.Linear(8, 8), on_meta())
    assert TrainedModel(model).devices() == [torch.device("cpu")]
    mbs = ElasticMBS([model, nn.Linear(8, 8)], micro_batch_size=4)
    assert mbs.evaluate(model[0], torch.ones(8, 8)).shape == (8, 8)


def test_an_offloaded_model_is_evaluated_as_it_is_whole() -> None:
    accelerate = pytest.importorskip("accelerate")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 3)).double().eval()
    batch = torch.randn(32, 8, dtype=torch.float64)
    wanted = model(batch).detach()
    accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
    found = ElasticMBS(model, micro_batch_size=8).evaluate(model, batch)
    assert (found - wanted).abs().max() <= 1e-12


class GradSampleModule(nn.Module):
    """A stand-in for opacus' module."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        module.register_forward_hook(self.capture)

    def forward(self, x: torch.Tensor) -> Any:
        return self.module(x)

    def capture(self, module: nn.Module, inputs: Any, output: Any) -> None:
        """Keep what the gradients of single samples are made of."""


@pytest.fixture(params=[False, True], ids=["stand-in", "opacus"])
def make_private(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    if request.param:
        return pytest.importorskip("opacus").GradSampleModule
    monkeypatch.setattr(GradSampleModule, "__module__", "opacus.grad_sample.grad_sample_module")
    monkeypatch.setitem(sys.modules, "opacus", ModuleType("opacus"))
    return GradSampleModule


PRIVATE = r"trained privately by opacus.*BatchMemoryMan"


def test_training_a_model_that_opacus_trains_is_refused_by_name_and_evaluating_it_is_not(
    make_private: Any,
) -> None:
    inner, x = nn.Linear(3, 2), torch.randn(4, 3)
    private = make_private(inner)

    def loss_fn(b: torch.Tensor) -> Any:
        return private(b).mean()

    for model in (private, [nn.Linear(2, 2), nn.Sequential(private)], inner):
        mbs = ElasticMBS(model, micro_batch_size=2)
        for door in (mbs.backward, mbs.verify, mbs.plan):
            with pytest.raises(UnsupportedError, match=PRIVATE):
                door(loss_fn, x)
        with pytest.raises(UnsupportedError, match=PRIVATE):
            next(iter(mbs.micro_batches(x)))
        with pytest.raises(UnsupportedError, match=PRIVATE):
            mbs.backward_embeddings(private, torch.mean, x)
        assert inner.weight.grad is None
        sizes = list[int]()

        def predict(b: torch.Tensor, sizes: list[int] = sizes) -> Any:
            sizes.append(len(b))
            return private(b)

        assert torch.equal(mbs.evaluate(predict, x), private(x).detach())
        assert sizes == [2, 2]
    plain = ElasticMBS(private, enabled=False)  # it splits nothing
    assert plain.backward(loss_fn, x).partition == ((0, 4),)
    assert plain.evaluate(private, x).shape == (4, 2)


@pytest.mark.parametrize("calls", [0, 1])
def test_a_model_that_becomes_private_after_a_call_is_refused_by_name(
    make_private: Any, calls: int
) -> None:
    inner, x = nn.Linear(3, 2), torch.randn(4, 3)
    mbs = ElasticMBS(inner)

    def loss_fn(b: torch.Tensor) -> Any:
        return inner(b).mean()

    for _ in range(calls):
        mbs.backward(loss_fn, x)
    inner.zero_grad()
    make_private(inner)
    with pytest.raises(UnsupportedError, match=PRIVATE):
        mbs.backward(loss_fn, x)
    assert inner.weight.grad is None
