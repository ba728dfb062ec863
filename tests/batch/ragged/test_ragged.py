"""Rows go with their samples: a piece is the batch that a loader makes of its samples alone."""

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from elastic_mbs import cut
from elastic_mbs.batch.lengths import ByLength
from elastic_mbs.batch.view import BatchView
from elastic_mbs.errors import BatchError, UsageError
from tests.helpers import ragged as made
from tests.helpers.ragged import LENGTHS, same, samples_of

PACKED = cut.packed(
    "input_ids",
    "labels",
    "hidden",
    cu_seqlens=("cu_seq_lens_q", "cu_seq_lens_k"),
    max_length=("max_length_q", "max_length_k"),
    index="seq_idx",
)
# what makes a batch of samples, and what the user says of it; {} where the keys say it
KINDS: dict[str, tuple[Callable[[Any], Any], dict[str, Any]]] = {
    "index": (made.by_index, cut.ragged("bboxes", "cls", by="batch_idx")),
    "index of floats": (
        partial(made.by_index, floats=True),
        cut.ragged("bboxes", by="batch_idx") | cut.ragged("cls", by="batch_idx"),
    ),
    "index by key": (made.by_index, {}),
    "lengths": (made.by_lengths, cut.ragged(1, lengths=2)),
    "lengths by a function": (made.by_lengths, cut.ragged(1, lengths=lambda batch: batch[2])),
    "bags": (partial(made.bags, last=False), cut.offsets("input", "per_sample_weights")),
    "bags with the last offset": (
        partial(made.bags, last=True),
        cut.offsets("input", "per_sample_weights", include_last_offset=True),
    ),
    "bags by key": (partial(made.bags, last=False), {}),
    "bags with the last offset by key": (partial(made.bags, last=True), {}),
    "packed": (made.packed, PACKED),
    "packed by key": (made.packed, {}),
    "graphs by key": (made.graphs, {}),
}


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=40, deadline=None)
@given(LENGTHS.filter(any), st.data())
def test_a_piece_is_the_batch_of_its_samples(
    kind: str, lengths: list[int], data: st.DataObject
) -> None:
    make, dims = KINDS[kind]
    samples = samples_of(lengths)
    try:
        view = BatchView(make(samples), dims)
    except BatchError as error:
        # sizes that are the same by chance: only then the keys are not enough
        assert not dims, error
        if "two ways" in str(error):
            assert len(samples) == sum(lengths) != 1, error
        else:
            assert "2 of its dimensions" in str(error)
            assert sum(lengths) == 2
        return
    assert view.length == len(samples)
    cuts = sorted({0, len(samples), *data.draw(st.lists(st.integers(0, len(samples))))})
    for start, stop in pairwise(cuts):
        assert same(view.piece(start, stop), make(samples[start:stop]))
    assert same(view.piece(0, view.length), view.batch)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 4), min_size=1, max_size=12), st.data())
def test_an_index_may_be_in_any_order(index: list[int], data: st.DataObject) -> None:
    batch: dict[str, Any] = {
        "images": torch.arange(5),
        "rows": np.arange(len(index)) * 10,
        "names": [f"row {i}" for i in range(len(index))],
        "of": torch.tensor(index)[:, None],
    }
    view = BatchView(batch, cut.ragged("rows", "names", by="of"))
    start = data.draw(st.integers(0, 4))
    stop = data.draw(st.integers(start + 1, 5))
    piece = view.piece(start, stop)
    mine = [place for place, sample in enumerate(index) if start <= sample < stop]
    assert piece["rows"].tolist() == [place * 10 for place in mine]
    assert piece["names"] == [f"row {place}" for place in mine]
    assert piece["of"].tolist() == [[index[place] - start] for place in mine]
    assert batch["of"].tolist() == [[sample] for sample in index]


def test_a_column_of_the_rows_holds_the_index() -> None:
    # YOLOv5's targets: picture, class, box
    targets = torch.tensor([[0.0, 7, 1], [2, 8, 2], [2, 9, 3], [1, 7, 4]])
    view = BatchView((torch.zeros(3, 2), targets), cut.ragged(1, column=0))
    assert view.piece(1, 3)[1].tolist() == [[1, 8, 2], [1, 9, 3], [0, 7, 4]]
    assert targets[:, 0].tolist() == [0, 2, 2, 1]


def test_names_are_found_beside_their_fields() -> None:
    inner = {"boxes": torch.arange(3), "of": torch.tensor([0, 1, 1])}
    other = {"boxes": torch.arange(4), "of": torch.tensor([0, 0, 0, 1])}
    batch = {"x": torch.zeros(2), "left": inner, "right": other}
    piece = BatchView(batch, cut.ragged("boxes", by="of")).piece(1, 2)
    assert piece["left"]["boxes"].tolist() == [1, 2]
    assert piece["right"]["boxes"].tolist() == [3]


def test_a_container_of_rows_is_cut_as_one() -> None:
    batch = {
        "x": torch.zeros(2),
        "targets": {"boxes": torch.zeros(3, 4), "names": ["a", "b", "c"]},
        "n": torch.tensor([1, 2]),
    }
    piece = BatchView(batch, cut.ragged("targets", lengths="n")).piece(1, 2)
    assert piece["targets"]["boxes"].shape == (2, 4)
    assert piece["targets"]["names"] == ["b", "c"]


BOXES = {"img": torch.zeros(3, 2), "cls": torch.zeros(4), "batch_idx": torch.tensor([0, 0, 1, 2])}
BY = cut.ragged("cls", by="batch_idx")


@pytest.mark.parametrize(
    ("change", "dims", "told"),
    [
        ({"batch_idx": torch.tensor([0, 0, 1, 3])}, BY, "holds 3"),
        ({"batch_idx": torch.tensor([0, 0, 1, -1])}, BY, "holds -1"),
        ({"batch_idx": torch.tensor([0, 0, 1, 1.5])}, BY, "holds 1.5"),
        ({"batch_idx": torch.tensor([0, 0, 1])}, BY, "its rows should be 3"),
        ({"batch_idx": torch.zeros(4, 2)}, BY, "shape (4, 2)"),
        ({"batch_idx": torch.zeros(4, dtype=torch.bool)}, BY, "torch.bool"),
        ({"batch_idx": "abcd"}, BY, "'abcd'"),
        ({}, cut.ragged("cls", by="index"), "no 'index'"),
        ({}, cut.ragged("cls", column=1), "no column 1"),
        ({}, cut.ragged("cls", lengths=[1, 1, 1]), "its rows should be 3"),
        ({}, cut.ragged("cls", lengths=[2, 2]), "2 samples"),
        ({}, cut.ragged("cls", lengths=[3, 1, 0], dim=1), "4 on dim 1"),
        ({}, cut.offsets("cls", offsets="batch_idx"), "4 samples"),
        ({"offsets": torch.tensor([1, 2, 3])}, cut.offsets("cls"), "begin with 0"),
        ({"offsets": torch.tensor([0, 3, 2])}, cut.offsets("cls"), "begin with 0"),
        ({"offsets": torch.tensor([0, 3, 5])}, cut.offsets("cls"), "no more than the rows"),
    ],
)
def test_values_that_contradict_the_batch_are_refused(
    change: dict[str, Any], dims: dict[str, Any], told: str
) -> None:
    with pytest.raises(BatchError) as raised:
        BatchView(BOXES | change, cut.whole("batch_idx") | dims)
    assert told in str(raised.value)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: cut.ragged("cls"),
        lambda: cut.ragged(by="batch_idx"),
        lambda: cut.ragged("cls", by="batch_idx", lengths=[1]),
        lambda: cut.ragged("cls", by=[0, 1]),  # type: ignore[arg-type]
        lambda: cut.ragged("cls", lengths=2.5),  # type: ignore[arg-type]
        lambda: cut.ragged("cls", column=-1),
        lambda: cut.ragged("cls", by="batch_idx", dim=True),
        lambda: cut.ragged(None, by="batch_idx"),  # type: ignore[arg-type]
        lambda: cut.offsets(),
        lambda: cut.offsets("input", offsets=None),  # type: ignore[arg-type]
        lambda: cut.packed(),
        lambda: cut.packed("input_ids", cu_seqlens=()),
    ],
)
def test_words_that_make_no_sense_are_refused(wrong: Callable[[], Any]) -> None:
    with pytest.raises(UsageError):
        wrong()


def test_an_index_alone_does_not_tell_the_number_of_samples() -> None:
    batch = {"rows": torch.zeros(3), "of": torch.tensor([0, 0, 1])}
    with pytest.raises(BatchError, match="nothing tells how many samples"):
        BatchView(batch, cut.ragged("rows", by="of"))


def test_a_bound_on_the_longest_stays() -> None:
    batch = {
        "input_ids": torch.arange(5)[None],
        "cu_seqlens": torch.tensor([0, 2, 5]),
        "max_seqlen": 16,
    }
    assert BatchView(batch).piece(0, 1)["max_seqlen"] == 16
    with pytest.raises(BatchError, match="has 3 rows"):
        BatchView(batch | {"max_seqlen": torch.tensor(2)})


def test_a_dimension_of_tokens_can_be_said() -> None:
    batch = {"logits": torch.zeros(1, 3, 3), "cu_seqlens": torch.tensor([0, 1, 3])}
    with pytest.raises(BatchError, match="2 of its dimensions"):
        BatchView(batch)
    piece = BatchView(batch, cut.packed("logits", dim=1)).piece(1, 2)
    assert piece["logits"].shape == (1, 2, 3)


@pytest.mark.parametrize(
    "beside",
    [
        {"batch_idx": torch.tensor([7, 3, 12, 90])},  # places in a data set
        {"batch_idx": torch.zeros(4, 2)},
        {"batch": torch.tensor([0, 0, 1, 1])},  # of an experiment, without graphs
        {"offsets": torch.tensor([0.5, 1, 2, 3])},
        {"offsets": torch.tensor([3, 1, 2, 0])},
        {"offsets": torch.zeros(4, 2).long()},
        {"cu_seqlens": torch.tensor([0, 5, 9, 12])},  # of something that is not here
    ],
)
def test_a_key_whose_data_mean_something_else_is_read_in_the_ordinary_way(
    beside: dict[str, Tensor],
) -> None:
    batch = {"x": torch.arange(4), "y": torch.zeros(4, 3)} | beside
    piece = BatchView(batch).piece(1, 3)
    assert all(torch.equal(piece[name], batch[name][1:3]) for name in batch)


def test_a_field_that_can_be_read_in_two_ways_is_asked_about_once() -> None:
    batch = {
        "img": torch.zeros(4, 2),
        "area": torch.arange(4.0),
        "batch_idx": torch.tensor([0, 0, 1, 3]),
    }
    with pytest.raises(BatchError, match='"area" can be read in two ways beside') as raised:
        BatchView(batch)
    lines = str(raised.value)
    assert 'dims={"area": 0}' in lines
    assert 'dims=cut.ragged("area", by="batch_idx")' in lines
    assert BatchView(batch, {"area": 0}).piece(1, 3)["area"].tolist() == [1, 2]
    by_index = BatchView(batch, cut.ragged("area", by="batch_idx"))
    assert by_index.piece(1, 3)["area"].tolist() == [2]
    more = {
        "img": torch.zeros(3, 2),
        "area": torch.arange(5.0),
        "batch_idx": torch.tensor([0, 0, 1, 2, 2]),
    }
    known = BatchView(more).known_lists
    assert BatchView(batch, known_lists=known).piece(1, 3)["area"].tolist() == [2]
    few = more | {"area": torch.arange(3.0)}
    known = BatchView(few).known_lists
    assert BatchView(batch, known_lists=known).piece(1, 3)["area"].tolist() == [1, 2]


def test_offsets_that_can_be_read_in_two_ways_are_asked_about() -> None:
    batch = {"input": torch.arange(7), "offsets": torch.tensor([0, 2, 7])}
    with pytest.raises(BatchError, match="3 bags, the last of which is empty, or as 2 bags"):
        BatchView(batch)
    assert BatchView(batch, cut.offsets("input")).length == 3
    assert BatchView(batch, cut.offsets("input", include_last_offset=True)).length == 2


def test_edges_between_graphs_are_refused() -> None:
    batch = {
        "x": torch.zeros(3, 2),
        "batch": torch.tensor([0, 0, 1]),
        "edge_index": torch.tensor([[0, 1], [1, 2]]),
        "y": torch.zeros(2),
    }
    with pytest.raises(BatchError, match="edges between the graphs"):
        BatchView(batch)
    with pytest.raises(BatchError, match="0 to 5 for 3 nodes"):
        BatchView(batch | {"edge_index": torch.tensor([[0], [5]])})


def test_ragged_fields_and_sorting_by_length_are_refused_together() -> None:
    batch = {"mask": torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1]]), "rows": torch.zeros(3)}
    by_length = ByLength("mask", None, lambda kind, text: None)
    with pytest.raises(BatchError, match=r"ranges of rows.*leave out pieces="):
        BatchView(batch, cut.ragged("rows", lengths=[1, 2]), by_length=by_length)
    with pytest.raises(BatchError, match=r"cut\.ragged"):
        BatchView(batch, {"rows": "by batch_idx"})  # type: ignore[dict-item]
