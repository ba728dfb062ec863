"""A registered type is measured, cut and moved by its functions, and their results checked."""

import sys
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

from elastic_mbs.batch.containers import kind_of, map_tensors, register_splitter, splitters
from elastic_mbs.batch.view import BatchView
from elastic_mbs.errors import BatchError


@pytest.fixture
def unregistered() -> Iterator[None]:
    before = dict(splitters)
    yield
    splitters.clear()
    splitters.update(before)
    kind_of.clear()


class Ragged:
    """Samples of different lengths in one tensor."""

    shape: list[int] = []  # noqa: RUF012  # cannot be hashed: only a tensor's is looked at

    def __init__(self, values: Tensor, ends: list[int]) -> None:
        self.values, self.ends = values, ends


class RaggedChild(Ragged):
    pass


def cut(ragged: Ragged, start: int, stop: int) -> Ragged:
    first = ragged.ends[start - 1] if start else 0
    return type(ragged)(
        ragged.values[first : ragged.ends[stop - 1]],
        [end - first for end in ragged.ends[start:stop]],
    )


def moved(ragged: Ragged, fn: Callable[[Tensor], Tensor]) -> Ragged:
    return type(ragged)(fn(ragged.values), ragged.ends)


def register(**changes: Any) -> None:
    register_splitter(
        Ragged,
        **{
            "length": lambda r: len(r.ends),
            "slice": cut,
            "tensors": lambda r: [r.values],
            "move": moved,
            **changes,
        },
    )


@pytest.mark.usefixtures("unregistered")
@pytest.mark.parametrize("cls", [Ragged, RaggedChild])
def test_a_registered_type_and_its_subclasses_are_cut_and_moved(cls: type[Ragged]) -> None:
    batch = {"r": cls(torch.arange(7.0), [1, 3, 7]), "y": torch.arange(3)}
    with pytest.raises(
        BatchError, match=rf'"r" is of type .*{cls.__name__}, which cannot be cut'
    ) as caught:
        BatchView(batch)
    assert f"register_splitter({cls.__name__}, length=..., slice=...)" in str(caught.value)
    assert 'dims=cut.whole("r")' in str(caught.value)
    register()
    view = BatchView(batch)
    assert (view.length, view.elements, len(view.tensors)) == (3, 4, 2)
    assert view.piece(0, 3)["r"] is batch["r"], "the whole batch is not cut, which can take long"
    assert BatchView(((batch["r"], batch["y"]),)).length == 3
    piece = view.piece(1, 3)
    assert type(piece["r"]) is cls
    assert piece["r"].values.tolist() == [1, 2, 3, 4, 5, 6]
    double = Mock(side_effect=lambda tensor: tensor * 2)
    assert map_tensors(batch, double)["r"].values.tolist() == [0, 2, 4, 6, 8, 10, 12]
    assert double.call_count == 2  # each tensor is moved once
    with pytest.raises(BatchError, match="dim 1 cannot"):
        BatchView(batch, {"r": 1})


@pytest.mark.usefixtures("unregistered")
def test_a_registered_type_may_be_cut_into_another_type() -> None:
    register_splitter(
        Ragged, length=lambda r: len(r.ends), slice=lambda r, start, stop: r.ends[start:stop]
    )
    batch = Ragged(torch.ones(2), [1, 2])
    view = BatchView(batch)
    assert view.piece(0, 1) == [1]
    assert view.piece(0, 2) == [1, 2], "the type does not depend on the size"
    assert view.tensors == []
    assert map_tensors(batch, torch.clone) is batch


@pytest.mark.usefixtures("unregistered")
@pytest.mark.parametrize(
    ("changes", "act", "message"),
    [
        ({"length": lambda r: -1}, BatchView, "length function.*returned -1"),
        ({"length": lambda r: True}, BatchView, "length function.*returned True"),
        ({"length": lambda r: 2.0}, BatchView, r"length function.*returned 2\.0"),
        (
            {"slice": lambda r, a, b: None},
            lambda r: BatchView(r).piece(0, 1),
            "slice function.*returned None for samples 0:1",
        ),
        (
            {"slice": lambda r, a, b: r},
            lambda r: BatchView(r).piece(0, 1),
            "slice function.*returned 3 samples for samples 0:1",
        ),
        ({"tensors": lambda r: [3]}, lambda r: BatchView(r).tensors, "tensors function.*type int"),
        (
            {"move": lambda r, fn: None},
            lambda r: map_tensors(r, torch.clone),
            "move function.*returned None",
        ),
    ],
)
def test_results_of_registered_functions_are_checked(
    changes: dict[str, Any], act: Callable[[Any], Any], message: str
) -> None:
    register(**changes)
    with pytest.raises(BatchError, match=message):
        act(Ragged(torch.arange(7.0), [1, 3, 7]))


@pytest.mark.usefixtures("unregistered")
@pytest.mark.parametrize(
    ("cls", "changes", "message"),
    [
        ("Ragged", {}, "needs a class, not 'Ragged'"),
        (dict, {}, "dict is cut by elastic_mbs itself"),
        (Tensor, {}, r"torch.*Tensor is cut by elastic_mbs itself"),
        (Ragged, {"length": None}, "length must be a function, not None"),
        (Ragged, {"slice": 3}, "slice must be a function, not 3"),
        (Ragged, {"tensors": 3, "move": moved}, "tensors must be a function, not 3"),
        (Ragged, {"tensors": list}, "tensors= and move= need each other"),
        (Ragged, {"move": moved}, "tensors= and move= need each other"),
    ],
)
def test_a_bad_registration_is_refused(cls: Any, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(BatchError, match=message):
        register_splitter(cls, **{"length": len, "slice": cut, **changes})


def test_the_class_named_for_registration_can_be_imported() -> None:
    # PyG makes the class of a batch at run time, from Batch and the class of its graphs
    made = type("RaggedBatch", (Ragged,), {})
    with pytest.raises(BatchError, match="RaggedBatch, which cannot be cut") as caught:
        BatchView([made(torch.zeros(1), []), torch.zeros(1)])
    call = str(caught.value).split("register_splitter(")[1].split(",")[0]
    assert call == f"{Ragged.__module__}.Ragged"
    module, _, name = call.rpartition(".")
    assert getattr(sys.modules[module], name) is Ragged
