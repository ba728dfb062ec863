"""Samples without rows, and rows of one dimension, are cut and counted as all others."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from elastic_mbs import ElasticMBS, count_tokens, cut
from elastic_mbs.batch.counts import Counts
from elastic_mbs.batch.view import BatchView
from elastic_mbs.errors import BatchError


def boxes(index: Any, pictures: int = 4) -> dict[str, Any]:
    return {
        "img": torch.arange(4.0 * pictures).reshape(pictures, 4),
        "cls": torch.zeros(len(index), 1),
        "bboxes": torch.zeros(len(index), 4),
        "area": torch.zeros(len(index)),
        "batch_idx": torch.as_tensor(index).long(),
    }


@pytest.mark.parametrize("door", ["backward", "evaluate", "verify"])
@pytest.mark.parametrize("seen", [True, False])
def test_pictures_without_boxes_are_cut(door: str, *, seen: bool) -> None:
    model = nn.Linear(4, 1)
    mbs = ElasticMBS(model, micro_batch_size=2)

    def loss_fn(piece: Any) -> Any:
        return model(piece["img"]).square().mean()

    if seen:
        mbs.backward(loss_fn, boxes([0, 0, 2, 2, 3]))
    getattr(mbs, door)(loss_fn, boxes([]))
    mbs.backward(loss_fn, boxes([0, 1, 1, 3, 3]))


@pytest.mark.parametrize("dims", [{}, cut.ragged("cls", "bboxes", "area", by="batch_idx")])
def test_a_piece_of_pictures_without_boxes_has_no_rows(dims: Any) -> None:
    piece = BatchView(boxes([]), dims).piece(1, 3)
    assert {name: len(part) for name, part in piece.items()} == {
        "img": 2,
        "cls": 0,
        "bboxes": 0,
        "area": 0,
        "batch_idx": 0,
    }


def test_a_table_without_rows_is_cut() -> None:
    view = BatchView((torch.ones(3, 4), torch.zeros(0, 6)), cut.ragged(1, column=0))
    assert [len(part) for part in view.piece(0, 2)] == [2, 0]


def test_a_batch_without_pictures_is_empty() -> None:
    with pytest.raises(BatchError, match="the batch is empty"):
        BatchView(boxes([], pictures=0))


LABELS = [-100, 1, 4, -100, 5, -100, 2, 6]
CU = torch.tensor([0, 3, 5, 8])


@pytest.mark.parametrize("dims", [{}, cut.packed("input_ids", "labels", cu_seqlens="cu", dim=0)])
@pytest.mark.parametrize(
    ("shift", "expected"), [(False, [2, 1, 2]), (True, [2, 1, 2])], ids=["all", "shift"]
)
def test_flat_packed_labels_are_counted_by_sample(
    dims: Any, *, shift: bool, expected: list[int]
) -> None:
    name = "cu" if dims else "cu_seqlens"
    batch = {"input_ids": torch.arange(8), "labels": torch.tensor(LABELS), name: CU}
    counts = Counts.read(count_tokens(shift=shift), BatchView(batch, dims))
    assert [counts.weights(i, i + 1)[None] for i in range(3)] == [c / 5 for c in expected]


def test_shift_leaves_out_the_first_label_of_each_sample() -> None:
    batch = {"labels": torch.arange(8), "cu_seqlens": CU}
    counts = Counts.read(count_tokens(shift=True), BatchView(batch))
    assert counts.total == 5


@pytest.mark.parametrize(
    "classes",
    [
        torch.tensor([0, 1, -100, 3, 4]),
        torch.tensor([0, 1, -100, 3, 4])[:, None],
        np.array([0, 1, -100, 3, 4]),
        [0, 1, -100, 3, 4],
    ],
    ids=["(R,)", "(R, 1)", "array", "list"],
)
def test_the_classes_of_boxes_are_counted_by_picture(classes: Any) -> None:
    batch = boxes([1, 0, 1, 3, 3]) | {"cls": classes}
    counts = Counts.read(count_tokens("cls"), BatchView(batch))
    assert [counts.weights(i, i + 1)[None] for i in range(4)] == [0.25, 0.25, 0, 0.5]


def test_labels_without_rows_are_counted() -> None:
    batch = boxes([]) | {"labels": torch.ones(4).long()}
    assert count_tokens("area").of(BatchView(batch)) == [0, 0, 0, 0]


@pytest.mark.parametrize("shape", [(4,), (4, 1)])
def test_verify_reads_an_index_with_as_many_rows_as_pictures(shape: Any) -> None:
    model = nn.Linear(4, 4)
    batch = {
        "img": torch.rand(4, 4),
        "bboxes": torch.rand(4, 4),
        "batch_idx": torch.tensor([0, 0, 1, 3]).reshape(shape),
    }

    def loss_fn(piece: Any) -> Any:
        found = model(piece["img"])[piece["batch_idx"].reshape(-1)] - piece["bboxes"]
        return found.square().mean() if len(found) else model(piece["img"]).sum() * 0

    assert "WRONG" in str(ElasticMBS(model, micro_batch_size=2).verify(loss_fn, batch))
