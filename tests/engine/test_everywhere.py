"""Outputs keep no graph, wherever in them a tensor is, and the caller's own objects are left alone."""

from __future__ import annotations

import copy
import weakref
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence
from torch.utils.data import TensorDataset

from elastic_mbs import ElasticMBS, MemoryBudget, MemoryOptions
from elastic_mbs.engine.everywhere import map_everywhere


def graph(n: int = 2) -> Tensor:
    return torch.ones(n, requires_grad=True) * 2


def detached(value: Any) -> Any:
    return map_everywhere(value, torch.Tensor.detach)


class Layer:
    """One of a cache's, as decoders return it: not a container that anybody registers."""

    def __init__(self, keys: Tensor) -> None:
        self.keys = keys
        self.seen = 3


class Slots:
    __slots__ = ("other", "y")

    def __init__(self, y: Tensor) -> None:
        self.y = y


@pytest.mark.parametrize(
    ("make", "get"),
    [
        (lambda t: SimpleNamespace(inner=SimpleNamespace(y=t)), lambda o: o.inner.y),
        (lambda t: SimpleNamespace(layers=[Layer(t)]), lambda o: o.layers[0].keys),
        (lambda t: {"logits": graph(), "cache": SimpleNamespace(layers=[Layer(t)])}, lambda o: o["cache"].layers[0].keys),
        (lambda t: [Layer(t)], lambda o: o[0].keys),
        (Slots, lambda o: o.y),
        (lambda t: deque([t], maxlen=4), lambda o: o[0]),
        (lambda t: pack_sequence([t]), lambda o: o.data),
        (lambda t: torch.distributions.Independent(torch.distributions.Normal(t, t.detach()), 1), lambda o: o.base_dist.loc),
    ],
    ids=["nested", "list in an object", "object in a dict", "list", "slots", "deque", "packed", "distribution"],
)
def test_a_tensor_in_any_object_loses_its_graph_and_the_original_keeps_it(make: Any, get: Any) -> None:
    own = make(graph())
    found = detached(own)
    assert type(found) is type(own)
    assert get(own).grad_fn is not None
    assert get(found).grad_fn is None
    assert get(found).tolist() == [2.0, 2.0]


def test_objects_that_refer_to_each_other_do_so_in_the_copy() -> None:
    parent = SimpleNamespace(y=graph())
    parent.child = SimpleNamespace(parent=parent, y=parent.y)
    found = detached(parent)
    assert found is not parent
    assert found.child.parent is found
    assert found.child.y is found.y
    assert found.y.grad_fn is None


def test_what_holds_no_tensor_is_handed_on_as_it_is() -> None:
    plain = SimpleNamespace(text="text", inner=SimpleNamespace(numbers=[1, 2]))
    plain.inner.outer = plain
    assert detached(plain) is plain
    mixed = SimpleNamespace(y=graph(), config=plain)
    assert vars(detached(mixed))["config"] is plain


def test_modules_and_datasets_are_nobodys_output() -> None:
    model, data = nn.Linear(2, 2), TensorDataset(torch.zeros(3))
    found = detached(SimpleNamespace(y=graph(), model=model, data=data))
    assert (found.model, found.data, found.y.grad_fn) == (model, data, None)


class Single:
    """Copies of it are itself."""

    def __init__(self) -> None:
        self.y = graph()

    def __copy__(self) -> Single:
        return self


class Locked(Single):
    def __copy__(self) -> Single:
        raise TypeError("cannot be copied")


@pytest.mark.parametrize("kind", [Single, Locked])
def test_what_cannot_be_copied_is_not_changed(kind: type[Single]) -> None:
    own = kind()
    assert detached(SimpleNamespace(y=graph(), own=own)).own is own
    assert own.y.grad_fn is not None


def test_a_tensor_that_occurs_twice_is_mapped_once() -> None:
    shared = graph()
    seen: list[Tensor] = []

    def fn(tensor: Tensor) -> Tensor:
        seen.append(tensor)
        return tensor.detach()

    found = map_everywhere({"a": shared, "b": Layer(shared)}, fn)
    assert len(seen) == 1
    assert found["a"] is found["b"].keys


def test_packed_outputs_are_whole() -> None:
    own = pack_sequence([graph(3), graph(2)])
    found = detached(own)
    assert isinstance(found, PackedSequence)
    assert all(torch.equal(a, b) for a, b in zip(found[:2], own[:2], strict=True))


@pytest.mark.no_oom_injection
def test_a_cache_that_a_model_returns_does_not_fill_the_device() -> None:
    """Pieces of a decoder in training kept their cache of keys and values, with its graph: no micro-batch was small enough."""

    class Decoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))

        def forward(self, x: Tensor) -> SimpleNamespace:
            cache = []
            for layer in self.layers:
                x = torch.tanh(layer(x))
                cache.append(Layer(x))
            return SimpleNamespace(loss=x.square().mean(), past=SimpleNamespace(layers=cache))

    torch.manual_seed(0)
    model, batch = Decoder(), torch.randn(512, 64)
    by_hand = copy.deepcopy(model)
    by_hand(batch).loss.backward()
    with MemoryBudget("700KiB", track=(model,)), ElasticMBS(model, memory=MemoryOptions(wait_for_memory=0)) as mbs:
        result = mbs.backward(model, batch)
        assert result.ooms > 0 or len(result.partition) > 1
        caches = [each.past for each in result.outputs]
    assert all(layer.keys.grad_fn is None for piece in caches for layer in piece.layers)
    for ours, theirs in zip(model.parameters(), by_hand.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)


class Private:
    __slots__ = ("__y",)

    def __init__(self, y: Tensor) -> None:
        self.__y = y

    @property
    def y(self) -> Tensor:
        return self.__y


class ReadOnly:
    def __init__(self, y: Tensor) -> None:
        vars(self)["y"] = y

    @property
    def y(self) -> Tensor:
        return cast(Tensor, vars(self)["y"])


class Items(dict[str, Any]):
    """With an attribute beside its items."""

    def __init__(self, y: Tensor, **items: Any) -> None:
        super().__init__(items)
        self.y = y


@dataclass
class Fields:
    x: Tensor

    def __post_init__(self) -> None:
        self.y = self.x * 1


class Line(deque[Any]):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name


class Anything:
    """Has every attribute that it is asked for."""

    __slots__ = ("empty", "y")

    def __init__(self, y: Tensor) -> None:
        self.y = y

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__dict__":
            raise AttributeError(name)
        return Mock()


def line(y: Tensor) -> Line:
    found = Line("n")
    found.append(y)
    return found


@pytest.mark.parametrize(
    ("make", "get"),
    [
        (Private, lambda o: o.y),
        (ReadOnly, lambda o: o.y),
        (lambda t: Items(t, a=1), lambda o: o.y),
        (lambda t: Items(t, a=graph()), lambda o: o.y),
        (lambda t: Fields(t), lambda o: o.y),
        (line, lambda o: o[0]),
        (Anything, lambda o: o.y),
        (lambda t: Mock(spec=[], y=t), lambda o: o.y),
    ],
    ids=["private slot", "property", "beside items", "beside tensors", "beside fields", "own deque", "any attribute", "mock"],
)
def test_a_tensor_in_an_unusual_place_loses_its_graph_too(make: Any, get: Any) -> None:
    own = make(graph())
    found = detached(own)
    assert get(own).grad_fn is not None
    assert get(found).grad_fn is None
    assert get(found).tolist() == [2.0, 2.0]


def test_containers_that_are_in_themselves_and_chains_without_end_are_no_error() -> None:
    ring: list[Any] = [1]
    ring.append(ring)
    assert detached({"y": graph(), "ring": ring})["y"].grad_fn is None
    assert detached(SimpleNamespace(y=graph(), ring={"ring": ring})).y.grad_fn is None
    full: list[Any] = [graph()]
    full.append(full)
    assert detached(full)[0].grad_fn is None
    chain = SimpleNamespace(y=graph(), next=None)
    for _ in range(5000):
        chain = SimpleNamespace(y=graph(), next=chain)
    assert detached(chain).y.grad_fn is None


def test_a_mapping_that_cannot_be_made_anew_is_no_error_for_what_lies_beside_its_items() -> None:
    class View(Mapping[str, int]):
        def __init__(self, y: Tensor, size: int) -> None:
            self.y, self.size = y, size

        def __getitem__(self, key: str) -> int:
            return self.size

        def __iter__(self) -> Iterator[str]:
            return iter(["size"])

        def __len__(self) -> int:
            return 1

    view = View(graph(), 3)
    assert detached({"view": view, "y": graph()})["view"] is view


def test_a_proxy_of_what_is_gone_is_no_error() -> None:
    gone = Layer(graph())
    held = SimpleNamespace(y=graph(), proxy=weakref.proxy(gone), ref=weakref.ref(gone))
    del gone
    assert detached(held).y.grad_fn is None


def test_what_has_a_finaliser_is_not_copied() -> None:
    ended = []

    class Owner:
        def __init__(self) -> None:
            self.y = graph()

        def __del__(self) -> None:
            ended.append(self)

    owner = Owner()
    assert detached([owner])[0] is owner
    assert not ended


def test_a_copy_that_shares_its_attributes_is_not_written_to() -> None:
    class Shared:
        def __init__(self) -> None:
            self.y = graph()

        def __copy__(self) -> Shared:
            other = object.__new__(Shared)
            other.__dict__ = self.__dict__
            return other

    own = Shared()
    detached(own)
    assert own.y.grad_fn is not None


def test_what_many_objects_refer_to_is_looked_through_once() -> None:
    asked = []

    class Config(dict[str, Any]):
        def values(self) -> Any:
            asked.append(self)
            return super().values()

    config = Config(inner=SimpleNamespace())
    detached([*(SimpleNamespace(config=config) for _ in range(50)), graph()])
    assert len(asked) == 1
