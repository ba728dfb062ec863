"""What a batch holds is read by fixed rules; what is ambiguous or cannot be cut is refused with the line to add."""

import re
from collections import deque
from collections.abc import Callable, Iterator
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import default_collate

from elastic_mbs import cut
from elastic_mbs.batch.view import BatchView
from elastic_mbs.errors import BatchError
from tests.helpers.batches import Named, rows


@pytest.mark.parametrize(
    ("batch", "dims"),
    [
        ({"x": rows(4), "p": rows(2, 4)}, {"p": 1}),
        ({"x": rows(4), "p": rows(2, 4)}, {"p": -1}),
        (({"x": rows(4), "p": rows(2, 4)}, rows(4)), {"p": 1}),  # a name holds at any depth
        (({"x": rows(4), "p": rows(2, 4)}, rows(4)), {"0.p": 1}),
        # the longer path is the more specific
        ({"in": {"p": rows(2, 4)}, "p": rows(4, 2)}, {"in.p": 1, "p": 0}),
        ((rows(4), rows(2, 4)), {1: 1}),
        ((rows(4), rows(2, 4)), {"1": 1}),
        # on a container it holds for its tensors
        ({"x": rows(4), "v": [rows(2, 4), rows(3, 4)]}, {"v": 1}),
        ({"x": rows(4), "v": [{"a": rows(2, 4)}, {"a": rows(3, 4)}]}, {"v": 1}),
        ({"x": rows(4), "p": np.zeros((2, 4))}, {"p": 1}),
        (rows(2, 4), {"": 1}),
        ({"x": rows(4), "v": {"p": rows(2, 4), "n": 1, "w": rows(3)}}, {"v": 1} | cut.whole("w")),
        # what is not there; indexes count from the root only
        (
            {"x": rows(4), "v": [rows(4, 3), rows(4, 4)]},
            {"1": 1, "positions": 1} | cut.whole("mask"),
        ),
    ],
)
def test_dims_say_by_name_path_or_index_where_the_samples_are(
    batch: Any, dims: dict[Any, Any]
) -> None:
    view = BatchView(batch, dims)
    assert (view.length, BatchView(view.piece(1, 3), dims).length) == (4, 2)


LISTS: list[tuple[Any, Any, Callable[[Any], Any], Any]] = [
    ([rows(4), rows(4, 2)], None, lambda piece: [part.shape[0] for part in piece], [2, 2]),
    (["a", "b", "c", "d"], None, lambda piece: piece, ["b", "c"]),
    ([1, 2.5, None, True], None, lambda piece: piece, [2.5, None]),
    ({"x": rows(4), "text": list("abcd")}, None, lambda piece: piece["text"], ["b", "c"]),
    (
        {"x": rows(4), "any": [object, {1}, deque([1]), "d"]},
        None,
        lambda piece: piece["any"],
        [{1}, deque([1])],
    ),
    (
        {"x": rows(4), "ragged": [[1], [2, 3], [], [4]]},
        None,
        lambda piece: piece["ragged"],
        [[2, 3], []],
    ),
    (
        {"x": rows(4), "t": [{"id": i} for i in range(4)]},
        None,
        lambda piece: piece["t"],
        [{"id": 1}, {"id": 2}],
    ),
    (
        {"x": rows(4), "v": [{"a": rows(4)}, {"a": rows(4)}]},
        None,
        lambda piece: [v["a"].tolist() for v in piece["v"]],
        [[1, 2], [1, 2]],
    ),
    (
        {"x": rows(4), "v": [["a", "b", "c", "d"], ["e", "f", "g", "h"]]},
        None,
        lambda piece: piece["v"],
        [["b", "c"], ["f", "g"]],
    ),
    (
        {"x": rows(4), "v": [[["a"], ["b"], ["c"], ["d"]]]},
        None,
        lambda piece: piece["v"],
        [[["b"], ["c"]]],
    ),
    (
        [{"a": rows(i)} for i in (5, 2, 3, 1)],
        None,
        lambda piece: [len(item["a"]) for item in piece],
        [2, 3],
    ),
    (
        [(rows(3), 0), (rows(5), 1), (rows(7), 2), (rows(2), 3)],
        None,
        lambda piece: [item[1] for item in piece],
        [1, 2],
    ),
    (
        {"x": rows(4), "a": [np.zeros(i) for i in (5, 2, 3, 1)]},
        None,
        lambda piece: [len(a) for a in piece["a"]],
        [2, 3],
    ),
    (
        {"images": [rows(3, i) for i in (5, 2, 3, 1)], "y": rows(4)},
        cut.items("images"),
        lambda piece: [i.shape[1] for i in piece["images"]],
        [2, 3],
    ),
    (
        {"images": tuple(rows(3, i) for i in (5, 2, 3, 1))},
        cut.items("images"),
        lambda piece: [i.shape[1] for i in piece["images"]],
        [2, 3],
    ),
    (
        [rows(3, i) for i in (5, 2, 3, 1)],
        cut.items(),
        lambda piece: [i.shape[1] for i in piece],
        [2, 3],
    ),
    (
        [{"a": rows(4)}, {"a": rows(4)}],
        cut.fields(),
        lambda piece: [part["a"].tolist() for part in piece],
        [[1, 2], [1, 2]],
    ),
    (
        {"x": rows(4), "v": [{"a": rows(4)}] * 4},
        cut.fields("v"),
        lambda piece: [len(part["a"]) for part in piece["v"]],
        [2] * 4,
    ),
    (
        {"x": rows(4), "v": [{"a": rows(4)}] * 4},
        cut.items("v"),
        lambda piece: [len(part["a"]) for part in piece["v"]],
        [4, 4],
    ),
    ({"x": rows(4), "names": list("abcd")}, {"names": 0}, lambda piece: piece["names"], ["b", "c"]),
    ({"x": rows(4)}, cut.items("x"), lambda piece: piece["x"].tolist(), [1, 2]),
]


@pytest.mark.parametrize(("batch", "dims", "look", "expected"), LISTS)
def test_lists_are_fields_or_items_as_the_rules_say(
    batch: Any, dims: Any, look: Callable[[Any], Any], expected: Any
) -> None:
    view = BatchView(batch, dims)
    assert view.length == 4
    assert look(view.piece(1, 3)) == expected


def test_both_readings_at_once_are_refused_with_both_ways_out() -> None:
    batch = {"y": rows(3), "views": [{"a": rows(3)}, {"a": rows(3, 2)}, {"a": rows(3)}]}
    with pytest.raises(BatchError, match=r'"views" can be read in two ways: as 3 items') as caught:
        BatchView(batch)
    assert 'dims=cut.items("views")' in str(caught.value)
    assert 'dims=cut.fields("views")' in str(caught.value)
    with pytest.raises(BatchError, match="two ways"):  # inside a list that can only be fields
        BatchView({"y": rows(3), "outer": [batch["views"]]})
    # one sample: both readings give the same piece
    assert BatchView({"y": rows(1), "views": [{"a": rows(1)}]}).length == 1


def test_lists_once_read_are_read_so_in_pieces_and_later_batches() -> None:
    as_fields = {
        "y": rows(6),
        "v": [{"a": rows(6), "b": [["s"] * 6]}, {"a": rows(6), "b": [["s"] * 6]}],
    }
    as_items = {"y": rows(6), "v": [{"a": rows(2)} for _ in range(6)]}
    for batch in (as_fields, as_items):
        view = BatchView(batch)
        piece = view.piece(0, 2)
        with pytest.raises(BatchError, match="two ways"):
            BatchView(piece)
        again = BatchView(piece, None, view.known_lists)
        assert again.length == 2
        assert str(again.piece(0, 1)) == str(view.piece(0, 1))
        assert again.known_lists == view.known_lists
    # one sample tells nothing
    assert BatchView({"y": rows(1), "v": [{"a": rows(1)}]}).known_lists == {}


@pytest.mark.parametrize(
    ("batch", "fields_of"),
    [
        ([{"ids": rows(5)}, {"ids": rows(5)}], 5),
        ([["a", "b", "c"], ["d", "e", "f"]], 3),
        (default_collate([(f"question {i}", f"answer {i}") for i in range(4)]), 4),
        ({"q": [{"ids": rows(5)}, {"ids": rows(5)}], "a": [{"ids": rows(5)}, {"ids": rows(5)}]}, 5),
    ],
    ids=["dicts", "lists", "texts", "two lists"],
)
def test_lists_that_are_all_there_is_and_can_be_both_are_asked_about(
    batch: Any, fields_of: int
) -> None:
    with pytest.raises(
        BatchError, match=f"as 2 items, one per sample, or as 2 fields of {fields_of} samples each"
    ):
        BatchView(batch)
    names = tuple(batch) if isinstance(batch, dict) else ()
    assert (
        BatchView(batch, cut.items(*names)).length,
        BatchView(batch, cut.fields(*names)).length,
    ) == (
        2,
        fields_of,
    )


@pytest.mark.parametrize(
    ("batch", "length"),
    [
        ([{"ids": rows(5)}, {"ids": rows(4)}], 2),
        ([{"ids": rows(5)}], 1),
        ([{"id": 1}, {"id": 2}], 2),
        ([{"x": object()}, {"x": rows(2)}], 2),
        ({"y": rows(2), "t": [{"ids": rows(5)}, {"ids": rows(5)}]}, 2),
    ],
)
def test_lists_that_can_only_be_items_are_not_asked_about(batch: Any, length: int) -> None:
    assert BatchView(batch).length == length


@pytest.mark.parametrize("kind", [list, tuple])
def test_many_alike_tensors_in_a_list_are_samples_or_fields_as_dims_say(kind: Any) -> None:
    samples = [torch.zeros(5) for _ in range(8)]
    with pytest.raises(
        BatchError,
        match=r"as 8 items, .* or as 8 fields of 5 samples "
        r"each\n.*dims=cut\.items\(\)\n.*dims=cut\.fields\(\)",
    ):
        BatchView(kind(samples))
    assert (
        BatchView(kind(samples), cut.items()).length,
        BatchView(kind(samples), cut.fields()).length,
    ) == (8, 5)
    with pytest.raises(BatchError, match=r'dims=cut\.items\("images"\)'):
        BatchView({"images": kind(samples)})
    for other in (samples[:7], [*samples, torch.zeros(5, 2)], dict(enumerate(samples))):
        assert BatchView(other).length == 5


@pytest.mark.parametrize("parts", [["0", "1"], ["x", "y"]])
def test_lists_of_one_length_that_could_be_the_samples_are_asked_about(parts: list[str]) -> None:
    # what zip(*samples) makes of pairs: taken as fields it would be cut along the samples' own rows
    lists = [torch.zeros(5)] * 3, [torch.ones(5)] * 3
    batch: Any = lists if parts[0] == "0" else dict(zip(parts, lists, strict=True))
    with pytest.raises(
        BatchError, match="as 3 items, one per sample, or as 3 fields of 5 samples each"
    ) as caught:
        BatchView(batch)
    assert f'dims=cut.items("{parts[0]}", "{parts[1]}")' in str(caught.value)
    assert (
        BatchView(batch, cut.items(*parts)).length,
        BatchView(batch, cut.fields(*parts)).length,
    ) == (
        3,
        5,
    )
    for certain in (
        (torch.zeros(5), lists[0]),
        (Named(*lists), lists[0]),
        (lists[0], lists[1][:2]),
        {"x": lists[0]},
    ):
        assert BatchView(certain).length == 5


def generator() -> Iterator[int]:
    yield 1


class Unknown:
    pass


class TensorLike(dict[str, Any]):
    """As TensorDict: a mapping with a batch size of its own."""

    @classmethod
    def __torch_function__(cls, *args: Any) -> Any:
        raise AssertionError


@pytest.mark.parametrize(
    ("value", "name"),
    [
        (pack_sequence([torch.ones(2), torch.ones(1)]), "PackedSequence"),
        ({1, 2}, "set"),
        (frozenset([1]), "frozenset"),
        ({"a": 1}.keys(), "dict_keys"),
        (generator(), "generator"),
        (iter([1, 2]), "list_iterator"),
        (map(str, [1]), "map"),
        (Unknown(), "Unknown"),
        (TensorLike(x=rows(2)), "TensorLike"),
        (deque([1, 2]), "deque"),
        (range(2), "range"),
        (MappingProxyType({"x": rows(2)}), "mappingproxy"),
        (torch.nn.Linear(1, 1), "Linear"),
    ],
)
def test_what_cannot_be_cut_is_refused_by_type_with_the_way_out(value: Any, name: str) -> None:
    for batch, where in (
        (value, "the batch"),
        ({"x": rows(2), "odd": value}, '"odd"'),
        ([rows(2), value], '"1"'),
    ):
        with pytest.raises(BatchError) as caught:
            BatchView(batch)
        text = str(caught.value)
        assert text.splitlines()[0].startswith(f"{where} is of type ")
        assert name in text.splitlines()[0]
        assert "register_splitter(" in text
        assert len(text.splitlines()[0]) < 120


@pytest.mark.parametrize(
    ("value", "name"),
    [
        (rows(2, 2).to_sparse(), "sparse_coo"),
        (torch.nested.nested_tensor([torch.ones(2), torch.ones(1)], layout=torch.jagged), "nested"),
    ],
)
def test_sparse_and_nested_tensors_are_refused_with_the_reason(value: Tensor, name: str) -> None:
    with pytest.raises(
        BatchError, match=f'"odd" is a {name} tensor, which cannot be cut into samples'
    ) as caught:
        BatchView({"x": rows(2), "odd": value})
    assert 'dims=cut.whole("odd")' in str(caught.value)
    assert "register_splitter(" in str(caught.value)
    with pytest.raises(BatchError, match=name) as caught:
        BatchView(value)
    assert "whole" not in str(caught.value)


@pytest.mark.parametrize(
    ("batch", "expected"),
    [
        (
            {"input_ids": rows(8, 5), "position_ids": rows(3, 8, 5)},
            ['dims={"position_ids": 1}', '"position_ids": shape (3, 8, 5), 3 on dim 0'],
        ),
        (
            {"input_ids": rows(8, 5), "mask": rows(5, 5)},
            ['dims=cut.whole("mask")', '"input_ids": shape (8, 5), 8 on dim 0'],
        ),
        ({"position_ids": rows(1, 5), "input_ids": rows(8, 5)}, ['dims=cut.whole("position_ids")']),
        ({"in": {"p": rows(2, 8)}, "x": rows(8), "y": rows(8)}, ['dims={"in.p": 1}']),
        (
            {"images": [rows(3, 4) for _ in range(8)], "labels": rows(8)},
            ['dims=cut.items("images")', "disagree on its length: 3 and 8"],
        ),
        ([[rows(3, i) for i in range(1, 9)], rows(8)], ['dims=cut.items("0")']),
        (
            {"x": rows(8), "classes": ["cat", "dog"]},
            ['dims=cut.whole("classes")', '"classes": list of 2 items'],
        ),
        ({"x": rows(8), "extra": []}, ['dims=cut.whole("extra")']),
        (
            {"x": rows(8), "t": [{"a": rows(5)}, {"a": rows(6)}]},
            ['dims=cut.whole("t")', '"t": list of 2 items'],
        ),
        (
            {"x": rows(8), "y": rows(7), "t": [{"a": rows(5)}]},
            [
                'if it has 8 samples: dims=cut.whole("y", "t")',
                "disagree on its length: 1 and 7 and 8",
            ],
        ),
        ({"x": rows(8), "a": np.zeros((2, 8))}, ['dims={"a": 1}', '"a": shape (2, 8), 2 on dim 0']),
        (
            [rows(5), rows(7)],
            ['if it has 5 samples: dims=cut.whole("1")', "if it has 2 samples: dims=cut.items()"],
        ),
        ({str(i): rows(8 + i % 2) for i in range(15)}, ["… and 3 more"]),
        (
            {"p": rows(3, 8), "m": rows(5), "t": ["a"] * 3, "x": rows(8)},
            ['if it has 8 samples: dims={"p": 1} | cut.whole("m", "t")'],
        ),
        ({"position_ids": rows(3, 8, 5), "input_ids": rows(8, 5)}, ['dims={"position_ids": 1}']),
        ({"x": rows(8), "v": [rows(3, 4), rows(5, 4)]}, ['dims=cut.whole("v.0", "v.1")']),
    ],
)
def test_lengths_that_disagree_are_named_with_the_line_to_add(
    batch: Any, expected: list[str]
) -> None:
    with pytest.raises(
        BatchError, match=r"^the parts of the batch disagree on its length: "
    ) as caught:
        BatchView(batch)
    for text in expected:
        assert text in str(caught.value)
    lines = re.findall(r"if it has (\d+) samples: dims=(.*)", str(caught.value))
    assert lines
    for length, dims in lines:
        assert BatchView(batch, eval(dims)).length == int(length), "each is right when it is pasted"


@pytest.mark.parametrize(
    ("batch", "dims", "message"),
    [
        ({"x": rows(2)}, {"x": 1}, r'"x" has no dim 1: its shape is \(2,\)'),
        ({"x": rows(2)}, {"x": -2}, '"x" has no dim -2'),
        (
            {"x": torch.tensor(1)},
            {"x": 0},
            r'"x" has no dim 0: its shape is \(\) \(0-d tensors .* are left out',
        ),
        ({"x": rows(2), "n": ["a", "b"]}, {"n": 1}, '"n" has no dim 1: it is a list of 2 items'),
        ({"x": rows(2)}, {"x": True}, "dims says True of 'x'"),
        ({"x": rows(2)}, {"x": "0"}, "dims says '0' of 'x'"),
        ({"x": rows(2)}, {1.5: 0}, r"dims has the key 1\.5"),
        ({"x": rows(2)}, {True: 0}, "dims has the key True"),
        ({"x": rows(2)}, ["x"], r"dims must be a mapping .* not \['x'\]"),
        (
            {"x": rows(2)},
            cut.items(),
            r"the batch is of type dict, and cut\.items\(\) is for lists and tuples",
        ),
        (
            {"x": rows(8), "position_ids": rows(3, 8)},
            {"postion_ids": 1},
            "dims names 'postion_ids', which the batch does not have",
        ),
        (
            Named(rows(2), rows(2)),
            cut.items(),
            r"Named, and cut\.items\(\) is for lists and tuples",
        ),
    ],
)
def test_bad_dims_are_named(batch: Any, dims: Any, message: str) -> None:
    with pytest.raises(BatchError, match=message):
        BatchView(batch, dims)


@pytest.mark.parametrize(
    ("why", "batches"),
    [
        ("the batch is empty", [rows(0, 3), [], {"x": rows(0)}, {"x": []}]),
        (
            "there is nothing to cut in the batch",
            [None, 3, "text", {}, (), {"x": torch.tensor(1.0)}, {"x": None}],
        ),
    ],
)
def test_a_batch_without_samples_is_refused(why: str, batches: list[Any]) -> None:
    for batch in batches:
        with pytest.raises(BatchError, match=why):
            BatchView(batch)


def test_what_default_collate_makes_of_texts_next_to_tensors_is_cut() -> None:
    batch = default_collate(
        [(torch.ones(2) * i, f"name {i}", {"words": ["a", "b", f"c{i}"]}) for i in range(4)]
    )
    assert batch[1] == ("name 0", "name 1", "name 2", "name 3")
    assert batch[2]["words"][2] == ("c0", "c1", "c2", "c3")
    piece = BatchView(batch).piece(1, 3)
    assert piece[1] == ("name 1", "name 2")
    assert piece[2]["words"] == [("a", "a"), ("b", "b"), ("c1", "c2")]
    with pytest.raises(BatchError, match='"names": tuple of 3 items'):
        BatchView({"x": rows(2), "names": ("a", "b", "c")})


@pytest.mark.parametrize(
    "labels",
    [
        (3, 1, 2),
        tuple(torch.arange(3.0)),
        ({"label": 1}, {"label": 2}, {"label": 3}),
        ((1, 2), (3, 4), (5, 6)),
    ],
)
@pytest.mark.parametrize("samples", [3, 5])
def test_a_tuple_without_rows_is_asked_about_whatever_its_length(labels: Any, samples: int) -> None:
    # a batch that meets its length by chance must not be read otherwise than the others
    batch = {"x": rows(samples), "y": labels}
    with pytest.raises(
        BatchError, match='"y" is a tuple of 3 with nothing in it that has rows'
    ) as caught:
        BatchView(batch)
    assert 'dims=cut.items("y")' in str(caught.value)
    assert 'dims=cut.whole("y")' in str(caught.value)
    assert BatchView(batch, cut.whole("y")).piece(1, 3)["y"] == labels
    batch = {"x": rows(3), "y": labels}
    assert BatchView(batch, cut.items("y")).piece(1, 3)["y"] == labels[1:3]
    with pytest.raises(BatchError, match=r'"y" is a tuple of 3|has no dim 0'):
        BatchView(batch, {"y": 0})


def test_of_nested_tuples_the_outer_one_is_asked_about_unless_dims_name_its_parts() -> None:
    with pytest.raises(BatchError, match='"y" is a tuple of 2'):
        BatchView({"x": rows(2), "y": ((1, 2), (3, 4))})
    assert BatchView(({"label": 1}, {"label": 2}), cut.whole("label") | cut.items()).length == 2
    # in a list that only its length decides
    with pytest.raises(BatchError, match=r'"v\.0\.t" is a tuple of 2'):
        BatchView({"x": rows(4), "v": [{"a": rows(4), "t": (1, 2)}]})
    with pytest.raises(BatchError, match=r'"y\.size" is a tuple of 2'):
        BatchView({"x": rows(2), "y": {"size": (3, 4)}}, {"x": 0, "y": 0})
    said = {"x": rows(2), "pair": (rows(3), {"mask": rows(4)})}
    assert BatchView(said, cut.whole("pair.0", "mask")).piece(0, 1)["pair"][0].shape == (3,)


def test_a_list_of_0d_tensors_has_one_item_per_sample() -> None:
    scalars = [torch.tensor(float(i)) for i in range(4)]
    assert BatchView({"x": rows(4), "y": scalars}).piece(1, 3)["y"] == scalars[1:3]
    assert BatchView([rows(4), torch.tensor(2.0), 3]).piece(1, 3)[1:] == [torch.tensor(2.0), 3], (
        "beside rows they are fields"
    )
    # [xs, ys] of zip(*samples): x has 5 positions, not 5 samples
    with pytest.raises(BatchError, match=r'"1": list of 4 items'):
        BatchView({"0": [rows(5)] * 4, "1": scalars})
    assert (
        BatchView({"x": rows(4), "y": scalars[:2]}, cut.whole("y")).piece(0, 1)["y"] == scalars[:2]
    )
