"""The containers of a batch, taken apart and rebuilt as the same type.

The type alone decides how. `torch.utils._pytree` takes HF `BatchEncoding`, `UserDict` and
dataclasses for leaves, so the walk is our own.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
import numbers
import sys
from collections import UserDict
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from elastic_mbs.batch.foreign.graphs import is_batch_of_graphs
from elastic_mbs.batch.splitters import Splitter, splitter_of, type_name
from elastic_mbs.errors import BatchError
from elastic_mbs.rollback.by_class import ByClass

Path = tuple[Any, ...]
Parts = dict[Any, Any]  # by key, by field or by index


class Role(Enum):
    """The part that a type can have in a batch."""

    TENSOR = auto()
    SCALAR = auto()
    LIST = auto()  # fields or per-sample items: the type alone does not say
    FIELDS = auto()  # mappings, tuples, dataclasses
    ARRAY = auto()  # numpy
    CUSTOM = auto()  # registered with register_splitter
    UNKNOWN = auto()


@dataclass(frozen=True, slots=True, eq=False)
class Kind:
    """The way to handle values of one type."""

    role: Role
    take: Callable[[Any], Parts] = lambda obj: {}
    # makes a new container with other parts, and leaves the given one as it is
    put: Callable[[Any, Parts], Any] = lambda obj, parts: obj
    splitter: Splitter | None = None  # of Role.CUSTOM
    why: str = "say how"  # of Role.UNKNOWN: the reason why it cannot be cut


splitters: dict[type, Splitter] = {}


def register_splitter(
    cls: type,
    *,
    length: Callable[[Any], int],
    slice: Callable[[Any, int, int], Any],
    tensors: Callable[[Any], Iterable[Tensor]] | None = None,
    move: Callable[[Any, Callable[[Tensor], Tensor]], Any] | None = None,
) -> None:
    """Teach elastic_mbs to cut a type of yours and its subclasses (nearest class in the MRO).

    Args:
        cls: the type. Registering it again replaces the earlier functions.
        length: `length(obj)` → number of samples.
        slice: `slice(obj, start, stop)` → samples `start` to `stop`, preferably as views. It must
            leave `obj` as it is.
        tensors: `tensors(obj)` → the tensors inside, for devices, sizes and the check for edits in
            place. None: the type holds no tensors.
        move: `move(obj, fn)` → the object rebuilt with `fn(tensor)` for each tensor (`fn` copies to
            a device, clones or detaches).

    Raises:
        BatchError: `cls` is no class or one that elastic_mbs cuts itself, a function cannot be
            called, or only one of `tensors` and `move` is given.
    """
    splitters[cls] = Splitter(cls, length, slice, tensors, move)
    kind_of.clear()


@ByClass
def kind_of(cls: type) -> Kind:
    # a Batch of PyTorch Geometric is a Data, too, and is not cut as one
    of_graphs = is_batch_of_graphs(cls)
    for base in cls.__mro__:
        if base in splitters and (is_batch_of_graphs(base) or not of_graphs):
            return Kind(Role.CUSTOM, splitter=splitters[base])
    if cls in _BUILTINS:
        return _BUILTINS[cls]
    numpy = sys.modules.get("numpy")
    if numpy is not None and issubclass(cls, numpy.generic | numpy.ndarray):
        return (
            Kind(Role.ARRAY, put=lambda obj, parts: own_array(obj.copy()))
            if issubclass(cls, numpy.ndarray)
            else Kind(Role.SCALAR)
        )
    known = splitter_of(cls)
    if known is not None:
        return Kind(Role.CUSTOM, splitter=known)
    if hasattr(cls, "__torch_function__") and not issubclass(cls, Tensor):
        # a tensor-like container (TensorDict) has a batch size of its own, which a rebuild would
        # keep
        return Kind(Role.UNKNOWN)
    for base, kind in _SUBCLASSES.items():
        if issubclass(cls, base):
            return kind
    return (
        Kind(Role.FIELDS, _take_dataclass, refilled(_fill_dataclass))
        if dataclasses.is_dataclass(cls)
        else Kind(Role.UNKNOWN)
    )


def roles_in(values: Iterable[Any]) -> set[Role]:
    # once per type, so that a list of many strings costs little
    return {kind_of(cls).role for cls in set(map(type, values))}


def alike(values: Iterable[Any]) -> bool:
    """Return whether values can be samples of one kind, by their types and the tensors' forms."""
    return len({_form(value) for value in values if value is not None}) == 1


def _form(value: Any) -> Any:
    """Return what samples of one kind have in common."""
    kind = kind_of(type(value))
    if kind.role in (Role.TENSOR, Role.ARRAY):
        return value.ndim, value.dtype
    if type(value) in (list, tuple):
        return type(value), frozenset(_form(part) for part in value if part is not None)
    return numbers.Number if isinstance(value, numbers.Number) else type(value)


def are_columns(values: Sequence[Any]) -> bool:
    """Return whether lists in a list are the fields of all samples: what `zip(*samples)` makes.

    Each has elements of one kind, and not all have elements of the same.
    """
    return (
        {type(value) for value in values} <= {list, tuple}
        and all(map(alike, values))
        and not alike(values)
    )


def is_collated_text(value: Any) -> bool:
    """Return whether a value is a tuple of texts, as `default_collate` makes of them."""
    return (
        type(value) is tuple
        and bool(value)
        and all(isinstance(part, str | bytes) for part in value)
    )


def has_rows(value: Any, roles: set[Role]) -> bool:
    """Return whether a list holds tensors with rows; 0-d ones and numbers are items."""
    return Role.TENSOR in roles and (
        not roles <= {Role.TENSOR, Role.SCALAR}
        or any(isinstance(part, Tensor) and part.ndim > 0 for part in value)
    )


def _take_user_dict(obj: Any) -> Parts:
    # HF BatchEncoding keeps one encoding per sample, for `word_ids(i)`
    encodings = vars(obj).get("_encodings")
    return ({"_encodings": encodings} if isinstance(encodings, list) else {}) | dict(obj.data)


def _take_dataclass(obj: Any) -> Parts:
    return {
        each.name: getattr(obj, each.name)
        for each in dataclasses.fields(obj)
        if hasattr(obj, each.name)
    }


def refilled(fill: Callable[[Any, Parts], None]) -> Callable[[Any, Parts], Any]:
    """Return a `put` that fills a shallow copy with the new parts.

    Attributes of the container that are also parts become the copy's own.
    """

    def put(obj: Any, parts: Parts) -> Any:
        new = copy.copy(obj)
        attributes = getattr(new, "__dict__", {})
        for name in _cached_properties(type(obj)):
            attributes.pop(name, None)  # was computed from the old parts
        fill(new, parts)
        # a class with `self.__dict__ = self`: the copy has a dict of its own with the old items
        if getattr(obj, "__dict__", None) is obj:
            object.__setattr__(new, "__dict__", new)
        elif attributes:
            # By identity, because an attribute can have another name than its part. Numbers and
            # texts are the same in all pieces.
            taken = kind_of(type(obj)).take(obj).items()
            renewed = {
                id(part): parts[key]
                for key, part in taken
                if key in parts and not isinstance(part, _SCALARS)
            }
            attributes.update(
                {
                    name: renewed[id(value)]
                    for name, value in attributes.items()
                    if id(value) in renewed
                }
            )
        return new

    return put


def _cached_properties(cls: type) -> list[str]:
    return [
        name
        for base in cls.__mro__
        for name, value in vars(base).items()
        if isinstance(value, functools.cached_property)
    ]


def _fill_list(new: Any, parts: Parts) -> None:
    new[:] = parts.values()


def _fill_dict(new: Any, parts: Parts) -> None:
    for key, value in parts.items():
        # through its own __setitem__: HF ModelOutput keeps attributes next to the items
        new[key] = value


def _fill_dataclass(new: Any, parts: Parts) -> None:
    # not dataclasses.replace: __post_init__ has worked on these values, and InitVars are gone
    for name, value in parts.items():
        object.__setattr__(new, name, value)


def _fill_user_dict(new: Any, parts: Parts) -> None:
    items = {key: parts[key] for key in new.data}
    new.data = kind_of(type(new.data)).put(new.data, items)  # a shallow copy can share that dict
    if any(new[key] is not value for key, value in items.items()):
        raise _not_rebuilt(new, "a new one does not keep its items")


def _put_tuple(obj: Any, parts: Parts) -> Any:
    values = list(parts.values())
    if hasattr(obj, "_make"):
        return obj._make(values)
    try:  # torch.return_types and the like
        new = type(obj)(values)
    except (TypeError, ValueError) as error:
        raise _not_rebuilt(obj, error) from error
    if list(map(id, new)) != list(map(id, values)):
        raise _not_rebuilt(obj, "a new one does not keep its items")
    return new


def _not_rebuilt(obj: Any, why: object) -> BatchError:
    return BatchError(
        f"{type_name(type(obj))} cannot be rebuilt with other values: {why}\n  say how it is cut: "
        f"{to_register(type(obj))}"
    )


def to_register(cls: type) -> str:
    """Return the call to paste for a type that is not known.

    No import finds a class that was made at run time, as PyG's DataBatch is: its first base that
    was written is named, which serves as well.
    """
    written = next((base for base in cls.__mro__[:-1] if not _is_made(base)), cls)
    name = cls.__qualname__ if written is cls else type_name(written)
    return f"register_splitter({name}, length=..., slice=...)"


def _is_made(cls: type) -> bool:
    """Return whether a class has nothing of its own, and no statement that it comes from."""
    if not vars(cls).keys() <= _BARE:
        return False
    try:
        return not inspect.getsource(cls)
    except (OSError, TypeError):
        return True


_BUILTINS: dict[Any, Kind] = {
    tuple: Kind(
        Role.FIELDS, lambda obj: dict(enumerate(obj)), lambda obj, parts: tuple(parts.values())
    ),
    list: Kind(
        Role.LIST, lambda obj: dict(enumerate(obj)), lambda obj, parts: list(parts.values())
    ),
    dict: Kind(Role.FIELDS, dict, lambda obj, parts: dict(parts)),
}
# what a class statement without a body leaves in a class
_BARE = {
    *vars(type("_", (), {})),
    *("__parameters__", "__orig_bases__", "__abstractmethods__", "_abc_impl"),
}
_SCALARS = (
    str,
    bytes,
    bytearray,
    numbers.Number,
    type(None),
    Enum,
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
)
_SUBCLASSES: dict[Any, Kind] = {
    PackedSequence: Kind(
        Role.UNKNOWN,
        why="its data interleaves the samples: pad the batch and pack inside loss_fn, or",
    ),
    Set: Kind(Role.UNKNOWN, why="a set has no order: make it a list, or"),
    (Iterator, AsyncIterator): Kind(
        Role.UNKNOWN,
        why="it can be read only once, and a replay reads it again: make it a list, or",
    ),
    Tensor: Kind(Role.TENSOR),
    _SCALARS: Kind(Role.SCALAR),
    tuple: Kind(Role.FIELDS, _BUILTINS[tuple].take, _put_tuple),
    list: Kind(Role.LIST, _BUILTINS[list].take, refilled(_fill_list)),
    dict: Kind(Role.FIELDS, lambda obj: dict(obj.items()), refilled(_fill_dict)),
    UserDict: Kind(Role.FIELDS, _take_user_dict, refilled(_fill_user_dict)),
    Mapping: Kind(Role.UNKNOWN, why="only its class knows how it is made: make it a dict, or"),
}
_WALKED = frozenset({Role.TENSOR, Role.ARRAY, Role.LIST, Role.FIELDS, Role.CUSTOM})


def tensors_in(obj: Any, wanted: tuple[Role, ...] = (Role.TENSOR,)) -> list[Any]:
    """Return every tensor inside `obj`, in order; with another `wanted`, the values of those roles.

    Unknown objects are not opened.
    """
    kind = kind_of(type(obj))
    if kind.role in wanted:
        return [obj]
    if kind.splitter is not None:
        return kind.splitter.tensors(obj) if Role.TENSOR in wanted else []
    parts = kind.take(obj).values()
    return (
        [leaf for part in parts for leaf in tensors_in(part, wanted)]
        if roles_in(parts) & _WALKED
        else []
    )


def map_tensors(obj: Any, fn: Callable[[Tensor], Tensor]) -> Any:
    """Return `obj` with `fn` applied to its tensors, in new containers of the same types.

    Where `fn` changes nothing it is the same object.
    """
    kind = kind_of(type(obj))
    if kind.role is Role.TENSOR:
        return fn(obj)
    if kind.splitter is not None:
        return kind.splitter.mapped(obj, fn)
    parts = kind.take(obj)
    if not roles_in(parts.values()) & _WALKED:
        return obj
    mapped = {key: map_tensors(part, fn) for key, part in parts.items()}
    return obj if all(mapped[key] is part for key, part in parts.items()) else kind.put(obj, mapped)


def fresh(obj: Any) -> Any:
    """Return `obj` with new containers and numpy arrays around the same leaves.

    So neither a `pop` nor an edit of an array reaches the original.
    """
    kind = kind_of(type(obj))
    return kind.put(obj, {key: fresh(part) for key, part in kind.take(obj).items()})


def own_array(array: Any) -> Any:
    """Return a numpy array that was just made, with new containers in it where it holds objects.

    So an edit of one reaches no replay.
    """
    if array.dtype == object:
        for place in sys.modules["numpy"].ndindex(array.shape):
            array[place] = fresh(array[place])
    return array


def count_attributes(obj: Any, parts: Parts, samples: int) -> dict[str, bool]:
    """Return the attributes of a dataclass that could hold its number of samples.

    They are made from its fields (in `__post_init__`, say) and are none themselves. True for those
    that have it now.
    """
    if not dataclasses.is_dataclass(obj):
        return {}
    others = getattr(obj, "__dict__", {}).items()
    return {
        name: value == samples for name, value in others if type(value) is int and name not in parts
    }


def row_attributes(obj: Any, parts: Parts) -> list[str]:
    """Return the names of a container's attributes that have rows and are none of its parts.

    Each piece would get the whole batch's.
    """
    known = {id(part) for part in parts.values()} | (
        {id(obj.data)} if isinstance(obj, UserDict) else set()
    )
    cached = _cached_properties(type(obj))
    attributes = getattr(obj, "__dict__", {}).items()
    others = [
        (name, value) for name, value in attributes if name not in cached and id(value) not in known
    ]
    return [
        name
        for name, value in others
        if any(leaf.ndim for leaf in tensors_in(value, (Role.TENSOR, Role.ARRAY)))
    ]


def dotted(path: Path) -> str:
    """Return a path as the user writes it: `inputs.position_ids`, `1`, "" for the batch itself."""
    return ".".join(map(str, path))


def suffixes(path: Path) -> Iterator[str]:
    """Yield the names of `path`, the most specific first: the whole path, then its tails.

    An index counts from the root only.
    """
    yield dotted(path)
    for i in range(1, len(path)):
        if not isinstance(path[i], int):
            yield dotted(path[i:])


def walk(obj: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Yield every value below `obj` with its path; lists of plain items are not opened."""
    kind = kind_of(type(obj))
    parts = kind.take(obj)
    if kind.role is not Role.LIST or roles_in(parts.values()) & _WALKED:
        for key, part in parts.items():
            yield (*path, key), part
            yield from walk(part, (*path, key))


def unmatched(names: Iterable[str], obj: Any) -> list[str]:
    """Return the names that stand for nothing in `obj`, neither a part nor an attribute."""
    places: list[tuple[Path, Any]] = [((), obj), *walk(obj)]
    known = {name for path, _ in places for name in suffixes(path)}
    owners = [
        value
        for _, value in places
        if kind_of(type(value)).role in (Role.FIELDS, Role.CUSTOM)
        and type(value) not in (dict, tuple)
    ]
    return [
        name
        for name in names
        if name not in known
        and not any(hasattr(value, name.rpartition(".")[2]) for value in owners)
    ]


def lookup(obj: Any, key: str | int) -> Any:
    """Return the value at a name, a dotted path or an index; a LookupError lists the names."""
    name, places = str(key), list(walk(obj))
    found = [place for place in places if dotted(place[0]) == name] or [
        place for place in places if name in suffixes(place[0])
    ]
    if len(found) == 1:
        return found[0][1]
    if found:
        raise LookupError(f"{key!r} is not unique: it could be {some(found)}")
    raise LookupError(
        f"there is no {key!r}: {type_name(type(obj))} has "
        f"{f'the parts {some(places)}' if places else 'no named parts'}"
    )


def some(places: list[tuple[Path, Any]], most: int = 12) -> str:
    """Return the names of places for an error's text, cut short where there are many."""
    return ", ".join([repr(dotted(path)) for path, _ in places[:most]]) + (
        f" and {len(places) - most} more" if len(places) > most else ""
    )
