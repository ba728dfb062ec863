"""A batch that can be (S, N, …) is told of once, with the line for either meaning."""

import re
from typing import Any

import pytest
from torch import Tensor, nn

from elastic_mbs import ElasticMBS
from elastic_mbs.batch.view import BatchView
from elastic_mbs.errors import BatchError
from elastic_mbs.events import Warned
from tests.helpers.batches import rows


class Reader(nn.Module):
    def __init__(self, *, batch_first: bool) -> None:
        super().__init__()
        self.rnn = nn.GRU(4, 3, batch_first=batch_first)

    def forward(self, batch: Any) -> Tensor:
        states: Tensor = self.rnn((batch if isinstance(batch, Tensor) else batch["x"]).float())[0]
        return states


def told(batch: Any, *, batch_first: bool = False, **options: Any) -> list[str]:
    model, events = Reader(batch_first=batch_first), list[Any]()
    mbs = ElasticMBS(model, on_event=events.append, **options)
    for _ in range(2):
        mbs.backward(lambda piece: model(piece).mean(), batch)
    return [event.message for event in events if isinstance(event, Warned)]


@pytest.mark.parametrize(
    ("batch", "samples"),
    [
        (rows(5, 3, 4), 3),
        ({"x": rows(5, 3, 4)}, 3),
        ({"x": rows(5, 3, 4), "target": rows(5, 3)}, 3),
        ({"x": rows(5, 5, 4), "lengths": rows(5)}, 5),  # as many steps as samples, by chance
    ],
    ids=["tensor", "dict", "two parts", "square"],
)
def test_a_batch_that_can_be_cut_along_time_is_told_of_once(batch: Any, samples: int) -> None:
    messages = told(batch)
    assert len(messages) == 1
    assert messages[0].startswith("rnn (GRU) takes sequences of shape (S, N, …)")
    second, first = (eval(line) for line in re.findall(r"dims=(\{[^}]*\})", messages[0]))
    x = batch if isinstance(batch, Tensor) else batch["x"]
    for dims, length, dim in ((second, samples, 1), (first, 5, 0)):
        view = BatchView(batch, dims)
        piece = view.piece(0, 2)
        assert view.length == length
        assert (piece if isinstance(piece, Tensor) else piece["x"]).shape[dim] == 2
        assert x.shape[dim] == length
        assert told(batch, dims=dims) == []


@pytest.mark.parametrize(
    "batch",
    [
        {"x": rows(5, 3, 4), "label": rows(5)},  # one label a sample: 5 samples
        {"x": rows(5, 3, 4), "target": rows(5, 2)},  # no length on dim 1 on which all agree
        {"x": rows(5, 3, 4), "picture": rows(5, 4), "text": list("abcde")},
        rows(1, 3, 4),
    ],
    ids=["label", "target", "picture", "one"],
)
def test_a_batch_that_says_its_samples_is_not_told_of(batch: Any) -> None:
    assert told(batch) == []


def test_a_model_that_takes_samples_first_is_not_told_of() -> None:
    assert told(rows(5, 3, 4), batch_first=True) == []


def test_parts_that_disagree_have_the_module_in_a_note() -> None:
    for batch_first in (False, True):
        with pytest.raises(BatchError, match="disagree") as caught:
            told({"x": rows(5, 3, 4), "label": rows(3)}, batch_first=batch_first)
        notes = getattr(caught.value, "__notes__", [])
        assert [note.split(" takes")[0] for note in notes] == ["rnn (GRU)"] * (not batch_first)
