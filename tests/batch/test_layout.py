"""A batch is read by fixed rules, and refused with the line to add where they do not suffice."""

import re
from collections import deque
from collections.abc import Iterator
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import pack_sequence

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
    assert (view.length, BatchView(view.piece(1, 3), dims, view.known_lists).length) == (4, 2)


def generator() -> Iterator[int]:
    yield 1


class Unknown:
    pass


class TensorLike(dict[str, Any]):
    """A mapping with a batch size of its own, such as TensorDict."""

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
def test_a_type_that_cannot_be_cut_is_refused_with_the_way_out(value: Any, name: str) -> None:
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


HOLES = torch.nested.narrow(
    torch.ones(2, 5), 1, torch.tensor([0, 1]), torch.tensor([2, 3]), layout=torch.jagged
)


@pytest.mark.parametrize(
    ("value", "name"),
    [
        (rows(2, 2).to_sparse(), "sparse_coo"),
        (HOLES, "nested"),
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
    ("batch", "samples", "line"),
    [
        # a stack of three parts like input_ids
        ({"input_ids": rows(8, 5), "position_ids": rows(3, 8, 5)}, 8, '{"position_ids": 1}'),
        ({"images": [rows(3, 4) for _ in range(8)], "y": rows(8)}, 8, 'cut.items("images")'),
        ([[rows(3, i) for i in range(1, 9)], rows(8)], 8, 'cut.items("0")'),
        ([torch.ones(5), torch.ones(7)], 2, "cut.items()"),
        (
            {"images": [rows(3, i) for i in (4, 5)], "p": rows(3, 2, 6), "x": rows(2, 6)},
            2,
            'cut.items("images") | {"p": 1}',
        ),
        (
            # pictures and targets, as torchvision's collate function makes them
            tuple(zip(*[(rows(3, i, 4), {"boxes": rows(i, 4)}) for i in (2, 5)], strict=True)),
            2,
            'cut.items("0", "1")',
        ),
        (
            [[rows(3, i) for i in (4, 5)], [{"a": rows(i)} for i in (6, 7)]],
            2,
            'cut.items("0", "1")',
        ),
    ],
)
def test_the_line_for_a_reading_that_shapes_support_is_right(
    batch: Any, samples: int, line: str
) -> None:
    with pytest.raises(BatchError, match=r"^the parts of the batch disagree on its length: ") as at:
        BatchView(batch)
    found = re.findall(r"if it has (\d+) samples, .*: dims=(.*)", str(at.value))
    assert found == [(str(samples), line)]
    assert BatchView(batch, eval(line)).length == samples


@pytest.mark.parametrize(
    ("batch", "says"),
    [
        ({"input_ids": rows(8, 5), "mask": rows(5, 5)}, '"mask": shape (5, 5), 5 on dim 0'),
        ({"position_ids": rows(1, 5), "input_ids": rows(8, 5)}, "disagree on its length: 1 and 8"),
        ({"in": {"p": rows(2, 8)}, "x": rows(8), "y": rows(8)}, '"in.p": shape (2, 8)'),
        ({"x": rows(8), "classes": ["cat", "dog"]}, '"classes": list of 2 items'),
        ({"x": rows(8), "extra": []}, '"extra": list of 0 items'),
        ({"x": rows(8), "t": [{"a": rows(5)}, {"a": rows(6)}]}, '"t": list of 2 items'),
        ({"x": rows(8), "y": rows(7), "t": [{"a": rows(5)}]}, "on its length: 1 and 7 and 8"),
        ({"x": rows(8), "a": np.zeros((2, 8))}, '"a": shape (2, 8), 2 on dim 0'),
        ({str(i): torch.ones(8 + i % 2, 2) for i in range(15)}, "… and 9 more"),
        ({"x": rows(8), "v": [rows(3, 4), rows(5, 4)]}, '"v.1": shape (5, 4)'),
        ({"boxes": rows(9, 4), "image": rows(4, 3, 9)}, '"boxes": shape (9, 4), 9 on dim 0'),
        ({"x": rows(64, 4), "y": rows(63)}, "mend the batch, they have to be equally long"),
        ({"ids": rows(8, 6), "position": rows(3, 8, 5)}, "samples on dim 1: dims={name: 1}"),
    ],
)
def test_where_shapes_support_no_reading_the_ways_are_named_and_no_line(
    batch: Any, says: str
) -> None:
    # a size that occurs on another dimension supports nothing: it can be a coincidence
    with pytest.raises(BatchError) as caught:
        BatchView(batch)
    text = str(caught.value)
    assert says in text
    assert "if it has" not in text
    assert "divide" not in text  # which size is that of the samples is not known
    assert "cut.ragged(..., by=...)" in text
    assert "cut.items(...)" in text
    assert "register_splitter" in text
    assert len(text.splitlines()) < 15


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
            r"there is nothing to cut in the batch .*\n  give at least one tensor or list",
            [None, 3, "text", {}, (), {"x": torch.tensor(1.0)}, {"x": None}],
        ),
    ],
)
def test_a_batch_without_samples_is_refused(why: str, batches: list[Any]) -> None:
    for batch in batches:
        with pytest.raises(BatchError, match=why):
            BatchView(batch)
