"""State of an optimizer outside `optimizer.state` is rolled back whole, or the step is refused."""

import itertools
import random
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from elastic_mbs import ElasticMBS, UsageError
from elastic_mbs.testing import InjectOOM

Scaled = Callable[["Own", Tensor, Tensor], Tensor]  # the change of a parameter, and its state


class Own(torch.optim.Optimizer):
    """An optimizer that changes each parameter by what `rule` makes of its gradient."""

    def __init__(self, parameters: Any, rule: Scaled, **attributes: Any) -> None:
        super().__init__(list(parameters), {})
        self.rule = rule
        vars(self).update(attributes)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # torch's is wider
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(self.rule(self, p, p.grad) * 0.1)


class Average:
    """An object with a running average, and a count of its values."""

    def __init__(self) -> None:
        self.mean: Tensor | None = None
        self.count = 0

    def __call__(self, value: Tensor) -> Tensor:
        self.count += 1
        self.mean = value.clone() if self.mean is None else self.mean * 0.9
        self.mean.add_(value * self.count)
        return self.mean


class Slotted:
    """The same, without a dict."""

    __slots__ = ("__sum", "count")
    __sum: Tensor

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, value: Tensor) -> Tensor:
        self.count += 1
        self.__sum = value * 2 if self.count == 1 else self.__sum + value * self.count
        return self.__sum


@dataclass
class History:
    """The last values, and a set of the numbers that were seen."""

    last: deque[Tensor] = field(default_factory=lambda: deque(maxlen=2))
    seen: set[int] = field(default_factory=set)

    def __call__(self, value: Tensor) -> Tensor:
        self.seen.add(len(self.seen))
        self.last.append(value * len(self.seen))
        return torch.stack([*self.last]).sum(0)


class Halves(Tensor):
    """A tensor that is made of two others, and knows few operations, as quantised states are."""

    @staticmethod
    def __new__(cls, high: Tensor, low: Tensor) -> "Halves":
        made: Halves = Tensor._make_wrapper_subclass(cls, high.shape, dtype=high.dtype)
        return made

    def __init__(self, high: Tensor, low: Tensor) -> None:
        self.high, self.low = high, low

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["high", "low"], None

    @classmethod
    def __tensor_unflatten__(cls, inner: Any, meta: Any, size: Any, stride: Any) -> "Halves":
        return cls(inner["high"], inner["low"])

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch leaves func out
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise NotImplementedError(f"{cls.__name__} does not know {func}")


def in_the_state(kind: type, own: Own, p: Tensor, gradient: Tensor) -> Tensor:
    result: Tensor = own.state[p].setdefault("pre", kind())(gradient)
    return result


def in_an_attribute(own: Any, p: Tensor, gradient: Tensor) -> Tensor:
    result: Tensor = own.pre[p.dim()](gradient)
    return result


def in_a_module(own: Any, p: Tensor, gradient: Tensor) -> Tensor:
    average = own.average.weight if p.dim() == 2 else own.average.bias
    torch._foreach_lerp_([average], [gradient * 2], 0.5)
    own.average.seen = getattr(own.average, "seen", 0) + 1
    result: Tensor = average * own.average.seen
    return result


def in_the_parameter(own: Any, p: Any, gradient: Tensor) -> Tensor:
    p.average = gradient * 2 if not hasattr(p, "average") else p.average * 0.5 + gradient
    average: Tensor = p.average
    return average


def in_a_closure() -> Scaled:
    count = 0
    sums: dict[int, Tensor] = {}

    def rule(own: Own, p: Tensor, gradient: Tensor) -> Tensor:
        nonlocal count
        count += 1
        sums[p.dim()] = sums.get(p.dim(), torch.zeros_like(p)) + gradient * count
        return sums[p.dim()]

    return rule


def in_two_halves(own: Own, p: Tensor, gradient: Tensor) -> Tensor:
    state: Any = own.state[p]
    if "sum" not in state:
        state["sum"] = Halves(gradient * 2, gradient * 0.5)
    state["sum"].high.add_(gradient * 0.5)
    state["sum"].low = state["sum"].low * 0.5
    result: Tensor = state["sum"].high + state["sum"].low
    return result


def noisy(own: Any, p: Tensor, gradient: Tensor) -> Tensor:
    noise = torch.randn(p.shape, generator=own.generator, dtype=p.dtype)
    result: Tensor = gradient * own.host.random() + noise * float(own.array.normal())
    return result


def in_an_array(own: Any, p: Tensor, gradient: Tensor) -> Tensor:
    own.counts[p.dim()] += 1
    return gradient * float(own.counts[p.dim()])


class Wrapper(torch.optim.Optimizer):
    """A wrapper whose inner optimizer keeps its state in an object."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner
        super().__init__(inner.param_groups, {})

    def step(self, closure: Any = None) -> Any:
        return self.inner.step()


def _of_numpy(own: Any) -> torch.optim.Optimizer:
    numpy = pytest.importorskip("numpy")
    return Own(
        own,
        noisy,
        generator=torch.Generator().manual_seed(1),
        host=random.Random(1),
        array=numpy.random.default_rng(1),
    )


def _counting(own: Any) -> torch.optim.Optimizer:
    return Own(own, in_an_array, counts=pytest.importorskip("numpy").zeros(3))


MAKERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "an object in the state": lambda own: Own(own, partial(in_the_state, Average)),
    "one with slots": lambda own: Own(own, partial(in_the_state, Slotted)),
    "a dataclass": lambda own: Own(own, partial(in_the_state, History)),
    "an attribute": lambda own: Own(own, in_an_attribute, pre={1: Average(), 2: Average()}),
    "a module": lambda own: Own(own, in_a_module, average=nn.Linear(4, 3).double()),
    "an attribute of the parameter": lambda own: Own(own, in_the_parameter),
    "a closure": lambda own: Own(own, in_a_closure()),
    "a tensor made of tensors": lambda own: Own(own, in_two_halves),
    "a wrapper": lambda own: Wrapper(Own(own, in_an_attribute, pre={1: Average(), 2: Average()})),
    "generators": _of_numpy,
    "an array": _counting,
}


def trained(make: Callable[[Any], torch.optim.Optimizer], at: int) -> tuple[list[Tensor], int]:
    """Return the weights after three steps, the second of which is struck; and its operations."""
    torch.manual_seed(0)
    net, batch = nn.Linear(4, 3).double(), torch.randn(8, 4, dtype=torch.float64)
    optimizer, mbs = make(net.parameters()), ElasticMBS(net)
    count = 0
    for k in range(3):
        mbs.backward(lambda piece: net(piece).square().mean(), batch)
        if k == 1:
            with InjectOOM(at=[at]) as struck:
                mbs.optimizer_step(optimizer)
            count = struck.count
        else:
            optimizer.step()
        optimizer.zero_grad()
    return [part.detach().clone() for part in net.parameters()], count


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_state_wherever_it_lies_is_rolled_back_whole(
    make: Callable[[Any], torch.optim.Optimizer],
) -> None:
    wanted, operations = trained(make, 0)
    assert operations >= 8
    for at in range(1, operations + 1):
        found, _ = trained(make, at)
        assert all(map(torch.equal, found, wanted)), at


def _endless() -> Iterator[float]:
    while True:
        yield 0.5


class Opaque(Tensor):
    """A tensor that nobody can look into."""

    @staticmethod
    def __new__(cls) -> "Opaque":
        made: Opaque = Tensor._make_wrapper_subclass(cls, (2,))
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch leaves func out
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise NotImplementedError


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (lambda: _endless(), "builtins.generator"),
        (lambda: itertools.count(), "itertools.count"),
        (lambda: Opaque(), r"tests.optimizer.test_state_anywhere.Opaque"),
    ],
)
def test_state_that_cannot_be_read_is_named_and_nothing_has_changed(
    value: Callable[[], Any], kind: str
) -> None:
    net = nn.Linear(4, 3)
    optimizer = Own(net.parameters(), lambda own, p, gradient: gradient, kept=[{"x": value()}])
    mbs = ElasticMBS(net)
    mbs.backward(lambda piece: net(piece).square().mean(), torch.randn(8, 4))
    before = net.weight.detach().clone()
    with pytest.raises(UsageError, match=rf"optimizer\.kept\[0\]\['x'\] is a {kind}, whose"):
        mbs.optimizer_step(optimizer)
    assert torch.equal(net.weight, before)
    optimizer.step()  # as the error advises
    assert not torch.equal(net.weight, before)


@pytest.mark.parametrize("kind", [torch.optim.SGD, type("Mine", (torch.optim.SGD,), {})])
def test_what_a_hook_before_the_step_has_done_stays_when_the_step_is_tried_again(kind: Any) -> None:
    def made(at: int) -> tuple[Tensor, int, InjectOOM]:
        torch.manual_seed(0)
        net, inject = nn.Linear(4, 3).double(), InjectOOM(at=[at])
        optimizer: Any = kind(net.parameters(), lr=0.1, momentum=0.9, foreach=False)
        optimizer.counted = 0

        def clip(own: Any, args: Any, kwargs: Any) -> None:
            with torch.no_grad():
                for p in net.parameters():
                    assert p.grad is not None
                    p.grad.clamp_(-1e-3, 1e-3)
            own.counted += 1

        optimizer.register_step_pre_hook(clip)
        mbs = ElasticMBS(net)
        mbs.backward(
            lambda piece: net(piece).square().mean(), torch.randn(8, 4, dtype=torch.float64)
        )
        with inject:
            mbs.optimizer_step(optimizer)
        return net.weight.detach().clone(), optimizer.counted, inject

    wanted, _, whole = made(0)
    for at in range(1, whole.count + 1):
        weight, counted, inject = made(at)
        assert inject.hits
        assert (torch.equal(weight, wanted), counted) == (True, 1), at
