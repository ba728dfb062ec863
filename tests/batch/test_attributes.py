"""What a container keeps beside its parts is the piece's own, or somebody has said that it is whole."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from elastic_mbs.batch.splitters import items, whole
from elastic_mbs.batch.view import BatchView
from elastic_mbs.errors import BatchError

X = torch.arange(8.0).reshape(4, 2)


@dataclass
class Pair:
    x: Tensor
    y: Tensor

    def __post_init__(self) -> None:
        self.inputs = self.x

    @cached_property
    def doubled(self) -> Tensor:
        return self.x * 2


class Table(Mapping[str, Any]):
    def __init__(self, data: dict[str, Any]) -> None:
        self.data = data
        self.inputs = data["x"]

    def __getitem__(self, key: str) -> Any:
        return torch.as_tensor(self.data[key])

    def __iter__(self) -> Iterator[str]:
        return iter(self.data)

    def __len__(self) -> int:
        return len(self.data)


class Record(dict[str, Any]):
    pass


class Record2(UserDict[str, Any]):
    pass


class Row(list[Any]):
    pass


MAKERS: list[Callable[[], Any]] = [
    lambda: Pair(X, X + 1),
    lambda: Table({"x": X, "y": X + 1}),
    lambda: Record(x=X, y=X + 1),
    lambda: Record2(x=X, y=X + 1),
    lambda: Row([X, X + 1]),
    lambda: Row("abcd"),
]


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("mask", [X > 2, X.numpy(), [X[:, 0]], {"of": (X.t(),)}, np.arange(3)])
def test_an_attribute_with_rows_that_is_no_part_is_asked_about(make: Callable[[], Any], mask: Any) -> None:
    batch = make()
    BatchView(batch)
    batch.mask = mask
    with pytest.raises(BatchError, match=r'"mask" is an attribute next to the parts of') as caught:
        BatchView(batch)
    assert 'dims=whole("mask")' in str(caught.value)
    with pytest.raises(BatchError, match=r'"b.mask" is an attribute'):
        BatchView({"b": batch})
    view = BatchView(batch, whole("mask"))
    assert view.piece(1, 3).mask is mask
    assert BatchView([batch, batch], items()).length == 2, "an item of a list is no container of samples"


@pytest.mark.parametrize("make", MAKERS[:2], ids=["dataclass", "mapping"])
def test_an_attribute_that_is_a_part_is_the_pieces_own(make: Callable[[], Any]) -> None:
    piece = BatchView(make()).piece(1, 3)
    assert torch.equal(piece.inputs, X[1:3])
    batch = Pair(X, X)
    assert torch.equal(batch.doubled, X * 2)
    assert torch.equal(BatchView(batch).piece(1, 3).doubled, X[1:3] * 2)


def test_attributes_without_rows_and_the_dict_of_a_mappings_items_are_no_question() -> None:
    batch = Record(x=X)
    batch.name, batch.scale, batch.size = "a", torch.tensor(2.0), (224, 224)  # type: ignore[attr-defined]  # attributes that only this batch has
    assert BatchView(batch).piece(0, 1).scale == 2
    arrays = BatchView(Table({"x": X.numpy(), "y": X})).piece(0, 2)  # an array, where the part is a tensor made of it: built by its constructor
    assert torch.equal(arrays["x"], X[:2])
    assert torch.equal(arrays.inputs, X[:2])
