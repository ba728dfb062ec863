"""Loss and outputs of a call belong to the whole batch, in its order, without a graph."""

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

from elastic_mbs import MicroBatchFloorError, UsageError, Warned
from elastic_mbs.doors import calls
from elastic_mbs.engine.outcome.result import StepResult, StoredOutput, map_outputs
from elastic_mbs.testing import InjectOOM
from tests.helpers.steps import elastic


def result(
    outputs: list[Any], losses: tuple[float, ...] = (), sizes: tuple[int, ...] = (2, 1)
) -> StepResult:
    ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
    return StepResult(
        partition=tuple((end - size, end) for size, end in zip(sizes, ends, strict=True)),
        micro_batch_size=2,
        _losses=tuple(torch.tensor(loss, dtype=torch.float64) for loss in losses),
        _outputs=[StoredOutput(value, "cpu") for value in outputs],
    )


def test_the_loss_is_the_weighted_sum_of_the_pieces() -> None:
    found = result([], (0.25, 0.5))
    assert float(found) == 0.75
    assert found.loss.shape == ()
    assert found.loss is found.loss  # the sum is made once
    assert (f"{found:.4f}", f"{found}") == ("0.7500", str(found))
    assert float(result([])) == 0.0
    assert repr(found) == (
        "StepResult(loss=0.75, pieces=2, micro_batch_size=2, ooms=0, replayed_samples=0)"
    )
    mixed = StepResult(
        ((0, 1), (1, 2)),
        1,
        _losses=(torch.tensor(0.5, dtype=torch.float32), torch.tensor(0.25, dtype=torch.float64)),
    )
    assert (mixed.loss.dtype, float(mixed)) == (torch.float64, 0.75)


def test_a_backward_left_over_on_the_result_is_told_to_go() -> None:
    found: Any = result([], (0.25,))
    with pytest.raises(UsageError, match="done by the call already: remove this line"):
        found.backward(retain_graph=True)


def test_the_loss_survives_out_of_memory_in_its_sum() -> None:
    found = result([], (0.25, 0.5))
    with InjectOOM(at=[1, 2]) as inject:
        loss = found.loss
    assert inject.hits
    assert loss.item() == 0.75
    with (
        InjectOOM(always_from=1),
        pytest.raises(MicroBatchFloorError, match="no room to add up the losses"),
    ):
        _ = result([], (0.25, 0.5)).loss


def test_outputs_are_joined_once() -> None:
    found = result([{"y": torch.tensor([1, 2]), "n": 2}, {"y": torch.tensor([3]), "n": 1}])
    assert (found.outputs["y"].tolist(), found.outputs["n"]) == ([1, 2, 3], [2, 1])
    assert found.outputs is found.outputs
    assert result([]).outputs is None


@pytest.mark.parametrize("place", ["cpu", "device"])
def test_stored_outputs_hold_no_graph_and_may_be_sparse(place: Any) -> None:
    w = torch.ones(2, requires_grad=True)
    own = StoredOutput(
        {
            "y": w * 2,
            "cache": SimpleNamespace(keys=w * 4),
            "rest": [torch.eye(3).to_sparse(), "text", None],
        },
        place,
    )
    stored = own.get()
    assert stored["y"].tolist() == [2.0, 2.0]
    assert not stored["y"].requires_grad
    # A decoder's cache with its graph would keep all pieces in memory.
    assert not stored["cache"].keys.requires_grad
    assert torch.equal(stored["rest"][0].to_dense(), torch.eye(3))
    assert stored["rest"][1:] == ["text", None]


def test_outputs_that_only_some_pieces_have_can_be_read() -> None:
    model = nn.Linear(3, 1)

    def loss_fn(x: Tensor) -> Any:
        y = model(x)
        return (y.mean(), y) if x[0, 0] > 0 else y.mean()

    with elastic(model, micro_batch_size=2) as mbs:
        outputs = mbs.backward(
            loss_fn, torch.tensor([1.0, 1.0, -1.0, -1.0, 2.0, 2.0]).view(6, 1).expand(6, 3)
        ).outputs
    assert [output is None for output in outputs] == [False, True, False]


@pytest.mark.parametrize(("much", "told"), [(8 * 8 * 4 - 1, 1), (8 * 8 * 4, 0)])
@pytest.mark.parametrize("place", ["cpu", "device", None])
def test_large_outputs_are_warned_of_once(
    place: Any, much: int, told: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calls, "MUCH", much)
    model, events = nn.Linear(3, 8), list[Any]()
    mbs = elastic(model, outputs=place, micro_batch_size=3, on_event=events.append)

    def step(x: Tensor) -> Any:
        y = model(x)
        return y.sum(), y

    for _ in range(2):
        mbs.backward(step, torch.zeros(8, 3))
    warned = [event.message for event in events if isinstance(event, Warned)]
    assert len(warned) == (told if place else 0)
    assert all(
        "besides the loss takes 256 B for this batch" in text and "outputs=None" in text
        for text in warned
    )


def graph(n: int = 2) -> Tensor:
    return torch.ones(n, requires_grad=True) * 2


def detached(value: Any) -> Any:
    return map_outputs(value, torch.Tensor.detach)


class ReadOnly:
    y = property(lambda self: vars(self)["y"])

    def __init__(self, y: Tensor) -> None:
        vars(self)["y"] = y


class Items(dict[str, Any]):
    """A dict with an attribute next to its items."""

    def __init__(self, y: Tensor, **items: Any) -> None:
        super().__init__(items)
        self.y = y


@dataclass(frozen=True, slots=True, weakref_slot=True)
class Slots:
    y: Tensor


@pytest.mark.parametrize(
    ("make", "get"),
    [
        (
            lambda t: {
                "logits": graph(),
                "cache": SimpleNamespace(layers=[SimpleNamespace(keys=t)]),
            },
            lambda o: o["cache"].layers[0].keys,
        ),
        (lambda t: deque([t], maxlen=4), lambda o: o[0]),
        (lambda t: pack_sequence([t]), lambda o: o.data),
        (
            lambda t: torch.distributions.Independent(torch.distributions.Normal(t, t.detach()), 1),
            lambda o: o.base_dist.loc,
        ),
        (lambda t: torch.max(t.view(1, 2), 0), lambda o: o.values),
        (ReadOnly, lambda o: o.y),
        (Slots, lambda o: o.y),
        (lambda t: Items(t, a=1), lambda o: o.y),
        (lambda t: Items(t, a=graph()), lambda o: o.y),
    ],
    ids=[
        "cache",
        "deque",
        "packed",
        "distribution",
        "struct",
        "property",
        "slots",
        "next to items",
        "next to tensors",
    ],
)
def test_a_tensor_in_any_object_loses_its_graph_and_the_original_keeps_it(
    make: Any, get: Any
) -> None:
    own = make(graph())
    found = detached(own)
    assert type(found) is type(own)
    assert get(own).grad_fn is not None
    assert get(found).grad_fn is None
    assert get(found).tolist() == [2.0, 2.0]


def test_objects_that_share_parts_share_them_in_the_copy() -> None:
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
        """Close resources that a copy would close a second time."""


class Chain(SimpleNamespace):
    def __init__(self, y: Tensor) -> None:
        chain = SimpleNamespace(y=graph())
        for _ in range(5000):  # deeper than Python recurses
            chain = SimpleNamespace(next=chain)
        super().__init__(y=y, next=chain)


@pytest.mark.parametrize("kind", [Single, Locked, Owner, Chain])
def test_objects_that_cannot_be_copied_are_handed_on(
    kind: Any,
) -> None:
    own = kind(y=graph())
    gone = weakref.proxy(Slots(graph()))  # its object has ended
    found = detached({"y": graph(), "own": own, "gone": gone})
    assert found["y"].grad_fn is None
    assert own.y.grad_fn is not None
    assert found["own"] is own


@pytest.mark.parametrize("error", [MemoryError, torch.OutOfMemoryError])
def test_running_out_of_memory_while_an_object_is_copied_is_not_swallowed(
    error: type[Exception],
) -> None:
    with pytest.raises(error):
        detached([type("Big", (Locked,), {"error": error})(y=graph())])
