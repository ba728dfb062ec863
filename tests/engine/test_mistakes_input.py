"""Losses, settings, batches and counts that make no sense are refused by name, and the runtime stays usable."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence

from elastic_mbs import BatchError, CountError, LossError, UsageError, elastic_step
from elastic_mbs.engine.misuse import running_call
from tests.helpers.open_calls import close_what_is_open
from tests.helpers.steps import Pair, cross_entropy, elastic, mlp, pairs, still_works, through

pytestmark = pytest.mark.injectable

DOORS = [1, 3]

model = pytest.fixture(mlp)
nothing_left_open = pytest.fixture(autouse=True)(close_what_is_open)

# ---------------------------------------------------------------------- losses


LOSSES: list[tuple[str, Callable[[nn.Module, Pair], Any], str]] = [
    ("none", lambda m, b: None, "None"),
    ("a vector", lambda m, b: nn.functional.cross_entropy(m(b[0]), b[1], reduction="none"), r"shape \(4,\)"),
    ("no graph", lambda m, b: cross_entropy(m)(b).detach(), "no graph"),
    ("a number", lambda m, b: cross_entropy(m)(b).item(), "float"),
    ("integers", lambda m, b: torch.tensor(3), "dtype|int64"),
    ("complex", lambda m, b: cross_entropy(m)(b).to(torch.complex128), "complex"),
    ("a dict without it", lambda m, b: {"cost": cross_entropy(m)(b)}, "without 'loss'"),
    ("a dict with None", lambda m, b: {"loss": None}, "NoneType"),
    ("an empty tuple", lambda m, b: (), "tuple"),
    ("a text", lambda m, b: "loss", "str"),
    ("a nested tuple", lambda m, b: ((cross_entropy(m)(b),),), "tuple"),
]


@pytest.mark.no_oom_injection
@pytest.mark.parametrize(("kind", "make", "says"), LOSSES, ids=[case[0] for case in LOSSES])
@pytest.mark.parametrize("door", DOORS)
def test_what_is_no_loss(model: nn.Module, door: int, kind: str, make: Callable[[nn.Module, Pair], Any], says: str) -> None:
    mbs = elastic(model, micro_batch_size=4)
    with pytest.raises(LossError, match=says):
        through(door, mbs, lambda b: make(model, b), pairs())
    assert still_works(mbs, model)


@pytest.mark.parametrize(
    ("losses", "says"),
    [
        (lambda m, b: cross_entropy(m)(b), "dict of losses"),
        (lambda m, b: {"a": cross_entropy(m)(b)}, r"missing \['b'\]"),
        (lambda m, b: {"a": cross_entropy(m)(b), "b": cross_entropy(m)(b), "c": cross_entropy(m)(b)}, r"without a count \['c'\]"),
    ],
)
def test_losses_that_do_not_fit_the_names_of_the_counts(model: nn.Module, losses: Callable[[nn.Module, Pair], Any], says: str) -> None:
    mbs = elastic(model, micro_batch_size=4, count={"a": None, "b": None})
    with pytest.raises(LossError, match=says):
        mbs.backward(lambda b: losses(model, b), pairs())
    mbs.close()
    assert still_works(elastic(model), model)


def test_a_model_without_anything_to_train(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    mbs = elastic(model, micro_batch_size=4)
    with pytest.raises(LossError, match="frozen"):
        mbs.backward(cross_entropy(model), pairs())
    for parameter in model.parameters():
        parameter.requires_grad_(True)
    assert still_works(mbs, model)


def test_a_class_in_place_of_a_model_for_the_decorator() -> None:
    with pytest.raises(UsageError, match="class"):
        elastic_step(nn.Linear)  # type: ignore[arg-type]  # the mistake


# ---------------------------------------------------------------------- batches and counts


@dataclass
class _Opaque:
    value: int


class _Foreign:
    pass


BATCHES: list[tuple[str, Callable[[], Any], str]] = [
    ("empty", lambda: (torch.zeros(0, 6), torch.zeros(0)), "empty"),
    ("disagreeing", lambda: {"x": torch.zeros(8, 6), "y": torch.zeros(7)}, r"x.*\n?.*8.*\n?.*y.*7"),
    ("packed", lambda: pack_padded_sequence(torch.zeros(3, 4, 2), torch.tensor([3, 2, 1]), batch_first=True), "PackedSequence"),
    ("unknown", _Foreign, "_Foreign"),
    ("unknown, nested", lambda: {"x": torch.zeros(8, 6), "meta": _Foreign()}, "_Foreign"),
    ("nothing to cut", lambda: {"n": 3}, "cut|tensor"),
    ("none", lambda: None, "None"),
    ("a number", lambda: 3, "int|cut"),
    ("a scalar tensor", lambda: torch.tensor(3.0), "cut|0-d|dimension"),
    ("a set", lambda: {1, 2, 3}, "set"),
    ("a generator", lambda: (i for i in range(8)), "generator"),
    ("an empty dict", dict, "cut|empty"),
    ("a user dict that disagrees", lambda: UserDict(x=torch.zeros(8, 6), y=torch.zeros(7)), "7"),
]


@pytest.mark.parametrize(("kind", "make", "says"), BATCHES, ids=[case[0] for case in BATCHES])
@pytest.mark.parametrize("door", [1, 3, "eval"])
def test_a_batch_that_cannot_be_cut(model: nn.Module, door: int | str, kind: str, make: Callable[[], Any], says: str) -> None:
    mbs = elastic(model, micro_batch_size=4)
    with pytest.raises(BatchError, match=says):
        if door == "eval":
            mbs.eval(lambda b: b, make())
        else:
            through(int(door), mbs, cross_entropy(model), make())
    assert still_works(mbs, model)


COUNTS: list[tuple[str, Callable[[Pair], Any], str]] = [  # more in tests/batch/test_counts.py
    ("negative", lambda b: torch.tensor([1, 2, -1, 1, 1, 1, 1, 1]), "-1"),
    ("all zero", lambda b: torch.zeros(8), "zero"),
    ("of another length", lambda b: torch.ones(7), "7 counts for a batch of 8"),
    ("a total", lambda b: torch.tensor(8), "one count per sample"),
    ("a dict", lambda b: {"a": torch.ones(8)}, "dict of functions"),
]


@pytest.mark.parametrize(("kind", "count", "says"), COUNTS, ids=[case[0] for case in COUNTS])
@pytest.mark.parametrize("door", DOORS)
def test_counts_that_make_no_sense(model: nn.Module, door: int, kind: str, count: Callable[[Pair], Any], says: str) -> None:
    wrong = [True]
    mbs = elastic(model, micro_batch_size=4, count=lambda b: count(b) if wrong[0] else torch.ones(8))
    with pytest.raises(CountError, match=says):
        through(door, mbs, cross_entropy(model), pairs())
    wrong[0] = False
    assert still_works(mbs, model)


def test_total_outside_of_a_call(model: nn.Module) -> None:
    mbs = elastic(model, micro_batch_size=4)
    with pytest.raises(UsageError, match="inside loss_fn"):
        _ = mbs.total
    mbs.backward(cross_entropy(model), pairs())
    with pytest.raises(UsageError, match="inside loss_fn"):
        _ = mbs.total


def test_verify_of_too_few_samples(model: nn.Module) -> None:
    mbs = elastic(model)
    with pytest.raises(UsageError, match="at least 2"):
        mbs.verify(cross_entropy(model), pairs(1))
    assert still_works(mbs, model)


@pytest.mark.no_oom_injection
@pytest.mark.parametrize(
    "state",
    [{}, {"version": 2, "controller": {}}, {"version": 1}, {"version": 1, "controller": 3}, None, [], {"version": 1, "controller": {"tracks": 5}}],
)
def test_a_state_that_is_none_changes_nothing(model: nn.Module, state: Any) -> None:
    mbs = elastic(model, micro_batch_size=4)
    mbs.backward(cross_entropy(model), pairs())
    before = mbs.state_dict()
    with pytest.raises(UsageError):
        mbs.load_state_dict(state)
    assert mbs.state_dict() == before
    assert still_works(mbs, model)


@pytest.mark.parametrize("door", DOORS)
def test_a_batch_that_carries_a_graph(model: nn.Module, door: int) -> None:
    x, y = pairs(4)
    encoder = nn.Linear(x.shape[1], x.shape[1], dtype=x.dtype)
    with pytest.raises(BatchError, match=r"the tensor '0' carries a graph \(AddmmBackward0\).*model=\[\.\.\.\], or detach it"):
        through(door, elastic(model), cross_entropy(model), (encoder(x), y))
    assert encoder.weight.grad is None
    assert running_call() is None


@pytest.mark.parametrize("door", ["backward", "eval", "verify"])
def test_a_loss_or_a_batch_in_the_place_of_the_function(model: nn.Module, door: str) -> None:
    mbs, batch = elastic(model), pairs(4)
    for wrong in (cross_entropy(model)(batch), batch):
        with pytest.raises(UsageError, match=rf"mbs\.{door}\(.*the function comes first and is called on pieces of the batch; got a (Tensor|tuple)"):
            getattr(mbs, door)(wrong, batch)


def test_the_decorator_without_its_model() -> None:
    def train_step(batch: Pair) -> Tensor:
        raise AssertionError("never called")

    decorated: Any = elastic_step(train_step)
    with pytest.raises(UsageError, match=r"train_step was decorated without its model: write @elastic_step\(model\) above it"):
        decorated(pairs(4))
