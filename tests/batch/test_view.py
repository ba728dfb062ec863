"""A batch of any shape is N samples, cut without copies and joined without loss."""

import copy
import sys
from collections import UserDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.utils.rnn import pack_sequence

from elastic_mbs import cut
from elastic_mbs.batch.join import Apart, PerPiece, join
from elastic_mbs.batch.view import BatchView, check_graphs
from elastic_mbs.errors import BatchError
from tests.helpers.batches import Encoding, Named, rows, splits


@dataclass(frozen=True)
class Sample:
    a: Any
    b: Any


def has_rows(value: Any) -> bool:
    if isinstance(value, dict | UserDict | tuple):
        return any(map(has_rows, value.values() if isinstance(value, dict | UserDict) else value))
    return has_rows((value.a, value.b)) if isinstance(value, Sample) else value is not None


def containers(n: int) -> st.SearchStrategy[Any]:
    """Return nested containers in which every leaf holds n samples or is None."""
    leaf: st.SearchStrategy[Any] = st.one_of(
        st.lists(st.integers(1, 3), max_size=2).map(lambda shape: rows(n, *shape)),
        st.just(torch.linspace(0, 1, n, dtype=torch.float64)),
        st.just([f"sample {i}" for i in range(n)]),
        st.just(np.arange(n * 2).reshape(n, 2)),
        st.none(),
    )
    names = st.sampled_from(["ids", "mask", "labels", "pixels"])

    def nest(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
        return st.one_of(
            st.dictionaries(names, inner, min_size=1, max_size=3),
            st.dictionaries(names, inner, min_size=1, max_size=3).map(UserDict),
            st.lists(inner, min_size=1, max_size=3).map(tuple),
            # Two things without rows beside two samples are taken for the samples', and nothing
            # could tell.
            st.tuples(st.just(rows(n)), inner.filter(has_rows)).map(list),
            st.tuples(inner, inner).map(lambda pair: Sample(*pair)),
            st.tuples(inner, inner).map(Named._make),
        )

    # One tensor for sure, so that there is something to cut.
    return st.recursive(leaf, nest, max_leaves=6).map(
        lambda other: {"first": rows(n, 2), "other": other}
    )


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_joining_the_pieces_of_any_split_gives_the_batch_back(data: st.DataObject) -> None:
    # not 2 or 3: a list of as many alike parts is asked about
    n = data.draw(st.integers(4, 9) | st.just(1))
    batch = data.draw(containers(n))
    ranges = data.draw(splits(n))
    view = BatchView(batch)
    assert view.length == n
    pieces = [view.piece(start, stop) for start, stop in ranges]
    joined = join(pieces, [stop - start for start, stop in ranges])
    assert repr(joined) == repr(batch)
    assert type(joined["other"]) is type(batch["other"])


@settings(deadline=None, max_examples=50)
@given(st.data())
def test_pieces_cover_every_sample_exactly_once_along_any_dimension(data: st.DataObject) -> None:
    n, dim = data.draw(st.integers(1, 9)), data.draw(st.integers(-3, 2))
    shape = [2, 2, 2]
    shape[dim] = n
    ids = torch.arange(8 * n // 2).reshape(shape)
    view = BatchView({"x": rows(n), "positions": ids}, {"positions": dim})
    pieces = [view.piece(start, stop) for start, stop in data.draw(splits(n))]
    assert torch.equal(torch.cat([piece["positions"] for piece in pieces], dim), ids)
    assert torch.equal(torch.cat([piece["x"] for piece in pieces]), rows(n))
    assert all(
        piece["positions"].untyped_storage().data_ptr() == ids.untyped_storage().data_ptr()
        for piece in pieces
    )


def test_a_tensor_subclass_is_cut_by_its_own_narrow() -> None:
    class Narrowed(torch.Tensor):
        def narrow(self, *place: Any) -> Any:
            cuts.append(place)
            return super().narrow(*place)

    cuts: list[Any] = []
    BatchView((rows(8).as_subclass(Narrowed), rows(8))).piece(0, 2)
    assert cuts == [(0, 0, 2)]


def test_what_holds_no_samples_passes_whole() -> None:
    scale, table, config, adjacency = (
        torch.tensor(2.0),
        rows(3, 3),
        object(),
        rows(3, 3).to_sparse(),
    )
    others = {
        "scale": scale,
        "n": 3,
        "text": "ab",
        "no": None,
        "t": torch.float32,
        "np": np.float64(2),
        "z": torch.Size((1, 2)),
    }
    piece = BatchView({"x": rows(4)} | others).piece(0, 2)
    assert {name: part for name, part in piece.items() if name != "x"} == others
    named = {"x": rows(4), "table": table, "deep": {"config": config}, "adj": adjacency}
    view = BatchView(named, cut.whole("table", "deep.config", "adj"))
    piece = view.piece(0, 2)
    assert piece["table"] is table
    assert piece["deep"]["config"] is config
    assert piece["adj"] is adjacency
    assert view.tensors == [named["x"], table, adjacency]


@pytest.mark.parametrize(
    ("batch", "dims", "elements"),
    [
        (rows(4, 3), None, 3),
        (rows(4), None, 1),
        (list("abcd"), None, 1),
        ({"x": rows(4, 3), "w": rows(5, 5)}, cut.whole("w"), 3),
        ({"x": rows(4, 3), "s": torch.tensor(1)}, None, 3),
        ({"p": rows(2, 4)}, {"p": 1}, 2),
        # (4 + 10) / 4, rounded up
        ({"x": rows(4), "i": [rows(i) for i in (1, 2, 3, 4)]}, cut.items("i"), 4),
        ({"x": rows(4), "a": np.zeros((4, 5))}, None, 6),
    ],
)
def test_elements_are_those_of_the_cut_tensors_per_sample_rounded_up(
    batch: Any, dims: Any, elements: int
) -> None:
    assert BatchView(batch, dims).elements == elements


def test_versions_notice_an_edit_in_place_anywhere() -> None:
    with torch.inference_mode():
        frozen = torch.ones(4)
    batch = {
        "x": rows(4),
        "w": rows(5),
        "t": [{"a": rows(2)} for _ in range(4)],
        "f": frozen,
        "names": list("abcd"),
    }
    view = BatchView(batch, cut.whole("w"))
    before = view.versions()
    assert sorted(before)[:2] == [-1, 0]  # the inference tensor has none
    assert view.versions() == before
    edits: list[Tensor] = [view.piece(1, 2)["x"], view.tensors[1], view.piece(2, 3)["t"][0]["a"]]
    for edit in edits:
        edit.add_(1)
        assert view.versions() != before
        before = view.versions()


def test_named_tensors_are_the_fields() -> None:
    ids, y, w = rows(3, 2), rows(3), rows(4)
    view = BatchView(
        {"in": (ids, 1), "y": y, "w": w, "t": [{"a": rows(5)}] * 3, "v": [[y, y]]},
        cut.whole("w"),
    )
    named = view.named_tensors()
    assert [path for path, _ in named] == ["in.0", "y", "w", "v.0.0", "v.0.1"]
    assert named[0][1] is ids


def test_a_batch_that_requires_grad_gets_its_gradient_through_the_pieces() -> None:
    x = torch.arange(4.0, requires_grad=True)
    view = BatchView({"x": x})
    for start, stop in ((0, 3), (3, 4)):
        (view.piece(start, stop)["x"] ** 2).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [0, 2, 4, 6]


@pytest.mark.parametrize(
    ("part", "name"),
    [(lambda x: {"x": x}, "x"), (lambda x: [{"a": x}], "batch")],
    ids=["field", "item"],
)
def test_a_graph_in_the_batch_is_refused_by_name_in_items_too(part: Any, name: str) -> None:
    batch = part(torch.ones(1, requires_grad=True) * 2)
    with pytest.raises(BatchError, match=f"the tensor '{name}' carries a graph"):
        check_graphs(BatchView(batch))


@pytest.mark.parametrize(
    ("batch", "dims", "array"),
    [
        ({"x": rows(4), "a": np.zeros((4, 2))}, None, lambda batch: batch["a"]),
        ({"x": rows(4), "a": [np.zeros(2)] * 4}, None, lambda batch: batch["a"][0]),
        ([{"a": [np.zeros(2)]} for _ in range(4)], cut.items(), lambda batch: batch[0]["a"][0]),
        ({"x": rows(4), "a": np.zeros(2)}, cut.whole("a"), lambda batch: batch["a"]),
        (
            {"x": rows(4), "a": {"of": [np.zeros(2)]}},
            cut.whole("a"),
            lambda batch: batch["a"]["of"][0],
        ),
        ({"x": rows(4), "a": np.array(0.0)}, None, lambda batch: batch["a"]),
    ],
    ids=["cut", "item", "in an item", "whole", "in a whole part", "0-d"],
)
def test_an_edit_of_an_array_reaches_neither_a_replay_nor_the_batch(
    batch: Any, dims: Any, array: Callable[[Any], Any]
) -> None:
    view = BatchView(batch, dims)
    for _ in range(2):
        edited = array(view.piece(0, 2))
        edited += 1
        assert (edited == 1).all()
    assert not array(batch).any()


@pytest.mark.parametrize("dims", [{}, {"a": 1}, cut.whole("a")])
def test_an_edit_of_a_list_in_an_array_reaches_no_replay(dims: dict[str, Any]) -> None:
    array = np.empty((3, 3), dtype=object)
    for place in np.ndindex(3, 3):
        array[place] = ["word"]
    view = BatchView({"x": rows(3), "a": array}, dims)
    view.piece(0, 2)["a"][0, 0].append("edited")
    assert view.piece(0, 2)["a"][0, 0] == ["word"]
    assert array[0, 0] == ["word"]


def test_numpy_arrays_are_cut_as_copies_and_numpy_is_never_imported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    array = np.arange(8).reshape(4, 2)
    piece = BatchView({"a": array}).piece(1, 3)["a"]
    assert not np.shares_memory(piece, array)
    assert piece.tolist() == [[2, 3], [4, 5]]
    from elastic_mbs.batch.containers import kind_of

    kind_of.clear()
    monkeypatch.delitem(sys.modules, "numpy")
    assert BatchView(rows(4)).length == 4
    with pytest.raises(BatchError, match=r"numpy\.ndarray"):  # what is not loaded cannot be known
        BatchView({"a": array})
    assert "numpy" not in sys.modules
    kind_of.clear()


# ---------------------------------------------------------------------- joined outputs


def test_one_piece_gives_the_same_types_as_several() -> None:
    one: dict[str, Any] = {"loss": torch.tensor(1.0), "logits": torch.ones(3), "n": 3, "name": "a"}
    one |= {"items": ["x", "y", "z"], "cache": None, "size": torch.Size([3, 2])}
    other = {
        "loss": torch.tensor(4.0),
        "logits": torch.ones(2),
        "n": 2,
        "name": "a",
        "items": ["u", "v"],
        "cache": None,
        "size": torch.Size([2, 2]),
    }
    alone, together = join([one], [3]), join([one, other], [3, 2])
    assert {key: type(value) for key, value in alone.items()} == {
        key: type(value) for key, value in together.items()
    }
    assert (together["logits"].tolist(), together["loss"], together["n"]) == (
        [1.0] * 5,
        [1, 4],
        [3, 2],
    )
    assert alone["logits"] is one["logits"]
    assert (alone["loss"], alone["n"], alone["name"], alone["cache"]) == ([1.0], [3], "a", None)
    assert join([None], [3]) is None


@pytest.mark.parametrize("make", [torch.zeros, np.zeros], ids=["tensor", "array"])
def test_a_place_that_once_was_no_samples_never_is_again(
    make: Any,
) -> None:
    # a matrix of four classes has as many rows as a piece of four samples
    per_piece = set[Any]()
    assert isinstance(join([{"matrix": make((4, 4))}] * 2, [3, 3], per_piece)["matrix"], PerPiece)
    again = join([{"matrix": make((4, 4)), "scores": make((4, 2))}] * 2, [4, 4], per_piece)
    assert isinstance(again["matrix"], PerPiece)
    assert len(again["scores"]) == 8
    # rows of another shape: another batch may be joined
    padded = join([make((4, 2)), make((4, 3))], [4, 4], per_piece, pad=Apart.APART)
    assert isinstance(padded, PerPiece)
    assert len(join([make((4, 2))] * 2, [4, 4], per_piece)) == 8


def test_another_shape_at_the_same_place_is_joined() -> None:
    # the loss of an evaluation lies at the place where training returns its logits
    per_piece = set[Any]()
    assert isinstance(
        join([(torch.tensor(1.0), torch.zeros(3, 5))] * 2, [3, 3], per_piece)[0], PerPiece
    )
    assert isinstance(join([(torch.zeros(5, 5), None)] * 2, [3, 3], per_piece)[0], PerPiece)
    assert join([(torch.zeros(3, 4), torch.zeros(3))] * 2, [3, 3], per_piece)[0].shape == (6, 4)
    assert join([torch.zeros(3)] * 2, [3, 3], per_piece).shape == (6,)


def test_ever_new_shapes_are_not_remembered_without_end() -> None:
    per_piece = set[Any]()
    for size in range(1000):
        assert isinstance(join([torch.zeros(5, size)] * 2, [3, 3], per_piece), PerPiece)
    assert len(per_piece) < 300


def test_a_number_beside_items_is_not_taken_for_an_equal_item() -> None:
    class Result(dict[str, Any]):
        version = 8

    pieces = [Result(hits=8, y=torch.zeros(2)), Result(hits=8, y=torch.zeros(2))]
    for piece in pieces:
        piece.version, piece.alias = 8, piece["y"]  # type: ignore[attr-defined]  # attributes that only this output has
    joined: Any = join(pieces, [2, 2])
    assert isinstance(joined["hits"], PerPiece)
    assert joined.version == 8
    assert joined.alias is joined["y"]


@pytest.mark.parametrize(
    ("kept", "joined"),
    [([["a", "b"], ["c"]], ["a", "b", "c"]), ([["a"], ["a"]], ["a"]), ([None, None], None)],
)
def test_a_tokenizers_batch_is_joined_with_its_encodings(kept: Any, joined: Any) -> None:
    found = join([Encoding({"ids": torch.zeros(n)}, kept[2 - n], names=[]) for n in (2, 1)], [2, 1])
    assert found["ids"].shape == (3,)
    assert found._encodings == joined


def test_values_per_piece_have_their_mean_and_sum_over_the_samples() -> None:
    joined = join(
        [{"loss": torch.tensor(1.0), "hits": 2}, {"loss": torch.tensor(4.0), "hits": 1}], [3, 1]
    )
    assert isinstance(joined["loss"], PerPiece)
    assert joined["loss"].lengths == (3, 1)
    assert float(joined["loss"].mean()) == 1.75
    assert joined["hits"].sum() == 3
    assert copy.deepcopy(joined["hits"]).sum() == 3


@pytest.mark.parametrize(
    "pieces",
    [
        [torch.zeros(3, 4), torch.zeros(2, 4, 1)],
        [torch.zeros(3), torch.zeros(2, dtype=torch.float64)],
        [torch.zeros(3), torch.zeros(2, device="meta")],
        [torch.zeros(3, 2).to_sparse(), torch.zeros(2, 2).to_sparse()],
        [torch.zeros(3), None],
        [{"a": 1}, {"b": 1}],
        [{"a": 1}, {"a": 1, "b": 1}],
        [(1,), (1, 2)],
        [torch.Size([3, 4]), torch.Size([2, 4])],
        [np.zeros((3, 4)), np.zeros((2, 4, 1))],
        [{1}, {2}],
        ["a", "b"],
        [3, 2],
        [["a"], ["b", "c", "d"]],
        [pack_sequence([torch.ones(2)])] * 2,
    ],
    ids=str,
)
def test_outputs_that_do_not_fit_together_come_once_a_piece(pieces: list[Any]) -> None:
    joined = join(pieces, [3, 2])
    assert type(joined) is PerPiece
    assert all(new is old for new, old in zip(joined, pieces, strict=True))


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_are_never_taken_apart(layout: torch.layout) -> None:
    # a strided nested tensor has no shape
    pieces = [
        torch.nested.nested_tensor([torch.zeros(1, 2), torch.zeros(3, 2)], layout=layout)
        for _ in range(2)
    ]
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
        ([Named(torch.zeros(3)), Named(torch.zeros(2))], [3, 2], Named(torch.zeros(5))),
        (
            [(torch.zeros(3), [torch.zeros(3)]), (torch.zeros(2), [torch.zeros(2)])],
            [3, 2],
            (torch.zeros(5), [torch.zeros(5)]),
        ),
        ([["a", "b", "c"], ["d", "e"]], [3, 2], list("abcde")),
        (
            [[{"box": box} for box in ragged(1, 2, 3)], [{"box": box} for box in ragged(4, 5)]],
            [3, 2],
            [{"box": b} for b in ragged(1, 2, 3, 4, 5)],
        ),
        ([ragged(1, 2, 3), ragged(4, 5)], [3, 2], ragged(1, 2, 3, 4, 5)),
        ([ragged(1, 7), ragged(5, 4)], [2, 2], ragged(1, 7, 5, 4)),
        (
            [[torch.zeros(2, 5), torch.zeros(2, 6)], [torch.zeros(2, 7)] * 2],
            [2, 2],
            [torch.zeros(2, size) for size in (5, 6, 7, 7)],
        ),
        (
            [[torch.zeros(2), "a"], [torch.zeros(2), "b"]],
            [2, 2],
            [torch.zeros(2), "a", torch.zeros(2), "b"],
        ),
        (
            [[torch.zeros(2, 5), torch.zeros(2, 6)]] * 2,
            [2, 2],
            [torch.zeros(4, 5), torch.zeros(4, 6)],
        ),
        # of two types: no list of samples
        (
            [[torch.zeros(2), {"ids": torch.zeros(2)}]] * 2,
            [2, 2],
            [torch.zeros(4), {"ids": torch.zeros(4)}],
        ),
        ([[0.5, 1.5], [2.5, 3.5]], [3, 3], [[0.5, 2.5], [1.5, 3.5]]),
    ],
    ids=str,
)
def test_containers_keep_their_type_and_rows_and_items_their_order(
    outputs: list[Any], lengths: list[int], joined: Any
) -> None:
    found = join(outputs, lengths)
    assert isinstance(found, type(joined))
    assert repr(found) == repr(joined)
