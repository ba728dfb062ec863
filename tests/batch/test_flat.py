from __future__ import annotations

from collections import OrderedDict
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from elastic_mbs.batch.counts import Counts
from elastic_mbs.batch.flat import flat
from elastic_mbs.batch.schedule import Schedule
from elastic_mbs.batch.view import AT_A_TIME, BatchView, Reading
from elastic_mbs.errors import BatchError

ASK = {("nowhere",): Reading.ITEMS}
"""A reading of an earlier batch: with it, every question is asked."""


class Pair(NamedTuple):
    x: Tensor
    y: Tensor


@st.composite
def batches(draw: st.DrawFn) -> Any:
    samples = draw(st.integers(1, 9))
    shapes = draw(st.lists(st.lists(st.integers(0, 3), max_size=2), min_size=1, max_size=4))
    tensors = [torch.randn(samples, *shape).requires_grad_(draw(st.booleans())) for shape in shapes]
    kind = draw(st.sampled_from([tuple, list, dict, Tensor]))
    if kind is dict:
        return dict(zip(["x", "y", 3, "a.b"], tensors, strict=False))
    return tensors[0] if kind is Tensor else kind(tensors)


@given(batches(), st.data())
def test_it_reads_what_the_long_way_reads(batch: Any, data: st.DataObject) -> None:
    quick, asked = BatchView(batch), BatchView(batch, readings=ASK)
    assert flat(batch) is not None
    assert (quick.length, quick.elements, quick.doubt, quick.unused) == (asked.length, asked.elements, asked.doubt, asked.unused)
    assert quick.versions() == asked.versions()
    assert [name for name, _ in quick.named_tensors()] == [name for name, _ in asked.named_tensors()]
    assert all(a is b for (_, a), (_, b) in zip(quick.named_tensors(), asked.named_tensors(), strict=True))
    assert all(a is b for a, b in zip(quick.tensors(), asked.tensors(), strict=True))
    start = data.draw(st.integers(0, quick.length - 1))
    stop = data.draw(st.integers(start + 1, quick.length))
    for piece in (quick.piece(start, stop), *quick.pieces([(start, stop)])):
        wanted = asked.piece(start, stop)
        assert type(piece) is type(wanted)
        assert (list(piece) if isinstance(piece, dict) else None) == (list(wanted) if isinstance(wanted, dict) else None)
        for a, b in zip(BatchView(piece).tensors(), BatchView(wanted).tensors(), strict=True):
            assert torch.equal(a, b)
            assert a._base is b._base  # a view, nothing copied


@pytest.mark.parametrize(
    "batch",
    [
        (),
        [],
        {},
        (torch.zeros(0, 2), torch.zeros(3)),
        (torch.zeros(3), torch.zeros(0)),
        (torch.zeros(0),),
        (torch.zeros(3), torch.zeros(4)),
        (torch.zeros(3), 1),
        (torch.zeros(3), torch.tensor(1.0)),
        (torch.zeros(3), torch.eye(3).to_sparse()),
        nn.Parameter(torch.zeros(3)),
        OrderedDict(x=torch.zeros(3)),
        Pair(torch.zeros(3), torch.zeros(3)),
        [[torch.zeros(3)]],
        "text",
    ],
    ids=str,
)
def test_what_raises_a_question_is_left_to_the_long_way(batch: Any) -> None:
    assert flat(batch) is None


@pytest.mark.parametrize("batch", [(torch.zeros(3), torch.zeros(4)), torch.zeros(0, 2), {}], ids=["disagree", "empty", "nothing"])
def test_errors_are_those_of_the_long_way(batch: Any) -> None:
    with pytest.raises(BatchError) as quick:
        BatchView(batch)
    with pytest.raises(BatchError) as asked:
        BatchView(batch, readings=ASK)
    assert str(quick.value) == str(asked.value)


def test_many_pieces_are_not_cut_ahead() -> None:
    view = BatchView(torch.zeros(2 * AT_A_TIME))
    assert len(view.pieces([(i, i + 1) for i in range(AT_A_TIME)])) == AT_A_TIME
    assert view.pieces([(i, i + 1) for i in range(AT_A_TIME + 1)]) == []


def test_a_piece_that_is_cut_again_does_not_see_what_was_done_to_its_container() -> None:

    view = BatchView({"x": torch.arange(6)})
    schedule = Schedule(Counts.samples(6), pieces=view.pieces)
    piece = schedule.next(3)
    assert piece is not None
    piece.data.pop("x")
    schedule.push(piece)
    again = schedule.next(3)
    assert again is not None
    assert again.data["x"].tolist() == [0, 1, 2]
