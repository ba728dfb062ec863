"""The containers of a batch, taken apart and rebuilt as the same type; the type alone decides how.

`torch.utils._pytree` sees HF `BatchEncoding`, `UserDict` and dataclasses as single leaves, so the walk is our own.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import numbers
import sys
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from elastic_mbs.batch.splitters import Splitter, type_name
from elastic_mbs.errors import BatchError

Path = tuple[Any, ...]


class Role(Enum):
    """What a type can be in a batch."""

    TENSOR = auto()
    SCALAR = auto()
    LIST = auto()  # fields or per-sample items: the type alone does not say
    FIELDS = auto()  # mappings, tuples, dataclasses
    ARRAY = auto()  # numpy
    CUSTOM = auto()  # registered with register_splitter
    REFUSED = auto()
    UNKNOWN = auto()


@dataclass(frozen=True, slots=True, eq=False)
class Kind:
    """How values of one type are handled."""

    role: Role
    take: Callable[[Any], tuple[list[Any], list[Any]]] = lambda obj: ([], [])  # container → (keys, values)
    put: Callable[[Any, list[Any], list[Any]], Any] = lambda obj, keys, values: obj  # a new container of the type; the given one stays as it is
    splitter: Splitter | None = None  # of Role.CUSTOM
    why: str = ""  # of Role.REFUSED
    computed: Mapping[str, Any] = field(default_factory=dict)  # dataclass fields that the constructor does not take, with their defaults


splitters: dict[type, Splitter] = {}


def register_splitter(
    cls: type,
    *,
    length: Callable[[Any], int],
    slice: Callable[[Any, int, int], Any],
    tensors: Callable[[Any], Iterable[Tensor]] | None = None,
    move: Callable[[Any, Callable[[Tensor], Tensor]], Any] | None = None,
) -> None:
    """Teaches elastic_mbs how to cut a type of yours; it then holds for its subclasses too (nearest class in the MRO).

    Args:
        cls: the type. Registering it again replaces the earlier functions.
        length: `length(obj)` → number of samples.
        slice: `slice(obj, start, stop)` → samples `start` to `stop`, preferably as views. It must leave `obj` as it is.
        tensors: `tensors(obj)` → the tensors inside, for devices, sizes and the check for edits in place. None: it holds none.
        move: `move(obj, fn)` → the object rebuilt with `fn(tensor)` for each tensor (`fn` copies to a device, clones or detaches).

    Raises:
        BatchError: `cls` is no class or one that is cut already (tensor, dict, list, tuple, a scalar), a function cannot be called, or only one of
            `tensors` and `move` is given.
    """
    splitters[cls] = Splitter(cls, length, slice, tensors, move)
    cached_kind.cache_clear()


_SCALARS = (str, bytes, bytearray, numbers.Number, type(None), Enum, torch.dtype, torch.device, torch.layout, torch.memory_format)
_REFUSED: dict[tuple[type, ...], str] = {
    (PackedSequence,): "its data interleaves the samples, so no range of it is a range of samples: pad the batch and pack inside loss_fn, "
    "or put it in a class of yours and register it",
    (Set,): "a set has no order, so no range of it is a range of samples: make it a list, or register it",
    (Iterator, AsyncIterator): "it can be read only once, and a replay reads it again: make it a list, or register it",
}


def _kind(cls: type) -> Kind:
    for base in cls.__mro__:
        if base in splitters:
            return Kind(Role.CUSTOM, splitter=splitters[base])
    for types, why in _REFUSED.items():
        if issubclass(cls, types):
            return Kind(Role.REFUSED, why=why)
    numpy = sys.modules.get("numpy")
    if numpy is not None and issubclass(cls, numpy.generic | numpy.ndarray):
        return Kind(Role.ARRAY if issubclass(cls, numpy.ndarray) else Role.SCALAR)
    # Tensor-like containers (TensorDict) carry a batch size of their own, which a rebuild would leave as it was.
    unknown = hasattr(cls, "__torch_function__") and not issubclass(cls, Tensor)
    if unknown or cls in _BUILTINS:
        return _BUILTINS.get(cls, Kind(Role.UNKNOWN))
    for base, kind in _SUBCLASSES.items():
        if issubclass(cls, base):
            return kind
    if dataclasses.is_dataclass(cls):
        computed = {each.name: each.default for each in dataclasses.fields(cls) if not each.init}
        return Kind(Role.FIELDS, _take_dataclass, refilled(_fill_attributes), computed=computed)
    return Kind(Role.UNKNOWN)


def _take_sequence(obj: Any) -> tuple[list[Any], list[Any]]:
    return list(range(len(obj))), list(obj)


def _take_dict(obj: Any) -> tuple[list[Any], list[Any]]:
    return list(obj), list(obj.values())


_PER_SAMPLE = ("_encodings",)  # attributes of a mapping with one item per sample: HF BatchEncoding's, which answer `word_ids(i)`


def _take_mapping(obj: Any) -> tuple[list[Any], list[Any]]:
    attributes = getattr(obj, "__dict__", {})
    items = {key: obj[key] for key in obj} | {name: attributes[name] for name in _PER_SAMPLE if isinstance(attributes.get(name), list)}
    return _take_dict(items)


def _take_dataclass(obj: Any) -> tuple[list[Any], list[Any]]:
    names = [each.name for each in dataclasses.fields(obj) if hasattr(obj, each.name)]
    return names, [getattr(obj, name) for name in names]


def _fill_list(new: Any, keys: list[Any], values: list[Any]) -> None:
    new[:] = values


def _fill_dict(new: Any, keys: list[Any], values: list[Any]) -> None:
    for key, value in zip(keys, values, strict=True):
        new[key] = value  # by its own __setitem__: HF ModelOutput keeps attributes next to the items


def _fill_attributes(new: Any, keys: list[Any], values: list[Any]) -> None:
    # Not dataclasses.replace: __post_init__ has already worked on these values, and InitVars are gone.
    for name, value in zip(keys, values, strict=True):
        object.__setattr__(new, name, value)


def refilled(fill: Callable[[Any, list[Any], list[Any]], None]) -> Callable[[Any, list[Any], list[Any]], Any]:
    """The put of a container that is copied, with its attributes, and filled with other values."""

    def put(obj: Any, keys: list[Any], values: list[Any]) -> Any:
        try:
            new = copy.copy(obj)
        except TypeError as error:
            raise _not_rebuilt(obj, error) from error
        attributes = getattr(new, "__dict__", {})
        for name in _cached_properties(type(obj)):
            attributes.pop(name, None)  # computed from the values that are replaced
        fill(new, keys, values)
        if getattr(obj, "__dict__", None) is obj:  # `self.__dict__ = self`: the copy has a dict of its own, with the old items in it
            object.__setattr__(new, "__dict__", new)
        elif attributes and len(old := kind_of(type(obj)).take(obj)[1]) == len(values):  # else a list of other items
            # Parts can be attributes too, by their names or others; numbers and texts are the same in all pieces.
            renewed = {id(part): value for part, value in zip(old, values, strict=True) if not isinstance(part, _SCALARS)}
            own = vars(obj).items()
            attributes.update({name: renewed[id(part)] for name, part in own if id(part) in renewed and attributes.get(name) is part})
        return new

    return put


def _cached_properties(cls: type) -> list[str]:
    return [name for base in cls.__mro__ for name, value in vars(base).items() if isinstance(value, functools.cached_property)]


def _put_mapping(obj: Any, keys: list[Any], values: list[Any]) -> Any:
    items = dict(zip(keys, values, strict=True))
    renewed = {name: items.pop(name) for name in _PER_SAMPLE if name in items and name not in obj}
    # A shallow copy shares the dict that holds the items, so that dict is replaced where there is one, which keeps other attributes.
    for name, store in getattr(obj, "__dict__", {}).items():
        if isinstance(store, dict) and store.keys() == items.keys():
            renewed[name] = kind_of(type(store)).put(store, list(items), list(items.values()))
            new = refilled(lambda copied, _, __: vars(copied).update(renewed))(obj, keys, values)
            if all(new[key] is value for key, value in items.items()):
                return new
            del renewed[name]
    return _constructed(obj, items, keys, values)


def _put_tuple(obj: Any, keys: list[Any], values: list[Any]) -> Any:
    return obj._make(values) if hasattr(obj, "_make") else _constructed(obj, values, keys, values)  # torch.return_types and the like


def _constructed(obj: Any, content: Any, keys: list[Any], values: list[Any]) -> Any:
    try:
        built = type(obj)(content)
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise _not_rebuilt(obj, error) from error
    names, parts = kind_of(type(built)).take(built)
    if names != keys or any(new is not value for new, value in zip(parts, values, strict=True)):
        raise _not_rebuilt(obj, "its constructor does not keep its items")
    return built


def _not_rebuilt(obj: Any, why: object) -> BatchError:
    return BatchError(f"{type_name(type(obj))} cannot be rebuilt with other values: {why}\n  say how it is cut: {to_register(type(obj))}")


def to_register(cls: type) -> str:
    """The call to paste for a type that is not known."""
    return f"register_splitter({cls.__qualname__}, length=..., slice=...)"


_BUILTINS: dict[Any, Kind] = {
    tuple: Kind(Role.FIELDS, _take_sequence, lambda obj, keys, values: tuple(values)),
    list: Kind(Role.LIST, _take_sequence, lambda obj, keys, values: list(values)),
    dict: Kind(Role.FIELDS, _take_dict, lambda obj, keys, values: dict(zip(keys, values, strict=True))),
}
_SUBCLASSES: dict[Any, Kind] = {
    Tensor: Kind(Role.TENSOR),
    _SCALARS: Kind(Role.SCALAR),
    tuple: Kind(Role.FIELDS, _take_sequence, _put_tuple),
    list: Kind(Role.LIST, _take_sequence, refilled(_fill_list)),
    dict: Kind(Role.FIELDS, _take_dict, refilled(_fill_dict)),
    Mapping: Kind(Role.FIELDS, _take_mapping, _put_mapping),
}
cached_kind = functools.lru_cache(maxsize=1024)(_kind)
kind_of: Callable[[type], Kind] = cached_kind  # registered types come first
_WALKED = frozenset({Role.TENSOR, Role.LIST, Role.FIELDS, Role.CUSTOM})


def roles_in(values: Iterable[Any]) -> set[Role]:
    return {kind_of(cls).role for cls in set(map(type, values))}  # once per type: a list of many strings costs little


def tensors_in(obj: Any) -> list[Tensor]:
    """Every tensor inside `obj`, in order; unknown objects are not looked into."""
    kind = kind_of(type(obj))
    if kind.role is Role.TENSOR:
        return [obj]
    if kind.splitter is not None:
        return kind.splitter.tensors(obj)
    _, parts = kind.take(obj)
    return [tensor for part in parts for tensor in tensors_in(part)] if roles_in(parts) & _WALKED else []


def map_tensors(obj: Any, fn: Callable[[Tensor], Tensor]) -> Any:
    """`obj` with `fn` applied to its tensors, in new containers of the same types; the same object where `fn` changes nothing."""
    kind = kind_of(type(obj))
    if kind.role is Role.TENSOR:
        return fn(obj)
    if kind.splitter is not None:
        return kind.splitter.mapped(obj, fn)
    keys, values = kind.take(obj)
    if not roles_in(values) & _WALKED:
        return obj
    mapped = [map_tensors(value, fn) for value in values]
    return obj if all(new is old for new, old in zip(mapped, values, strict=True)) else kind.put(obj, keys, mapped)


def fresh(obj: Any) -> Any:
    """`obj` with new containers around the same leaves, so that a `pop` from it does not reach the original."""
    kind = kind_of(type(obj))
    keys, values = kind.take(obj)
    return kind.put(obj, keys, [fresh(value) for value in values])


def attributes_with_rows(obj: Any, parts: Sequence[Any]) -> list[str]:
    """Attributes of a container that have rows and are none of its parts: each piece would get the whole batch's."""
    attributes = getattr(obj, "__dict__", None)
    if not attributes or attributes is obj:
        return []
    stores: set[str] = set()
    if isinstance(obj, Mapping) and not isinstance(obj, dict):
        stores = {name for name, value in attributes.items() if isinstance(value, Mapping) and set(value) == set(obj)}
        if not stores:
            return []  # its constructor makes the pieces, attributes and all
    known = set(map(id, parts))
    cached = _cached_properties(type(obj))
    return [name for name, value in attributes.items() if name not in stores and name not in cached and id(value) not in known and _has_rows(value)]


def _has_rows(value: Any) -> bool:
    """Whether a tensor or array with a dimension is in it; only Python's own containers are looked into."""
    kind = kind_of(type(value))
    if kind.role in (Role.TENSOR, Role.ARRAY):
        return bool(value.ndim)
    return kind in _BUILTINS.values() and any(map(_has_rows, kind.take(value)[1]))


def dotted(path: Path) -> str:
    """A path as the user writes it: `inputs.position_ids`, `1`; the batch itself is the empty string."""
    return ".".join(map(str, path))


def suffixes(path: Path) -> Iterator[str]:
    """The names of `path`, the most specific first: the whole path, then its tails; an index counts from the root only."""
    yield dotted(path)
    for i in range(1, len(path)):
        if not isinstance(path[i], int):
            yield dotted(path[i:])


def walk(obj: Any) -> Iterator[tuple[Path, Any]]:
    """Every value below `obj` with its path, the outermost first; lists of plain items are not opened."""
    todo: deque[tuple[Path, Any]] = deque([((), obj)])
    while todo:
        path, value = todo.popleft()
        if path:
            yield path, value
        kind = kind_of(type(value))
        keys, parts = kind.take(value)
        if kind.role is not Role.LIST or roles_in(parts) & _WALKED:
            todo.extend(((*path, key), part) for key, part in zip(keys, parts, strict=True))


def lookup(obj: Any, key: str | int) -> Any:
    """The value that a name, a dotted path or an index means; a LookupError lists the names."""
    name, found = str(key), []
    for path, value in walk(obj):
        if dotted(path) == name:
            return value
        if name in suffixes(path):
            found.append((dotted(path), value))
    if len(found) == 1:
        return found[0][1]
    if found:
        raise LookupError(f"{key!r} is not unique: it could be {some([path for path, _ in found])}")
    names = [dotted(path) for path, _ in walk(obj)]
    raise LookupError(f"there is no {key!r}: there is {some(names)}" if names else f"there is no {key!r}: {type_name(type(obj))} has no named parts")


def some(names: list[str], most: int = 12) -> str:
    """Names for an error's text, cut short when there are many."""
    return ", ".join(map(repr, names[:most])) + (f" and {len(names) - most} more" if len(names) > most else "")
