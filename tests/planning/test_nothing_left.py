"""A plan leaves no fake tensors behind: it names the place, and accuses nobody else."""

import functools
import gc
import random
import signal
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from elastic_mbs import ElasticMBS, LossError, UsageError
from tests.helpers.steps import quiet

Loss = Callable[[Tensor], Tensor]
TABLE: dict[str, Tensor] = {}


@functools.lru_cache
def mask(length: int) -> Tensor:
    return torch.ones(length)


class Trainer:
    """A user's trainer, with a mask that is made once."""

    shared: Tensor | None = None

    def __init__(self, net: nn.Module) -> None:
        self.net = net
        self.mask: Tensor | None = None
        self.seen: list[Tensor] = []

    def by_attribute(self, piece: Tensor) -> Tensor:
        if self.mask is None:
            self.mask = torch.ones(3)
        loss: Tensor = (self.net(piece) * self.mask).square().mean()
        return loss

    def by_class(self, piece: Tensor) -> Tensor:
        if Trainer.shared is None:
            Trainer.shared = torch.ones(3)
        loss: Tensor = (self.net(piece) * Trainer.shared).square().mean()
        return loss

    def by_list(self, piece: Tensor) -> Tensor:
        self.seen.append(piece[:1])  # a view of the batch
        loss: Tensor = self.net(piece).square().mean()
        return loss


class Slots:
    __slots__ = ("table",)

    def __init__(self) -> None:
        self.table: Tensor | None = None


def by_slot(net: nn.Module) -> Loss:
    slots = Slots()

    def loss_fn(piece: Tensor) -> Tensor:
        if slots.table is None:
            slots.table = torch.ones(3)
        loss: Tensor = (net(piece) * slots.table).square().mean()
        return loss

    return loss_fn


def by_closure(net: nn.Module) -> Loss:
    table: Tensor | None = None

    def loss_fn(piece: Tensor) -> Tensor:
        nonlocal table
        if table is None:
            table = torch.ones(3)
        loss: Tensor = (net(piece) * table).square().mean()
        return loss

    return loss_fn


def by_view_of_a_parameter(net: Any) -> Loss:
    def loss_fn(piece: Tensor) -> Tensor:
        weight = TABLE.setdefault("w", net.weight.detach().t())
        loss: Tensor = (piece @ weight).square().mean() + net(piece).square().mean()
        return loss

    return loss_fn


def by_cache(net: nn.Module) -> Loss:
    return lambda piece: (net(piece) * mask(3)).square().mean()


def by_view_in_a_cache(net: nn.Module) -> Loss:
    return lambda piece: (net(piece) * mask(4)[:3]).square().mean()


KEEPERS: dict[str, tuple[Callable[[nn.Module], Loss], str]] = {
    "attribute": (lambda net: Trainer(net).by_attribute, "the attribute 'mask' of a Trainer"),
    "class": (lambda net: Trainer(net).by_class, "the attribute 'shared' of the class Trainer"),
    "list": (lambda net: Trainer(net).by_list, "the attribute 'seen' of a Trainer"),
    "slot": (by_slot, "the attribute 'table' of a Slots"),
    "closure": (by_closure, r"the variable 'table' of by_closure\.<locals>\.loss_fn"),
    "view of a parameter": (by_view_of_a_parameter, "the variable 'TABLE' of the module tests"),
    "cache": (by_cache, r"the cache of .*\.mask \(mask\.cache_clear\(\) empties it\)"),
    "view in a cache": (by_view_in_a_cache, r"the cache of .*\.mask \(mask\.cache_clear\(\)"),
}


@pytest.fixture(autouse=True)
def caches_are_empty() -> None:
    mask.cache_clear()
    TABLE.clear()
    Trainer.shared = None


def reads_a_value(loss_fn: Loss) -> Loss:
    def reading(piece: Tensor) -> Tensor:
        loss = loss_fn(piece)
        return loss * float(loss.item() < 1e9)

    return reading


@pytest.mark.parametrize("planned", [True, False], ids=["a plan", "no plan"])
@pytest.mark.parametrize("case", KEEPERS)
def test_what_a_loss_function_keeps_is_named_whether_there_is_a_plan_or_not(
    case: str, planned: bool
) -> None:
    net, batch = nn.Linear(6, 3), torch.randn(8, 6)
    make, place = KEEPERS[case]
    loss_fn = make(net)
    with pytest.raises(UsageError, match=f"planning has left .* in {place}"):
        ElasticMBS(net, **quiet()).plan(loss_fn if planned else reads_a_value(loss_fn), batch)


@pytest.mark.parametrize("case", ["cache", "view in a cache", "attribute", "slot", "closure"])
def test_a_cache_that_a_batch_has_filled_is_planned_as_the_error_advises(case: str) -> None:
    net, batch = nn.Linear(6, 3), torch.randn(8, 6)
    loss_fn, mbs = KEEPERS[case][0](net), ElasticMBS(net, **quiet())
    mbs.verify(loss_fn, batch)
    assert mbs.plan(loss_fn, batch).reason is None
    assert float(mbs.backward(loss_fn, batch)) > 0


def test_an_error_of_the_loss_functions_own_gets_a_note() -> None:
    net = nn.Linear(6, 3)
    trainer = Trainer(net)

    def loss_fn(piece: Tensor) -> Any:
        trainer.by_attribute(piece)

    with pytest.raises(LossError) as caught:
        ElasticMBS(net, **quiet()).plan(loss_fn, torch.randn(8, 6))
    assert "the attribute 'mask' of a Trainer" in caught.value.__notes__[-1]


class Keeps(nn.Module):
    """A model that keeps what it makes: in attributes, buffers, lists and dicts of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)
        self.table: Tensor | None = None
        self.lists: list[Tensor] = []
        self.dicts: dict[str, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        self.table = torch.ones(3)
        self.lists.append(x)
        self.dicts["x"] = x[:2]
        self.register_buffer("late", torch.zeros(2))
        out: Tensor = self.layer(x) * self.table
        return out


def cycle(piece: Tensor) -> Tensor:
    own: list[Any] = [piece.square()]
    own.append(own)
    loss: Tensor = own[0].mean()
    return loss


@pytest.mark.parametrize("read", [False, True], ids=["a plan", "no plan"])
@pytest.mark.parametrize("compare", [False, True])
def test_a_function_that_keeps_nothing_is_not_accused(read: bool, compare: bool) -> None:
    net = Keeps()

    def plain(piece: Tensor) -> Tensor:
        loss: Tensor = net(piece).square().mean()
        return loss + cycle(piece)

    loss_fn = reads_a_value(plain) if read else plain
    mbs = ElasticMBS(net, **quiet())
    for _ in range(2):
        assert (mbs.plan(loss_fn, torch.randn(8, 6), compare=compare).reason is None) is not read
    assert not [each for each in gc.get_objects() if issubclass(type(each), FakeTensor)]
    assert mbs.backward(loss_fn, torch.randn(8, 6)).ooms == 0


def switching(net: nn.Module) -> Loss:
    teacher = nn.Sequential(nn.Dropout(0.5))

    def loss_fn(piece: Tensor) -> Tensor:
        teacher.train(not teacher.training)
        loss: Tensor = teacher(net(piece)).square().mean()
        return loss

    return loss_fn


def drawing(generator: Any, draw: Callable[[Any], float]) -> Callable[[nn.Module], Loss]:
    def make(net: nn.Module) -> Loss:
        box = {"own": [generator()]}
        return lambda piece: (net(piece) * draw(box["own"][0])).square().mean()

    return make


OUTSIDE = {
    "a switch of modes": switching,
    "random": drawing(lambda: random.Random(3), lambda own: own.random()),
    "numpy": drawing(lambda: numpy.random.default_rng(3), lambda own: float(own.random())),
    "numpy, legacy": drawing(
        lambda: numpy.random.RandomState(3), lambda own: float(own.random_sample())
    ),
}


@pytest.mark.parametrize("make", OUTSIDE.values(), ids=OUTSIDE)
def test_training_is_the_same_whether_it_was_planned_or_not(
    make: Callable[[nn.Module], Loss],
) -> None:
    def losses(*, planned: bool) -> list[float]:
        torch.manual_seed(0)
        net, batch = nn.Linear(6, 3).double(), torch.randn(8, 6, dtype=torch.float64)
        loss_fn, mbs = make(net), ElasticMBS(net, **quiet())
        if planned:
            assert mbs.plan(loss_fn, batch).reason is None
        torch.manual_seed(1)
        return [float(mbs.backward(loss_fn, batch)) for _ in range(3)]

    assert losses(planned=True) == losses(planned=False)


def test_an_interrupt_waits_for_the_end_of_the_trace() -> None:
    net, batch, ended = nn.Linear(6, 3), torch.randn(8, 6), list[int]()

    def loss_fn(piece: Tensor) -> Tensor:
        signal.raise_signal(signal.SIGINT)
        loss: Tensor = net(piece).square().mean()
        ended.append(len(piece))
        return loss

    mbs, usual = ElasticMBS(net, **quiet()), signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        mbs.plan(loss_fn, batch)
    assert ended == [2]  # the trace that it struck, and no other
    assert signal.getsignal(signal.SIGINT) is usual
    assert torch.ones(2).tolist() == [1, 1]
    assert mbs.plan(lambda piece: net(piece).square().mean(), batch).reason is None


def test_a_second_interrupt_goes_through_at_once() -> None:
    net, ended = nn.Linear(6, 3), list[int]()

    def loss_fn(piece: Tensor) -> Tensor:
        for _ in range(2):
            signal.raise_signal(signal.SIGINT)
        ended.append(0)
        loss: Tensor = net(piece).square().mean()
        return loss

    with pytest.raises(KeyboardInterrupt):
        ElasticMBS(net, **quiet()).plan(loss_fn, torch.randn(8, 6))
    assert ended == []


class Remembers(torch.optim.SGD):
    """An optimizer with an object of its own, which counts and averages."""

    class Memory:
        count = 0
        mean: Tensor | None = None

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1)
        self.memory = self.Memory()

    def step(self, closure: Any = None) -> Any:
        self.memory.count += 1
        for group in self.param_groups:
            for p in group["params"]:
                self.memory.mean = p.grad * 2
        return super().step()


def test_an_optimizers_own_objects_are_as_they_were_after_a_plan() -> None:
    net = nn.Linear(6, 3)
    optimizer = Remembers(net.parameters())
    report = ElasticMBS(net, **quiet()).plan(
        lambda piece: net(piece).square().mean(), torch.randn(8, 6), optimizer=optimizer
    )
    assert report.reason is None
    assert vars(optimizer.memory) == {}
