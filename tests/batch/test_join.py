"""Outputs of the pieces become the batch's output, and what is not per sample is kept, not invented."""

import copy
from collections import UserDict
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import pack_sequence

from elastic_mbs.batch.join import PerPiece, join


class Out(NamedTuple):
    logits: Any
    loss: Any = None


def test_one_piece_gives_the_same_types_as_several() -> None:
    one: dict[str, Any] = {"loss": torch.tensor(1.0), "logits": torch.ones(3), "n": 3, "name": "a"}
    one |= {"items": ["x", "y", "z"], "cache": None, "size": torch.Size([3, 2])}
    other = {"loss": torch.tensor(4.0), "logits": torch.ones(2), "n": 2, "name": "a", "items": ["u", "v"], "cache": None, "size": torch.Size([2, 2])}
    alone, together = join([one], [3]), join([one, other], [3, 2])
    assert {key: type(value) for key, value in alone.items()} == {key: type(value) for key, value in together.items()}
    assert (together["logits"].tolist(), together["loss"], together["n"]) == ([1.0] * 5, [1, 4], [3, 2])
    assert alone["logits"] is one["logits"]
    assert (alone["loss"], alone["n"], alone["name"], alone["cache"]) == ([1.0], [3], "a", None)
    assert join([None], [3]) is None


@pytest.mark.parametrize("make", [torch.zeros, np.zeros], ids=["tensor", "array"])
def test_what_was_once_of_another_length_than_its_piece_is_never_taken_for_samples(make: Any) -> None:
    """A matrix of four classes has as many rows as a piece of four samples."""
    per_piece = set[Any]()
    assert isinstance(join([{"matrix": make((4, 4))}] * 2, [3, 3], per_piece)["matrix"], PerPiece)
    again = join([{"matrix": make((4, 4)), "scores": make((4, 2))}] * 2, [4, 4], per_piece)
    assert isinstance(again["matrix"], PerPiece)
    assert len(again["scores"]) == 8
    padded = join([make((4, 2)), make((4, 3))], [4, 4], per_piece)  # rows of another shape: another batch may be joined
    assert isinstance(padded, PerPiece)
    assert len(join([make((4, 2))] * 2, [4, 4], per_piece)) == 8


def test_what_a_function_gives_otherwise_is_not_taken_for_what_came_once_a_piece() -> None:
    """A loss in evaluation made the logits of training, at the same place among the outputs, a list of pieces for good."""
    per_piece = set[Any]()
    assert isinstance(join([(torch.tensor(1.0), torch.zeros(3, 5))] * 2, [3, 3], per_piece)[0], PerPiece)
    assert isinstance(join([(torch.zeros(5, 5), None)] * 2, [3, 3], per_piece)[0], PerPiece)
    assert join([(torch.zeros(3, 4), torch.zeros(3))] * 2, [3, 3], per_piece)[0].shape == (6, 4)
    assert join([torch.zeros(3)] * 2, [3, 3], per_piece).shape == (6,)


def test_what_is_of_another_shape_each_time_is_not_remembered_without_end() -> None:
    per_piece = set[Any]()
    for size in range(1000):
        assert isinstance(join([torch.zeros(5, size)] * 2, [3, 3], per_piece), PerPiece)
    assert len(per_piece) < 300


def test_a_number_next_to_the_items_is_not_taken_for_the_item_of_the_same_value() -> None:
    class Result(dict[str, Any]):
        version = 8

    pieces = [Result(hits=8, y=torch.zeros(2)), Result(hits=8, y=torch.zeros(2))]
    for piece in pieces:
        piece.version, piece.alias = 8, piece["y"]  # type: ignore[attr-defined]  # attributes that only this output has
    joined: Any = join(pieces, [2, 2])
    assert isinstance(joined["hits"], PerPiece)
    assert joined.version == 8
    assert joined.alias is joined["y"]


class _Tokenized(UserDict[str, Any]):
    """As HF's BatchEncoding: a list of encodings beside the items."""

    def __init__(self, data: dict[str, Any], encodings: Any) -> None:
        super().__init__(data)
        self._encodings = encodings


@pytest.mark.parametrize(("kept", "joined"), [([["a", "b"], ["c"]], ["a", "b", "c"]), ([["a"], ["a"]], ["a"]), ([None, None], None)])
def test_a_tokenizers_batch_is_joined_with_its_encodings(kept: Any, joined: Any) -> None:
    found = join([_Tokenized({"ids": torch.zeros(2)}, kept[0]), _Tokenized({"ids": torch.zeros(1)}, kept[1])], [2, 1])
    assert found["ids"].shape == (3,)
    assert found._encodings == joined


def test_what_comes_once_a_piece_has_its_mean_over_the_samples_and_its_sum() -> None:
    joined = join([{"loss": torch.tensor(1.0), "hits": 2}, {"loss": torch.tensor(4.0), "hits": 1}], [3, 1])
    assert isinstance(joined["loss"], PerPiece)
    assert joined["loss"].lengths == (3, 1)
    assert float(joined["loss"].mean()) == 1.75
    assert joined["hits"].sum() == 3
    assert copy.deepcopy(joined["hits"]).sum() == 3


@pytest.mark.parametrize(
    "pieces",
    [
        [torch.zeros(3, 4), torch.zeros(2, 5)],  # padded per piece
        [torch.zeros(3), torch.zeros(2, dtype=torch.float64)],
        [torch.zeros(3), torch.zeros(2, device="meta")],
        [torch.zeros(3, 2).to_sparse(), torch.zeros(2, 2).to_sparse()],
        [torch.zeros(3), None],
        [{"a": 1}, {"b": 1}],
        [{"a": 1}, {"a": 1, "b": 1}],
        [(1,), (1, 2)],
        [torch.Size([3, 4]), torch.Size([2, 4])],
        [np.zeros((3, 4)), np.zeros((2, 5))],
        [{1}, {2}],
        ["a", "b"],
        [3, 2],
        [["a"], ["b", "c", "d"]],
        [pack_sequence([torch.ones(2)])] * 2,
    ],
    ids=str,
)
def test_what_does_not_fit_together_comes_once_a_piece(pieces: list[Any]) -> None:
    joined = join(pieces, [3, 2])
    assert type(joined) is PerPiece
    assert all(new is old for new, old in zip(joined, pieces, strict=True))


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_are_never_taken_apart(layout: torch.layout) -> None:
    """Those of the first kind have no shape to ask for."""
    pieces = [torch.nested.nested_tensor([torch.zeros(1, 2), torch.zeros(3, 2)], layout=layout) for _ in range(2)]
    joined = join(pieces, [2, 2])
    assert isinstance(joined, PerPiece)
    assert joined[0] is pieces[0]


def ragged(*lengths: int) -> list[torch.Tensor]:
    return [torch.zeros(length, 4) for length in lengths]


@pytest.mark.parametrize(
    ("outputs", "lengths", "joined"),
    [
        ([None, None], [3, 2], None),
        ([np.zeros((3, 2)), np.zeros((2, 2))], [3, 2], np.zeros((5, 2))),
        ([Out(torch.zeros(3)), Out(torch.zeros(2))], [3, 2], Out(torch.zeros(5))),
        ([(torch.zeros(3), [torch.zeros(3)]), (torch.zeros(2), [torch.zeros(2)])], [3, 2], (torch.zeros(5), [torch.zeros(5)])),
        ([["a", "b", "c"], ["d", "e"]], [3, 2], list("abcde")),
        ([[{"box": box} for box in ragged(1, 2, 3)], [{"box": box} for box in ragged(4, 5)]], [3, 2], [{"box": b} for b in ragged(1, 2, 3, 4, 5)]),
        ([ragged(1, 2, 3), ragged(4, 5)], [3, 2], ragged(1, 2, 3, 4, 5)),
        ([ragged(1, 7), ragged(5, 4)], [2, 2], ragged(1, 7, 5, 4)),
        ([[torch.zeros(2, 5), torch.zeros(2, 6)], [torch.zeros(2, 7)] * 2], [2, 2], [torch.zeros(2, size) for size in (5, 6, 7, 7)]),
        ([[torch.zeros(2), "a"], [torch.zeros(2), "b"]], [2, 2], [torch.zeros(2), "a", torch.zeros(2), "b"]),
        ([[torch.zeros(2, 5), torch.zeros(2, 6)]] * 2, [2, 2], [torch.zeros(4, 5), torch.zeros(4, 6)]),
        ([[torch.zeros(2), {"ids": torch.zeros(2)}]] * 2, [2, 2], [torch.zeros(4), {"ids": torch.zeros(4)}]),  # of two types: no list of samples
        ([[0.5, 1.5], [2.5, 3.5]], [3, 3], [[0.5, 2.5], [1.5, 3.5]]),
    ],
    ids=str,
)
def test_containers_keep_their_type_and_rows_and_items_their_order(outputs: list[Any], lengths: list[int], joined: Any) -> None:
    found = join(outputs, lengths)
    assert isinstance(found, type(joined))
    assert repr(found) == repr(joined)
