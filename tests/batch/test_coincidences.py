"""What can be read in two ways is asked about, and an ordinary batch is not."""

import re
from collections import UserDict
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from elastic_mbs import cut
from elastic_mbs.batch.containers import lookup
from elastic_mbs.batch.view import BatchView
from elastic_mbs.errors import BatchError
from tests.helpers.batches import Named, rows


def pictures(count: int, channels: int = 3) -> list[torch.Tensor]:
    return [torch.rand(channels, 4, 5 + i) for i in range(count)]


def targets(*counts: int) -> list[dict[str, torch.Tensor]]:
    return [{"boxes": torch.rand(count, 4), "labels": torch.zeros(count)} for count in counts]


@pytest.mark.parametrize(
    ("batch", "items", "fields"),
    [
        # as many pictures as they have channels
        ({"images": pictures(3), "targets": targets(1, 0, 2)}, 'cut.items("images")', "images"),
        ((pictures(3), targets(1, 0, 2)), 'cut.items("0")', "0"),
        ({"images": pictures(3), "captions": list("abc")}, 'cut.items("images")', "images"),
        ({"in": {"images": pictures(3)}, "ids": rows(3)}, 'cut.items("in.images")', "in.images"),
        (pictures(3), "cut.items()", ""),
        # as torchvision's collate function makes it, with a box per picture of one channel
        ((tuple(pictures(4, 1)), tuple(targets(1, 1, 1, 1))), 'cut.items("0", "1")', "0"),
        # with as many boxes as channels, and beside a number that all samples share
        (
            {"epoch": 1, "images": pictures(4), "targets": targets(3, 3, 3, 3)},
            'cut.items("images", "targets")',
            "images",
        ),
        (
            {"images": pictures(3), "targets": targets(3, 3, 3)},
            'cut.items("images", "targets")',
            "images",
        ),
        (
            {"boxes": [rows(2, 4), rows(2, 4)], "image": rows(2, 3, 5)},
            'cut.items("boxes")',
            "boxes",
        ),
    ],
)
def test_a_list_that_meets_the_other_length_by_chance_is_asked_about(
    batch: Any, items: str, fields: str
) -> None:
    with pytest.raises(BatchError, match="can be read in two ways") as caught:
        BatchView(batch)
    text = str(caught.value)
    assert items in text
    as_items, as_fields = (eval(line, {"cut": cut}) for line in re.findall(r"dims=(.*)", text))
    assert as_fields.keys() == as_items.keys()
    assert fields in as_fields
    first = batch if not fields else lookup(batch, fields)
    items_of, fields_of = BatchView(batch, as_items), BatchView(batch, as_fields)
    assert items_of.length == len(first)
    assert fields_of.length == len(first[0])


@pytest.mark.parametrize(
    "batch",
    [
        rows(3, 3),
        (rows(3, 3, 4, 4), rows(3)),
        (rows(2, 4), rows(2, 4)),
        (rows(3, 4), rows(3, 4), rows(3, 4)),
        {"input_ids": rows(3, 3), "attention_mask": rows(3, 3), "labels": rows(3, 3)},
        UserDict({"input_ids": rows(4, 4), "labels": rows(4, 4)}),
        {"image": torch.rand(3, 3, 8, 8), "mask": torch.rand(3, 8, 8)},  # 3 pictures, RGB
        {"image": rows(4, 3, 8, 8), "boxes": rows(4, 4), "label": rows(4)},
        {"x": rows(4), "names": list("abcd"), "t": [{"id": i} for i in "abcd"]},
        Named(rows(2, 2), rows(2)),
        [rows(3, 4), torch.rand(3, 4), rows(3)],  # not alike, so not three samples
        ([rows(6, 4), rows(6, 4)], rows(6)),  # two views
        next(iter(DataLoader(TensorDataset(rows(8, 3), rows(8, 3)), 4))),
        (tuple(rows(5, 2) for _ in range(2)), rows(5)),
    ],
)
def test_an_ordinary_batch_is_not_asked_about(batch: Any) -> None:
    BatchView(batch)


def test_a_reading_that_a_batch_has_shown_is_not_asked_about_later() -> None:
    loader = DataLoader(TensorDataset(rows(8, 4), rows(8, 4), rows(8, 4)), 5)
    first, last = loader  # the last one has 3 samples in 3 tensors
    with pytest.raises(BatchError, match="two ways"):
        BatchView(last)
    assert BatchView(last, None, BatchView(first).known_lists).length == 3
    views = {"views": [rows(5, 2), rows(5, 2)], "y": list("abcde")}
    few = {"views": [rows(2, 2), rows(2, 2)], "y": list("ab")}
    assert BatchView(few, None, BatchView(views).known_lists).length == 2
    ids: dict[str, Any] = {"ids": rows(4, 3), "mask": rows(4, 3, 3)}
    square: dict[str, Any] = {"ids": rows(3, 3), "mask": rows(3, 3, 3)}
    assert BatchView(square, None, BatchView(ids).known_lists).length == 3
    named, few_named = ids | {"names": list("abcd")}, square | {"names": list("abc")}
    assert BatchView(few_named, None, BatchView(named).known_lists).length == 3


def test_position_ids_of_three_axes_are_asked_about_where_there_are_three_samples() -> None:
    batch = {"input_ids": rows(3, 5), "position_ids": rows(3, 3, 5)}
    with pytest.raises(BatchError, match='"position_ids", of shape') as caught:
        BatchView(batch)
    first, second = (
        eval(line, {"cut": cut}) for line in re.findall(r"dims=(.*)", str(caught.value))
    )
    assert BatchView(batch, first).piece(0, 1)["position_ids"].shape == (1, 3, 5)
    assert BatchView(batch, second).piece(0, 1)["position_ids"].shape == (3, 1, 5)


def test_lists_of_pictures_and_of_targets_in_a_list_are_no_two_samples() -> None:
    batch = [pictures(5), targets(1, 2, 3, 0, 1)]
    with pytest.raises(BatchError, match="disagree") as caught:
        BatchView(batch)
    (line,) = re.findall(r"if it has 5 samples.*dims=(.*)", str(caught.value))
    assert BatchView(batch, eval(line, {"cut": cut})).length == 5


@pytest.mark.parametrize("count", [5, 200])
def test_the_text_is_short_however_large_the_batch_is(count: int) -> None:
    batches: list[Any] = [
        tuple(zip(*zip(pictures(count), targets(*range(count)), strict=True), strict=True)),
        {f"part {i}": torch.rand(4 + i % 3, 2) for i in range(count)},
        {f"list {i}": [rows(count, 2)] * count for i in range(20)},
        {"x": rows(7), "views": [torch.rand(3, 2)] * count},
    ]
    for batch in batches:
        with pytest.raises(BatchError) as caught:
            BatchView(batch)
        lines = str(caught.value).splitlines()
        assert len(lines) < 15
        assert max(map(len, lines)) < 300
