"""A batch of Ultralytics' loader needs no line, and what is asked about is asked once."""

import re
from typing import Any

import pytest
import torch

from elastic_mbs import cut
from elastic_mbs.batch.view import BatchView
from elastic_mbs.errors import BatchError

N = 4


def loaded(**others: Any) -> dict[str, Any]:
    """Return what Ultralytics' collate function makes of 4 pictures."""
    return {
        "im_file": tuple("abcd"),
        "ori_shape": tuple((480 + place, 640) for place in range(N)),
        "resized_shape": ((64, 64),) * N,
        "img": torch.randn(N, 3, 8, 8),
        "cls": torch.zeros(6, 1),
        "bboxes": torch.rand(6, 4),
        "batch_idx": torch.tensor([0.0, 0, 2, 3, 3, 3]),
        "ratio_pad": (((1.0, 1.0), (0.0, 0.0)),) * N,
        **others,
    }


def test_tuples_with_an_entry_for_each_picture_are_items() -> None:
    piece = BatchView(loaded()).piece(2, 4)
    assert piece["ori_shape"] == ((482, 640), (483, 640))
    assert piece["ratio_pad"] == (((1.0, 1.0), (0.0, 0.0)),) * 2
    assert piece["im_file"] == ("c", "d")
    assert piece["batch_idx"].tolist() == [0, 1, 1, 1]


def test_what_dims_says_of_the_tuples_wins() -> None:
    piece = BatchView(loaded(), cut.whole("ori_shape")).piece(2, 4)
    assert len(piece["ori_shape"]) == N


def test_all_tuples_without_rows_are_asked_about_at_once() -> None:
    batch = {"x": torch.zeros(2, 3), "a": ((1, 2), (3, 4)), "b": (("s", 1), ("t", 2))}
    with pytest.raises(BatchError, match='"a", "b" are tuples') as caught:
        BatchView(batch)
    items, whole = re.findall(r"dims=(cut\.\w+\(.*\))", str(caught.value))
    assert BatchView(batch, eval(items)).piece(1, 2)["b"] == (("t", 2),)
    assert BatchView(batch, eval(whole)).piece(1, 2)["a"] == ((1, 2), (3, 4))


def test_one_row_per_sample_is_not_offered_where_there_are_fewer_rows() -> None:
    batch = {
        "img": torch.randn(4, 4),
        "bboxes": torch.rand(3, 4),
        "batch_idx": torch.tensor([0, 0, 2]),
        "area": torch.rand(3),
    }
    with pytest.raises(BatchError, match='"area"') as caught:
        BatchView(batch)
    (line,) = re.findall(r"dims=(.*)", str(caught.value))
    assert BatchView(batch, eval(line)).piece(0, 1)["area"].tolist() == batch["area"][:2].tolist()


def test_lengths_of_a_wrong_shape_are_told_the_shape_of_lengths() -> None:
    batch = {"x": torch.zeros(2, 3), "rows": torch.zeros(5)}
    with pytest.raises(BatchError, match=r"must be of shape \(N,\)"):
        BatchView(batch, cut.ragged("rows", lengths=lambda _: torch.tensor(5)))


def test_fields_that_a_line_forgot_are_named() -> None:
    batch = {
        "img": torch.randn(4, 4),
        "cls": torch.zeros(6, 1),
        "bboxes": torch.rand(6, 4),
        "keypoints": torch.rand(6, 2),
        "image_index": torch.tensor([0, 0, 2, 3, 3, 3]),
    }
    said = cut.ragged("bboxes", by="image_index")
    with pytest.raises(BatchError, match='"cls", "keypoints": 6 rows, as many as "bboxes"'):
        BatchView(batch, said)
    named = cut.ragged("bboxes", "cls", "keypoints", by="image_index")
    assert BatchView(batch, named).piece(0, 2)["cls"].shape == (2, 1)
    for wrong in (cut.ragged("bboxes", by="image_idx"), cut.ragged("bboxes", lengths="cls")):
        with pytest.raises(BatchError) as caught:
            BatchView(batch, wrong)
        assert "as many as" not in str(caught.value)
