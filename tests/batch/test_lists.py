"""A list or tuple holds fields or one item per sample; where neither types nor shapes say, ask."""

from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import default_collate

from elastic_mbs import cut
from elastic_mbs.batch.view import BatchView
from elastic_mbs.errors import BatchError
from tests.helpers.batches import rows

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


def test_both_readings_at_once_are_refused_with_both_lines() -> None:
    batch = {"y": rows(3), "views": [{"a": rows(3)}, {"a": rows(3, 2)}, {"a": rows(3)}]}
    with pytest.raises(BatchError, match=r'"views" can be read in two ways: as 3 items') as caught:
        BatchView(batch)
    assert 'dims=cut.items("views")' in str(caught.value)
    assert 'dims=cut.fields("views")' in str(caught.value)
    with pytest.raises(BatchError, match="two ways"):  # inside a list that can only be fields
        BatchView({"y": rows(3), "outer": [batch["views"]]})
    # one sample: both readings give the same piece
    assert BatchView({"y": rows(1), "views": [{"a": rows(1)}]}).length == 1


def test_a_list_is_read_alike_in_pieces_and_later_batches() -> None:
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
def test_lists_alone_that_can_be_read_both_ways_are_asked_about(batch: Any, fields_of: int) -> None:
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
def test_many_alike_tensors_in_a_list_are_read_as_dims_say(kind: Any) -> None:
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
def test_lists_of_one_length_are_asked_about(parts: list[str]) -> None:
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
        (lists[0], lists[1][:2]),
        {"x": lists[0]},
    ):
        assert BatchView(certain).length == 5


def test_texts_from_default_collate_are_cut() -> None:
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
def test_a_tuple_without_rows_is_asked_about(labels: Any, samples: int) -> None:
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


def test_of_nested_tuples_the_outer_one_is_asked_about() -> None:
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


@pytest.mark.parametrize(
    ("samples", "fields"),
    [
        ([torch.zeros(3, 20 + i, 30 - i) for i in range(8)], 3),
        ([torch.zeros(3, 20, 30), torch.zeros(3, 21, 30)], 3),
        ([torch.zeros(1, 50 + i) for i in range(6)], 1),
        ([torch.zeros(4, 5 + i) for i in range(5)], 4),
    ],
    ids=["pictures", "two pictures", "mono sound", "sound"],
)
def test_a_lone_list_of_samples_of_different_sizes_is_asked_about(
    samples: list[torch.Tensor], fields: int
) -> None:
    count = len(samples)
    for batch, name in ((samples, ""), ({"images": samples}, '"images"')):
        with pytest.raises(BatchError, match=f"as {count} fields of {fields} samples") as caught:
            BatchView(batch)
        assert f"dims=cut.items({name})" in str(caught.value)
        assert f"dims=cut.fields({name})" in str(caught.value)
    assert BatchView(samples, cut.items()).piece(0, 1) == samples[:1]
    assert BatchView(samples, cut.fields()).length == fields


@pytest.mark.parametrize(
    "batch",
    [
        [rows(8, 5), rows(8, 1)],
        [rows(4, 5), rows(4, 1)],
        [rows(1, 5), rows(1, 1)],
        [rows(8, 3, 4, 4), rows(8, 3, 8, 8)],
        [rows(8, 6, 5), rows(8, 7, 5)],
        (rows(3, 6, 5), rows(3, 7, 5)),
        [rows(3, 6, 5), rows(3)],
        {"images": [rows(3, 6, 5), rows(3, 7, 5)], "labels": rows(3)},
    ],
)
def test_inputs_and_targets_that_differ_are_not_asked_about(batch: Any) -> None:
    parts = batch["images"] if isinstance(batch, dict) else batch
    assert BatchView(batch).length == len(parts[0])
