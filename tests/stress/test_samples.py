"""The reference reads batches, counts and losses by itself, and as the product does."""

import subprocess
import sys
from collections import UserDict
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from elastic_mbs import count_tokens, cut
from elastic_mbs.batch.counts import Counts
from elastic_mbs.batch.lengths import ByLength
from elastic_mbs.batch.view import BatchView
from stress.models.steps import STEPS, build
from stress.reference.by_hand import view_of, weights_of
from stress.reference.samples import Samples, counts_of, losses_in, mapped, tensors_of


def test_the_reference_imports_nothing_of_the_product() -> None:
    code = (
        "import sys, stress.reference.by_hand;"
        "print([name for name in sys.modules if name.startswith('elastic_mbs')])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


class Pair(NamedTuple):
    x: Any
    y: Any


@dataclass
class Record:
    x: Tensor
    names: list[str]
    rate: float = 0.5


def rows(*shape: int) -> Tensor:
    return torch.arange(torch.Size(shape).numel()).reshape(shape)


MASK = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 0], [1, 0, 0, 0], [1, 1, 1, 1], [1, 1, 0, 0]])
SORTED = {"pieces": "by_length", "length": "mask"}
BATCHES: dict[str, tuple[Any, dict[str, Any]]] = {
    "tensor": (rows(5, 2), {}),
    "pair": ((rows(5, 2), rows(5)), {}),
    "named": (Pair(rows(5), {"z": rows(5, 1)}), {}),
    "dict": ({"x": rows(5), "names": list("abcde"), "lr": 0.1, "scale": torch.tensor(2)}, {}),
    "user dict": (UserDict(x=rows(5), t=("a", "b", "c", "d", "e")), {}),
    "record": (Record(rows(5, 2), list("abcde")), {}),
    "array": ({"x": rows(5), "a": np.arange(10).reshape(5, 2)}, {}),
    "columns": (
        {"x": rows(3, 5), "deep": {"y": rows(2, 5)}, "w": rows(4)},
        {"dims": {"x": 1, "deep": 1} | cut.whole("w")},
    ),
    "items": ({"i": [rows(2, i) for i in range(5)], "x": rows(5)}, {"dims": cut.items("i")}),
    "fields": ({"v": [rows(5), {"a": rows(5, 2)}]}, {"dims": cut.fields("v")}),
    "boxes": ({"x": rows(5), "boxes": [{"b": rows(i + 1)} for i in range(5)]}, {}),
    "sorted": ({"mask": MASK, "ids": rows(5, 4) * MASK, "y": rows(5), "l": list("abcde")}, SORTED),
    "scores": ({"mask": MASK, "scores": rows(5, 4), "x": rows(5, 4, 2) * MASK[..., None]}, SORTED),
    "trim": ({"mask": MASK, "ids": rows(5, 4)}, SORTED | {"trim": {"ids": 1}}),
}


def product_of(batch: Any, options: dict[str, Any]) -> BatchView:
    by_length = ByLength.of(
        options.get("pieces", "in_order"),
        options.get("length"),
        options.get("trim"),
        lambda *_: None,
    )
    return BatchView(batch, options.get("dims"), by_length=by_length)


def assert_cut_alike(batch: Any, options: dict[str, Any]) -> None:
    ours, theirs = Samples(batch, options), product_of(batch, options)
    assert ours.length == theirs.length
    if "pieces" not in options:
        assert ours.elements == theirs.elements
    for size in range(1, ours.length + 1):
        places = [*range(0, ours.length, size), ours.length]
        for start, stop in pairwise(places):
            mine, other = ours.piece(start, stop), theirs.piece(start, stop)
            assert type(mine) is type(other)
            assert_close(tensors_of(mine), tensors_of(other), rtol=0, atol=0, equal_nan=True)
            assert str(mine) == str(other)


@pytest.mark.parametrize("name", BATCHES)
def test_pieces_are_those_of_the_product(name: str) -> None:
    assert_cut_alike(*BATCHES[name])


@pytest.mark.parametrize("name", STEPS)
def test_pieces_of_every_built_in_step_are_those_of_the_product(name: str) -> None:
    case = build(name)
    assert_cut_alike(case.batch(0), case.options)


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_weights_of_every_built_in_step_are_those_of_the_product(name: str, reduction: str) -> None:
    case = build(name)
    batch, count = case.batch(0), case.options.get("count")
    view = view_of(case, batch)
    mine = counts_of(count, view)
    other = Counts.read(count, product_of(batch, case.options), reduction)
    for start in range(view.length):
        for stop in range(start + 1, view.length + 1):
            assert weights_of(mine, start, stop, reduction) == other.weights(start, stop, reduction)


def test_labels_are_counted_where_they_lie() -> None:
    labels = torch.tensor([[1, -100, 2], [-100, -100, 3]])
    for batch, tokens, options, wanted in (
        ({"labels": labels}, count_tokens(), {}, [2, 1]),
        ({"labels": labels}, count_tokens(shift=True), {}, [1, 1]),
        ((labels, labels.T), count_tokens(1), {"dims": {"1": 1}}, [2, 1]),
        ({"labels": list(labels)}, count_tokens(), {"dims": cut.items("labels")}, [2, 1]),
        ({"labels": labels}, count_tokens(lambda batch: batch["labels"], 3), {}, [3, 2]),
    ):
        assert counts_of(tokens, Samples(batch, options)) == {None: list(map(Fraction, wanted))}


def test_the_loss_is_found_in_all_that_a_function_returns() -> None:
    loss = torch.ones((), requires_grad=True)
    for value in (loss, (loss, 1), {"loss": loss, "x": 2}, Record(rows(1), []), loss.reshape(1)):
        if isinstance(value, Record):
            vars(value)["loss"] = loss
        assert losses_in(value, None)[None].item() == 1
    assert list(losses_in({"loss": {"a": loss, "b": loss}}, ["a", "b"])) == ["a", "b"]
    assert list(losses_in({"loss": loss, "b": loss}, ["loss", "b"])) == ["loss", "b"]


def test_a_batch_that_cannot_be_cut_is_refused() -> None:
    for batch in ({"x": rows(5), "y": rows(4)}, {"x": 1}):
        with pytest.raises(ValueError, match="the reference cannot cut this batch"):
            Samples(batch)
    with pytest.raises(ValueError, match="the reference cannot cut a set"):
        Samples({"x": rows(5), "y": {1, 2}})


def test_mapped_containers_are_new_and_of_the_same_types() -> None:
    batch = Pair([rows(2)], Record(rows(2), ["a", "b"]))
    found = mapped(batch, lambda tensor: tensor + 1)
    assert type(found) is Pair
    assert found.y is not batch.y
    assert_close(tensors_of(found), [each + 1 for each in tensors_of(batch)])
