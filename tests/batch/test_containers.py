"""A piece has the batch's containers, none of their contents lost and none of the whole batch."""

import functools
from collections import OrderedDict, UserDict, defaultdict
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import pack_sequence

from elastic_mbs import cut
from elastic_mbs.batch.containers import lookup, map_tensors, tensors_in
from elastic_mbs.batch.view import BatchView
from elastic_mbs.errors import BatchError
from tests.helpers.batches import Encoding, Named


@dataclass(frozen=True)
class Frozen:
    x: Any
    y: Any = None
    name: str = "frozen"


@dataclass(slots=True)
class Slotted:
    x: Any
    y: Any = None


@dataclass
class Linked:
    x: Any
    y: Any

    def __post_init__(self) -> None:
        self.inputs = self.x

    @functools.cached_property
    def doubled(self) -> Any:
        return self.x * 2


class Output(OrderedDict[str, Any]):
    """A dict whose items are attributes too, such as HF ModelOutput."""

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        setattr(self, key, value)


class Record(dict[str, Any]):
    pass


class Record2(UserDict[str, Any]):
    pass


class Fields(list[Any]):
    pass


X, Y = torch.arange(12.0).reshape(6, 2), torch.arange(6)


def containers() -> list[Any]:
    return [
        (X, Y),
        [X, Y],
        {"x": X, "y": Y},
        OrderedDict(x=X, y=Y),
        defaultdict(list, x=X, y=Y),
        Named(X, Y),
        Frozen(X, Y),
        Slotted(X, Y),
        UserDict({"x": X, "y": Y}),
        Encoding({"x": X, "y": Y}, list("abcdef"), names=["n"]),
        Output(x=X, y=Y),
        torch.return_types.max((X, Y)),
        *with_attributes(),
    ]


def with_attributes() -> list[Any]:
    return [Linked(X, Y), Record(x=X, y=Y), Record2(x=X, y=Y), Fields([X, Y])]


def kind(value: Any) -> str:
    return type(value).__name__


@pytest.mark.parametrize("batch", containers(), ids=kind)
def test_a_piece_and_a_mapped_batch_have_the_batchs_type(batch: Any) -> None:
    piece = BatchView(batch).piece(2, 5)
    assert type(piece) is type(batch)
    x, y = tensors_in(piece)
    assert (x.tolist(), y.tolist()) == (X[2:5].tolist(), [2, 3, 4])
    assert (x.data_ptr(), y.data_ptr()) == (X[2:].data_ptr(), Y[2:].data_ptr()), "views"
    assert map_tensors(batch, lambda tensor: tensor) is batch
    doubled = map_tensors(batch, lambda tensor: tensor * 2)
    assert type(doubled) is type(batch)
    assert [leaf.tolist() for leaf in tensors_in(doubled)] == [(X * 2).tolist(), (Y * 2).tolist()]
    assert all(new is old for new, old in zip(tensors_in(batch), (X, Y), strict=True)), (
        "the batch itself is as it was"
    )


def test_attributes_next_to_the_parts_are_kept() -> None:
    assert BatchView(Frozen(X)).piece(0, 1).name == "frozen"
    assert BatchView(defaultdict(list, x=X)).piece(0, 1)["new"] == []
    batch: Any = Record(x=X)
    batch.name, batch.scale, batch.size = "a", torch.tensor(2.0), (224, 224)
    assert (BatchView(batch).piece(0, 1).name, BatchView(batch).piece(0, 1).size) == (
        "a",
        (224, 224),
    )


@pytest.mark.parametrize("batch", [*with_attributes(), Fields("abcdef")], ids=kind)
@pytest.mark.parametrize(
    "mask", [X > 2, X.numpy(), [X[:, 0]], {"of": (X.t(),)}, np.arange(3)], ids=kind
)
def test_an_attribute_with_rows_that_is_no_part_is_asked_about(batch: Any, mask: Any) -> None:
    batch.mask = mask
    with pytest.raises(BatchError, match=r'"mask" is an attribute next to the parts of') as caught:
        BatchView(batch)
    assert 'dims=cut.whole("mask")' in str(caught.value)
    with pytest.raises(BatchError, match=r'"b.mask" is an attribute'):
        BatchView({"b": batch})
    assert BatchView(batch, cut.whole("mask")).piece(1, 3).mask is mask
    assert BatchView([batch, batch], cut.items()).length == 2, (
        "an item of a list is no container of samples"
    )


@pytest.mark.parametrize("data", [X, X.numpy()], ids=kind)
def test_an_attribute_that_is_a_part_is_the_pieces_own(data: Any) -> None:
    batch = Linked(data, Y)
    assert batch.doubled.shape == X.shape
    piece = BatchView(batch).piece(1, 3)
    assert torch.equal(torch.as_tensor(piece.inputs), X[1:3])
    assert torch.equal(torch.as_tensor(piece.doubled), X[1:3] * 2), (
        "a cached property is computed again"
    )


class Attributes(dict[str, Any]):
    """The well-known dict whose attributes are its items: both are one dict."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.__dict__ = self


class Mirror:
    def __init__(self, *args: Any, **items: Any) -> None:
        super().__init__(*args, items)  # type: ignore[call-arg]  # of the mapping that comes next in the MRO
        vars(self).update(items, another=items["x"])


class Mirrored(Mirror, dict[str, Any]):
    pass


class MirroredUserDict(Mirror, UserDict[str, Any]):
    pass


@pytest.mark.parametrize("cls", [Attributes, Mirrored, MirroredUserDict, Output])
def test_items_that_are_attributes_too_are_those_of_the_piece(cls: Any) -> None:
    # `piece.x` was the whole batch
    batch = cls(x=torch.arange(4.0), names=["a", "b", "c", "d"])
    piece = BatchView(batch).piece(2, 4)
    assert piece.x is piece["x"]
    assert (piece.x.tolist(), piece.names) == ([2.0, 3.0], ["c", "d"])
    assert getattr(piece, "another", piece.x) is piece.x
    piece.x = torch.zeros(1)
    assert batch.x is batch["x"]
    assert len(batch.x) == 4


@pytest.mark.parametrize(
    ("kept", "piece"), [(["a", "b", "c", "d"], ["c", "d"]), (None, None), ("abcd", "abcd")]
)
def test_a_piece_of_a_tokenizers_batch_has_its_own_encodings(kept: Any, piece: Any) -> None:
    # `piece.word_ids(0)` were those of the batch's first sample
    batch = Encoding({"input_ids": torch.zeros(4, 3)}, kept, names=["a", "b", "c", "d"])
    found = BatchView(batch).piece(2, 4)
    assert (found._encodings, list(found)) == (piece, ["input_ids"])
    assert found.names == ["a", "b", "c", "d"], "nothing says that these belong to samples"
    assert batch._encodings == kept
    with pytest.raises(BatchError, match='"_encodings": list of 1 items'):
        BatchView(Encoding({"input_ids": torch.zeros(4, 3)}, ["a"], names=[]))


def test_only_the_containers_of_tensors_that_changed_are_rebuilt() -> None:
    unchanged, packed, thing = {"a": Y}, pack_sequence([X[0]]), object()
    mapped = map_tensors(
        {"u": unchanged, "v": [X], "w": [packed, thing, {1, 2}]},
        lambda tensor: tensor + 1 if tensor is X else tensor,
    )
    assert mapped["u"] is unchanged
    assert torch.equal(mapped["v"][0], X + 1)
    assert mapped["w"] == [packed, thing, {1, 2}]


def test_an_edit_of_a_pieces_container_does_not_reach_the_batch() -> None:
    target = {"boxes": X[0], "ids": [1, 2]}
    batch = {"x": X, "target": [target] * 6, "names": list("abcdef")}
    view = BatchView(batch)
    piece = view.piece(0, 3)
    piece.pop("x")
    piece["target"][0].pop("boxes")
    piece["target"][1]["ids"].append(3)
    piece["names"].clear()
    assert view.piece(0, 1).keys() == batch.keys()
    assert (list(target), target["ids"]) == (["boxes", "ids"], [1, 2])
    assert batch["names"] == list("abcdef")


def test_a_dataclass_is_rebuilt_without_running_its_constructor_again() -> None:
    @dataclass
    class Scaled:
        x: Tensor
        mask: Tensor = field(init=False)
        missing: Any = field(init=False, repr=False)
        cache: Any = field(init=False, default=None)
        kind: str = field(init=False, default="text")

        def __post_init__(self) -> None:
            self.x = self.x / 2
            self.mask = self.x > 1

    batch = Scaled(X)
    piece = BatchView(batch).piece(4, 6)
    assert torch.equal(piece.x, X[4:] / 2)
    assert torch.equal(piece.mask, batch.mask[4:])
    assert (piece.cache, piece.kind, hasattr(piece, "missing")) == (None, "text", False)


def test_a_field_that_the_constructor_computes_is_refused_until_it_is_named() -> None:
    @dataclass
    class Counted:
        x: Tensor
        rows: int = field(init=False)

        def __post_init__(self) -> None:
            self.rows = len(self.x)

    for dims in (None, {"x": 0}):
        with pytest.raises(BatchError, match=r'"rows" is computed.*init=False') as caught:
            BatchView(Counted(X), dims)
        assert 'dims=cut.whole("rows")' in str(caught.value)
        assert "register_splitter(" in str(caught.value)
    assert BatchView(Counted(X), {"rows": None}).piece(0, 2).rows == 6


@dataclass
class Sized:
    x: Tensor

    def __post_init__(self) -> None:
        self.size = len(self.x)
        self.classes = 4


def test_a_number_of_samples_that_the_constructor_keeps_is_refused_until_it_is_named() -> None:
    with pytest.raises(BatchError, match=r'"size" of .*Sized is 6') as caught:
        BatchView(Sized(X))
    assert 'dims=cut.whole("size")' in str(caught.value)
    assert "register_splitter(Sized" in str(caught.value)
    assert BatchView(Sized(X), {"size": None}).piece(0, 2).size == 6
    with pytest.raises(BatchError, match=r'"0\.size"'):
        BatchView((Sized(X), X))


def test_a_number_that_was_another_one_in_an_earlier_batch_is_no_number_of_samples() -> None:
    known = BatchView(Sized(X[:5]), {"size": None}).known_lists
    few = BatchView(Sized(X[:4]), {"size": None}, known)
    assert few.piece(0, 2).classes == 4
    with pytest.raises(BatchError, match='"classes"'):
        BatchView(Sized(X[:4]), {"size": None})


class Elsewhere(UserDict[str, Any]):
    """A dict that looks first in another place, which all pieces would share."""

    def __init__(self, data: dict[str, Any]) -> None:
        super().__init__(data)
        self.first = (dict(data),)

    def __getitem__(self, key: str) -> Any:
        return self.first[0][key]


class Two(tuple[Any, ...]):
    __slots__ = ()

    def __new__(cls, a: Any, b: Any) -> Self:
        return super().__new__(cls, (a, b))


class Reversed(tuple[Any, ...]):
    __slots__ = ()

    def __new__(cls, values: Any) -> Self:
        return super().__new__(cls, tuple(values)[::-1])


@pytest.mark.parametrize(
    ("batch", "why"),
    [
        (Elsewhere({"x": X}), "does not keep its items"),
        (Two(X, Y), "positional argument"),
        (Reversed([X, Y]), "does not keep its items"),
    ],
    ids=kind,
)
def test_a_container_that_cannot_be_rebuilt_is_refused_by_name(batch: Any, why: str) -> None:
    with pytest.raises(BatchError, match=why) as caught:
        BatchView(batch, cut.whole("first")).piece(0, 1)
    assert f"register_splitter({type(batch).__qualname__}" in str(caught.value)


def test_lookup_takes_names_paths_and_indexes_and_says_what_there_is() -> None:
    batch = ({"ids": X, "a.b": Y, "deep": {"mask": Y}}, [X], "text")
    for name in ("0.ids", "ids", "1.0"):
        assert lookup(batch, name) is X
    for name in ("mask", "deep.mask", "0.a.b"):
        assert lookup(batch, name) is Y
    assert lookup(batch, 2) == "text"
    with pytest.raises(
        LookupError, match=r"no 'label': tuple has the parts '0', '0\.ids', '0\.a\.b'"
    ):
        lookup(batch, "label")
    with pytest.raises(LookupError, match=r"not unique: it could be '0\.m', '1\.m'"):
        lookup([{"m": X}, {"m": Y}], "m")
    with pytest.raises(LookupError, match="Tensor has no named parts"):
        lookup(X, "m")
    with pytest.raises(LookupError, match="and 1 more"):
        lookup({str(i): i for i in range(13)}, "m")
    # a list of plain items is not opened
    with pytest.raises(LookupError, match=r"the parts 'names'$"):
        lookup({"names": ["a", "b"]}, "m")
