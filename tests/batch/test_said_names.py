"""A name in `dims=` or `trim=` that stands for nothing in the batch is told of once."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from elastic_mbs import ElasticMBS, cut
from elastic_mbs.batch.reader import absent
from elastic_mbs.events import Warned
from tests.helpers.batches import rows


@pytest.mark.parametrize(
    ("batch", "dims", "name", "near"),
    [
        ({"x": rows(4), "mask": rows(4)}, cut.whole("masks"), "masks", "'mask'"),
        ({"in": {"x": rows(4), "y": rows(4)}}, cut.whole("in.z"), "in.z", "'in.x'"),
        ((rows(4), rows(4)), {"x": 1}, "x", "'0', '1'"),
        ((rows(4), rows(4)), {2: 1}, "2", "'0', '1'"),
        (rows(4), {"x": 1}, "x", "no named parts"),
    ],
)
def test_a_name_that_matches_nothing_is_told_with_the_near_names(
    batch: Any, dims: Any, name: str, near: str
) -> None:
    (found,) = absent("dims", dims, batch)
    assert found[0] == name
    assert repr(name) in found[1]
    assert near in found[1]


@dataclass
class Graphs:
    x: Tensor

    @property
    def width(self) -> int:
        return self.x.shape[1]


@pytest.mark.parametrize(
    ("batch", "dims"),
    [
        ({"x": rows(4), "mask": rows(4)}, cut.whole("mask")),
        ({"in": {"x": rows(4)}}, {"x": 0}),
        ([rows(3), rows(3), rows(3)], cut.items()),
        ((rows(4), rows(4)), {1: 0}),
        (Graphs(rows(4, 4)), cut.whole("width")),
        ({"boxes": rows(2), "of": rows(2), "x": rows(4)}, cut.ragged("boxes", by="of")),
    ],
)
def test_names_of_parts_and_attributes_are_not_told_of(batch: Any, dims: Any) -> None:
    assert not list(absent("dims", dims, batch))


def test_an_absent_name_is_told_once_for_each_loss_function() -> None:
    model, told = nn.Linear(2, 1), list[Any]()
    mbs = ElasticMBS(model, dims=cut.whole("masks"), on_event=told.append)

    def first(piece: Any) -> Any:
        return model(piece["x"]).mean()

    def second(piece: Any) -> Any:
        return model(piece["x"]).square().mean()

    losses: list[Callable[[Any], Any]] = [first, second, first, second]
    for loss_fn in losses:
        mbs.backward(loss_fn, {"x": torch.ones(4, 2), "mask": torch.ones(4, 2)})
    assert len([event for event in told if isinstance(event, Warned)]) == 2


def test_a_name_in_trim_that_stands_for_nothing_is_told_with_the_near_names() -> None:
    model, told = nn.Linear(1, 1), list[Any]()
    mask = (torch.arange(6) < torch.tensor([6, 4, 2, 3])[:, None]).long()
    batch = {"mask": mask, "position_ids": torch.arange(6).repeat(4, 1), "x": torch.ones(4, 6)}
    for name in ("position_id", "position_ids"):
        mbs = ElasticMBS(
            model, pieces="by_length", length="mask", trim={name: None}, on_event=told.append
        )
        mbs.backward(lambda piece: model(piece["x"][:, :1]).mean(), batch)
    texts = [event.message for event in told if isinstance(event, Warned)]
    (text,) = [text for text in texts if "stands for nothing" in text]
    assert "trim names 'position_id', which stands for nothing in the batch" in text
    assert "'position_ids'" in text
