"""Outputs keep no graph, wherever in their objects a tensor is, and the caller's own objects are left alone."""

import weakref
from collections import deque
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import TensorDataset

from elastic_mbs.engine.result import map_outputs


def graph(n: int = 2) -> Tensor:
    return torch.ones(n, requires_grad=True) * 2


def detached(value: Any) -> Any:
    return map_outputs(value, torch.Tensor.detach)


class ReadOnly:
    y = property(lambda self: vars(self)["y"])

    def __init__(self, y: Tensor) -> None:
        vars(self)["y"] = y


class Items(dict[str, Any]):
    """With an attribute next to its items."""

    def __init__(self, y: Tensor, **items: Any) -> None:
        super().__init__(items)
        self.y = y


@dataclass(frozen=True, slots=True, weakref_slot=True)
class Slots:
    y: Tensor


@pytest.mark.parametrize(
    ("make", "get"),
    [
        (lambda t: {"logits": graph(), "cache": SimpleNamespace(layers=[SimpleNamespace(keys=t)])}, lambda o: o["cache"].layers[0].keys),
        (lambda t: deque([t], maxlen=4), lambda o: o[0]),
        (lambda t: pack_sequence([t]), lambda o: o.data),
        (lambda t: torch.distributions.Independent(torch.distributions.Normal(t, t.detach()), 1), lambda o: o.base_dist.loc),
        (lambda t: torch.max(t.view(1, 2), 0), lambda o: o.values),
        (ReadOnly, lambda o: o.y),
        (Slots, lambda o: o.y),
        (lambda t: Items(t, a=1), lambda o: o.y),
        (lambda t: Items(t, a=graph()), lambda o: o.y),
    ],
    ids=["cache", "deque", "packed", "distribution", "struct", "property", "slots", "next to items", "next to tensors"],
)
def test_a_tensor_in_any_object_loses_its_graph_and_the_original_keeps_it(make: Any, get: Any) -> None:
    own = make(graph())
    found = detached(own)
    assert type(found) is type(own)
    assert get(own).grad_fn is not None
    assert get(found).grad_fn is None
    assert get(found).tolist() == [2.0, 2.0]


def test_objects_that_share_parts_do_so_in_the_copy_and_a_tensor_is_mapped_once() -> None:
    parent = SimpleNamespace(y=graph())
    parent.child = SimpleNamespace(parent=parent, y=parent.y)
    parent.ring = [parent.y]
    parent.ring.append(parent.ring)
    seen: list[Tensor] = []

    def fn(tensor: Tensor) -> Tensor:
        seen.append(tensor)
        return tensor.detach()

    found = map_outputs([parent, parent.y], fn)
    assert found[0].child.parent is found[0]
    assert found[0].child.y is found[0].y is found[1]
    assert found[0].ring[1] is found[0].ring is not parent.ring
    assert len(seen) == 1


def test_objects_without_a_tensor_and_modules_and_datasets_are_handed_on() -> None:
    plain = SimpleNamespace(text="text", inner=SimpleNamespace(numbers=[1, 2]))
    plain.inner.outer = plain
    assert detached(plain) is plain
    model, data = nn.Linear(2, 2), TensorDataset(torch.zeros(3))
    found = detached(SimpleNamespace(y=graph(), config=plain, model=model, data=data))
    assert (found.config, found.model, found.data, found.y.grad_fn) == (plain, model, data, None)


class Single(SimpleNamespace):
    def __deepcopy__(self, memo: object) -> Any:
        return self


class Locked(SimpleNamespace):
    error: type[Exception] = TypeError

    def __deepcopy__(self, memo: object) -> Any:
        raise self.error


class Owner(SimpleNamespace):
    def __del__(self) -> None:
        """Closes what it owns."""


class Chain(SimpleNamespace):
    def __init__(self, y: Tensor) -> None:
        chain = SimpleNamespace(y=graph())
        for _ in range(5000):  # more than Python can recurse
            chain = SimpleNamespace(next=chain)
        super().__init__(y=y, next=chain)


@pytest.mark.parametrize("kind", [Single, Locked, Owner, Chain])
def test_objects_that_cannot_be_copied_are_handed_on_and_their_neighbours_lose_their_graph(kind: Any) -> None:
    own = kind(y=graph())
    gone = weakref.proxy(Slots(graph()))  # of an object that has ended
    found = detached({"y": graph(), "own": own, "gone": gone})
    assert found["y"].grad_fn is None
    assert own.y.grad_fn is not None
    assert found["own"] is own


@pytest.mark.parametrize("error", [MemoryError, torch.OutOfMemoryError])
def test_running_out_of_memory_while_an_object_is_copied_is_not_swallowed(error: type[Exception]) -> None:
    with pytest.raises(error):
        detached([type("Big", (Locked,), {"error": error})(y=graph())])
