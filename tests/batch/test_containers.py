"""Containers are taken apart and put back as the same type, with nothing of theirs lost."""

from __future__ import annotations

import functools
from collections import OrderedDict, UserDict, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import pack_sequence

from elastic_mbs.batch.containers import lookup, map_tensors
from elastic_mbs.batch.view import BatchView
from elastic_mbs.errors import BatchError


class Encoding(UserDict[str, Any]):
    """Like HF BatchEncoding: constructor arguments, attributes next to the data, encodings of the samples by index."""

    def __init__(self, data: dict[str, Any], encodings: Any, *, names: list[str]) -> None:
        super().__init__(data)
        self._encodings = encodings
        self.names = names

    def __getitem__(self, item: Any) -> Any:
        return self._encodings[item] if isinstance(item, int) else self.data[item]


class Store(Mapping[str, Any]):
    """A mapping of one's own around an inner dict."""

    def __init__(self, data: dict[str, Any], note: str = "none") -> None:
        self._data = data
        self.note = note

    def __getitem__(self, key: str) -> Any:
        return self._data[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._data)

    def __len__(self) -> int:
        return len(self._data)


class Pair(NamedTuple):
    x: Any
    y: Any


@dataclass(frozen=True)
class Frozen:
    x: Any
    y: Any = None
    name: str = "frozen"


@dataclass(slots=True)
class Slotted:
    x: Any
    y: Any = None


class Output(OrderedDict[str, Any]):
    """Like HF ModelOutput: every item is an attribute too."""

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        setattr(self, key, value)


class Fields(list[Any]):
    tag = ""


def tagged(values: list[Any]) -> Fields:
    made = Fields(values)
    made.tag = "kept"
    return made


X, Y = torch.arange(12.0).reshape(6, 2), torch.arange(6)


CONTAINERS: list[Any] = [
    (X, Y),
    [X, Y],
    {"x": X, "y": Y},
    OrderedDict(x=X, y=Y),
    defaultdict(list, x=X, y=Y),
    Pair(X, Y),
    Frozen(X, Y),
    Slotted(X, Y),
    UserDict({"x": X, "y": Y}),
    Encoding({"x": X, "y": Y}, list("abcdef"), names=["n"]),
    Store({"x": X, "y": Y}, "kept"),
    MappingProxyType({"x": X, "y": Y}),
    Output(x=X, y=Y),
    tagged([X, Y]),
    torch.return_types.max((X, Y)),
]


names = [type(each).__name__ for each in CONTAINERS]


def leaves(obj: Any) -> list[Tensor]:
    found: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    map_tensors(obj, note)
    return found


@pytest.mark.parametrize("batch", CONTAINERS, ids=names)
def test_a_piece_has_the_batchs_type_and_views_of_its_tensors(batch: Any) -> None:
    piece = BatchView(batch).piece(2, 5)
    assert type(piece) is type(batch)
    x, y = leaves(piece)
    assert x.tolist() == X[2:5].tolist()
    assert y.tolist() == [2, 3, 4]
    assert x.data_ptr() == X[2:].data_ptr()
    assert y.data_ptr() == Y[2:].data_ptr()
    assert x._base is X._base
    assert [leaf.shape[0] for leaf in leaves(batch)] == [6, 6]  # the batch itself is as it was


@pytest.mark.parametrize("batch", CONTAINERS, ids=names)
def test_map_tensors_keeps_the_type_and_returns_the_same_object_when_nothing_changes(batch: Any) -> None:
    assert map_tensors(batch, lambda tensor: tensor) is batch
    doubled = map_tensors(batch, lambda tensor: tensor * 2)
    assert type(doubled) is type(batch)
    assert [leaf.tolist() for leaf in leaves(doubled)] == [(X * 2).tolist(), (Y * 2).tolist()]
    assert [leaf.tolist() for leaf in leaves(batch)] == [X.tolist(), Y.tolist()]


def test_attributes_next_to_the_data_are_kept() -> None:
    assert BatchView(Store({"x": X}, "kept")).piece(0, 1).note == "kept"
    assert BatchView(tagged([X])).piece(0, 1).tag == "kept"
    assert BatchView(Frozen(X)).piece(0, 1).name == "frozen"
    assert BatchView(defaultdict(list, x=X)).piece(0, 1)["new"] == []
    output = BatchView(Output(x=X)).piece(0, 1)
    assert output.x is output["x"]


def test_only_the_containers_that_changed_are_rebuilt() -> None:
    unchanged = {"a": Y}
    mapped = map_tensors({"u": unchanged, "v": [X], "s": "text", "n": object}, lambda tensor: tensor + 1 if tensor is X else tensor)
    assert mapped["u"] is unchanged
    assert mapped["n"] is object
    assert torch.equal(mapped["v"][0], X + 1)


def test_unknown_objects_pass_map_tensors_untouched() -> None:
    packed, thing = pack_sequence([X[0]]), object()
    mapped = map_tensors([packed, thing, {1, 2}, X], torch.clone)
    assert mapped[0] is packed
    assert mapped[1] is thing
    assert mapped[2] == {1, 2}


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
    assert target.keys() == {"boxes", "ids"}
    assert target["ids"] == [1, 2]
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

        @functools.cached_property
        def rows(self) -> int:
            return len(self.x)

    batch = Scaled(X)
    assert batch.rows == 6
    piece = BatchView(batch).piece(4, 6)
    assert torch.equal(piece.x, X[4:] / 2)
    assert torch.equal(piece.mask, batch.mask[4:])
    assert (piece.cache, piece.kind, piece.rows) == (None, "text", 2)
    assert not hasattr(piece, "missing")


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
        assert 'dims=whole("rows")' in str(caught.value)
        assert "register_splitter(" in str(caught.value)
    assert BatchView(Counted(X), {"rows": None}).piece(0, 2).rows == 6


class Strict(Mapping[str, Any]):
    __slots__ = ("items_",)

    def __init__(self, **values: Any) -> None:
        self.items_ = tuple(values.items())

    def __getitem__(self, key: str) -> Any:
        return dict(self.items_)[key]

    def __iter__(self) -> Iterator[str]:
        return (key for key, _ in self.items_)

    def __len__(self) -> int:
        return len(self.items_)


class Doubling(Strict):
    __slots__ = ()

    def __init__(self, data: dict[str, Any]) -> None:
        super().__init__(**{key: value * 2 for key, value in data.items()})


class Decoy(Store):
    """Has another dict with the same keys, which holds something else."""

    def __init__(self, data: dict[str, Any]) -> None:
        self.spares: dict[str, Any] = {}
        self.spare = dict.fromkeys(data)
        super().__init__(data)


class Three(tuple[Any, ...]):
    __slots__ = ()

    def __new__(cls, a: Any, b: Any = None) -> Three:
        return super().__new__(cls, (a, b))


class Two(tuple[Any, ...]):
    __slots__ = ()

    def __new__(cls, a: Any, b: Any) -> Two:
        return super().__new__(cls, (a, b))


class Reversed(tuple[Any, ...]):
    __slots__ = ()

    def __new__(cls, values: Any) -> Reversed:
        return super().__new__(cls, tuple(values)[::-1])


class Uncopyable(dict[str, Any]):
    def __copy__(self) -> Any:
        raise TypeError("this one is not copied")


@pytest.mark.parametrize(
    ("batch", "why"),
    [
        (Strict(x=X), "positional argument"),
        (Doubling({"x": X}), "does not keep its items"),
        (Three(X), "does not keep"),
        (Two(X, Y), "positional argument"),
        (Reversed([X, Y]), "does not keep its items"),
        (Uncopyable(x=X), "not copied"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_container_that_cannot_be_rebuilt_is_refused_by_name(batch: Any, why: str) -> None:
    with pytest.raises(BatchError, match=why) as caught:
        BatchView(batch).piece(0, 1)
    assert f"register_splitter({type(batch).__qualname__}" in str(caught.value)


def test_a_mapping_with_a_second_dict_of_the_same_keys_is_rebuilt_right() -> None:
    batch = Decoy({"x": X})
    batch.spares = {"another": 1}
    piece = BatchView(batch).piece(1, 2)
    assert torch.equal(piece["x"], X[1:2])
    assert batch["x"] is X


def test_lookup_takes_names_paths_and_indexes_and_says_what_there_is() -> None:
    batch = ({"ids": X, "a.b": Y, "deep": {"mask": Y}}, [X], "text")
    assert lookup(batch, "0.ids") is X
    assert lookup(batch, "ids") is X
    assert lookup(batch, "mask") is Y
    assert lookup(batch, "deep.mask") is Y
    assert lookup(batch, "0.a.b") is Y
    assert lookup(batch, 2) == "text"
    assert lookup(batch, "1.0") is X
    with pytest.raises(LookupError, match=r"no 'label': tuple has the parts '0', '0\.ids', '0\.a\.b'"):
        lookup(batch, "label")
    with pytest.raises(LookupError, match=r"not unique: it could be '0\.m', '1\.m'"):
        lookup([{"m": X}, {"m": Y}], "m")
    with pytest.raises(LookupError, match="Tensor has no named parts"):
        lookup(X, "m")
    with pytest.raises(LookupError, match="and 1 more"):
        lookup({str(i): i for i in range(13)}, "m")
    with pytest.raises(LookupError, match=r"the parts 'names'$"):  # a list of plain items is not opened
        lookup({"names": ["a", "b"]}, "m")
    with pytest.raises(LookupError):
        lookup({"a": {"b": 1}}, "a.c")


@pytest.mark.parametrize(("kept", "piece"), [(["a", "b", "c", "d"], ["c", "d"]), (None, None), ("abcd", "abcd")])
def test_a_piece_of_a_tokenizers_batch_has_its_own_encodings(kept: Any, piece: Any) -> None:
    # `piece.word_ids(0)` were those of the batch's first sample
    batch = Encoding({"input_ids": torch.zeros(4, 3)}, kept, names=["a", "b", "c", "d"])
    found = BatchView(batch).piece(2, 4)
    assert (found._encodings, list(found)) == (piece, ["input_ids"])
    assert found.names == ["a", "b", "c", "d"], "nothing says that these belong to samples"
    assert batch._encodings == kept
    with pytest.raises(BatchError, match='"_encodings": list of 1 items'):
        BatchView(Encoding({"input_ids": torch.zeros(4, 3)}, ["a"], names=[]))


class Attributes(dict[str, Any]):
    """The well-known one: items are attributes, because they are one dict."""

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


@pytest.mark.parametrize("kind", [Attributes, Mirrored, MirroredUserDict])
def test_items_that_are_attributes_too_are_those_of_the_piece(kind: Any) -> None:
    """`piece.x` was the whole batch."""
    batch = kind(x=torch.arange(4.0), names=["a", "b", "c", "d"])
    piece = BatchView(batch).piece(2, 4)
    assert type(piece) is kind
    assert piece.x is piece["x"]
    assert piece.x.tolist() == [2.0, 3.0]
    assert piece.names == ["c", "d"]
    assert batch.x is batch["x"]
    assert len(batch.x) == 4
    assert getattr(piece, "another", piece.x) is piece.x
    piece.x = torch.zeros(1)
    assert len(batch.x) == 4
    assert map_tensors(piece, torch.neg)["x"].tolist() in ([-2.0, -3.0], [0.0])
