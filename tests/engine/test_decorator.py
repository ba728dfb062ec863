"""Door 2, the decorator: whatever is decorated stays the function that it was, and each instance has a runtime of its own."""

import copy
import functools
import gc
import pickle
import weakref
from dataclasses import dataclass, field
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from elastic_mbs import ElasticMBS, UsageError, elastic_step
from elastic_mbs.testing import InjectOOM
from tests.helpers.steps import FailOn, Pair, cross_entropy, elastic, grads, mlp, off_by, pairs, quiet, whole_gradient

pytestmark = pytest.mark.injectable


@pytest.mark.no_oom_injection
def test_the_decorator_passes_other_arguments_and_keeps_the_functions_name() -> None:
    model, seen = mlp(), []

    @elastic_step(model, micro_batch_size=4, **quiet())
    def train_step(batch: Pair, factor: float, *rest: object, flag: bool = False, **more: object) -> Tensor:
        """Its own words."""
        seen.append((len(batch[0]), factor, rest, flag, more))
        return cross_entropy(model)(batch) * factor

    result = train_step(pairs(), 2.0, "a", flag=True, other=3)
    assert seen == [(4, 2.0, ("a",), True, {"other": 3})] * 2
    assert float(result) == pytest.approx(2 * cross_entropy(model)(pairs()).item())
    assert (train_step.__name__, train_step.__doc__) == ("train_step", "Its own words.")  # type: ignore[attr-defined]  # functools.wraps
    assert isinstance(train_step.mbs, ElasticMBS)
    assert train_step.mbs.last_result is result


@pytest.mark.parametrize("door", [1, 2])
def test_arguments_of_any_name_reach_the_step_function(door: int) -> None:
    """`loss_fn`, `batch` and `self` are names of the engine's own parameters, and may be the user's too."""
    model = mlp()

    def step(piece: Pair, loss_fn: int, batch: int, self: int, fn: int) -> Tensor:
        assert (loss_fn, batch, self, fn) == (1, 2, 3, 4)
        return cross_entropy(model)(piece)

    if door == 1:
        elastic(model, micro_batch_size=4).backward(step, pairs(), loss_fn=1, batch=2, self=3, fn=4)
    else:
        elastic_step(model, micro_batch_size=4, **quiet())(functools.partial(step, batch=2))(pairs(), loss_fn=1, self=3, fn=4)
    assert off_by(model, whole_gradient(model, lambda net: cross_entropy(net)(pairs()))) <= 1e-12


@dataclass
class _Trainer:
    """It has no hash."""

    model: nn.Module
    fail: FailOn = field(default_factory=lambda: FailOn(1), compare=False)

    @elastic_step(lambda self: self.model, micro_batch_size=4, **quiet())
    def train_step(self, batch: Pair, factor: float = 1.0) -> Tensor:
        """Its own words."""
        self.fail()
        return cross_entropy(self.model)(batch) * factor


@pytest.mark.no_oom_injection
def test_the_decorator_on_a_method_gives_each_instance_its_own_runtime() -> None:
    batch = pairs()
    first, second = _Trainer(mlp(seed=1)), _Trainer(mlp(seed=2))
    for trainer in (first, second):
        result = trainer.train_step(batch, factor=3.0)
        assert result.ooms == 1
        assert off_by(trainer.model, whole_gradient(trainer.model, lambda net: cross_entropy(net)(batch) * 3.0)) <= 1e-12
    assert _Trainer.train_step.mbs(first) is not _Trainer.train_step.mbs(second)
    assert _Trainer.train_step.mbs(first) is _Trainer.train_step.mbs(first)
    assert _Trainer.train_step.mbs(first).stats.ooms == 1
    assert _Trainer.train_step.__doc__ == "Its own words."


class _OwnModel(nn.Module):
    """As a LightningModule: the model is the instance itself."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()

    @elastic_step(lambda self: self, micro_batch_size=4, **quiet())
    def train_step(self, batch: Pair) -> Tensor:
        return cross_entropy(self.net)(batch)


@pytest.mark.parametrize("make", [lambda: _Trainer(mlp()), _OwnModel])
def test_instances_with_a_decorated_method_are_freed(make: Any) -> None:
    trainer = make()
    trainer.train_step(pairs())
    gone = weakref.ref(trainer), weakref.ref(next(trainer.train_step.__func__.mbs(trainer)._context.model.modules[0].parameters()))
    del trainer
    gc.collect()
    assert [reference() for reference in gone] == [None, None]


def test_a_sequence_of_modules_is_one_step() -> None:
    encoder, decoder = nn.Linear(6, 8).double(), nn.Linear(8, 4).double()
    batch = pairs()
    both = nn.Sequential(encoder, decoder)
    wanted = whole_gradient(both, lambda net: cross_entropy(net)(batch))
    for n in (0, 4, 9, 13, 19):
        both.zero_grad()
        step = elastic_step([encoder, decoder], micro_batch_size=4, **quiet())(cross_entropy(both))
        with InjectOOM(at=[n]):
            step(batch)
        assert off_by(both, wanted) <= 1e-12


class _BatchNormTrainer:
    def __init__(self) -> None:
        self.model = self.net(0)

    @staticmethod
    def net(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Tanh(), nn.Linear(3, 1)).double()

    @elastic_step(lambda self: self.model, **quiet(micro_batch_size=4, min_micro_batch_size=4))
    def step(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.model(x).square().mean())


@pytest.mark.no_oom_injection
@pytest.mark.parametrize("copied", [None, copy.copy, copy.deepcopy, lambda trainer: pickle.loads(pickle.dumps(trainer))])
def test_an_instance_that_gets_another_model_or_is_a_copy_gets_another_runtime(copied: Any) -> None:
    """The old model's was kept, by a shallow copy of the instance, too: what a failed attempt did to the new one's buffers was not put back."""
    x, runtime_of = torch.randn(8, 4, dtype=torch.float64), _BatchNormTrainer.step.mbs

    def run(at: int) -> tuple[nn.Module, int]:
        first = _BatchNormTrainer()
        first.step(x)
        old = runtime_of(first)
        other = copied(first) if copied else first
        other.model = first.net(1)
        other.step(x)
        with InjectOOM(at=[at]):
            ooms = other.step(x).ooms
        assert runtime_of(other) is runtime_of(other) is not old
        assert (runtime_of(first) is old) is (copied is not None)
        return other.model, ooms

    expected, _ = run(0)
    ooms = 0
    for at in range(1, 40, 3):
        found, failed = run(at)
        ooms += failed
        for a, b in zip(found.buffers(), expected.buffers(), strict=True):
            assert torch.allclose(a, b, rtol=0, atol=1e-12)
        assert off_by(found, grads(expected)) <= 1e-12
    assert ooms


def test_a_list_of_networks_that_is_made_anew_for_each_call_has_one_runtime() -> None:
    class Trainer:
        net = mlp()

        @elastic_step(lambda self: nn.ModuleList([self.net]), micro_batch_size=4, **quiet())
        def train_step(self, batch: Pair) -> Tensor:
            return cross_entropy(self.net)(batch)

    trainer = Trainer()
    for _ in range(2):
        trainer.train_step(pairs())
    assert Trainer.train_step.mbs(trainer).stats.calls == 2


def test_an_instance_with_nowhere_to_keep_its_runtime_is_refused() -> None:
    class Slots:
        __slots__ = ("model",)

        @elastic_step(lambda self: self.model)
        def train_step(self, batch: Pair) -> Tensor:
            raise AssertionError("never called")

    with pytest.raises(UsageError, match="Slots has no __dict__ to keep its runtime in"):
        Slots().train_step(pairs())
