"""What a batch may be made of: taking containers apart and putting them back as the same type.

`torch.utils._pytree` and optree see HF `BatchEncoding`, `UserDict` and dataclasses as single leaves and would cut a `PackedSequence` wrongly, so
the walk is our own. What a value is depends on its type alone (`kind_of`, cached); what its parts mean in a batch is decided in `view.py`.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import numbers
import sys
from collections import UserDict
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Set
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
    CUSTOM = auto()  # somebody called register_splitter
    REFUSED = auto()
    UNKNOWN = auto()


_splitters: dict[type, Splitter] = {}


def register_splitter(
    cls: type,
    *,
    length: Callable[[Any], int],
    slice: Callable[[Any, int, int], Any],
    tensors: Callable[[Any], Iterable[Tensor]] | None = None,
    move: Callable[[Any, Callable[[Tensor], Tensor]], Any] | None = None,
) -> None:
    """Teaches `BatchView` how to cut a type of yours; it then holds for its subclasses too (nearest class in the MRO).

    Args:
        cls: the type. Registering it again replaces what was said before.
        length: `length(obj)` → number of samples.
        slice: `slice(obj, start, stop)` → samples `start` to `stop`, preferably as views. It must leave `obj` as it is.
        tensors: `tensors(obj)` → the tensors inside, for devices, sizes and the check for edits in place. None: it holds none.
        move: `move(obj, fn)` → the object rebuilt with `fn(tensor)` for each tensor (`fn` copies to a device, clones or detaches).

    Raises:
        BatchError: `cls` is no class or one that is cut already (tensor, dict, list, tuple, a scalar), a function cannot be called, or only one of
            `tensors` and `move` is given.
    """
    if not isinstance(cls, type):
        raise BatchError(f"register_splitter needs a class, not {cls!r}")
    if cls in (object, Tensor, dict, list, tuple, str, bytes, int, float, bool, type(None)):
        raise BatchError(f"{type_name(cls)} is cut by elastic_mbs itself: register a class of your own (a subclass will do)")
    for name, function in (("length", length), ("slice", slice), ("tensors", tensors), ("move", move)):
        if not callable(function) and (function is not None or name in ("length", "slice")):
            raise BatchError(f"register_splitter({cls.__name__}): {name} must be a function, not {function!r}")
    if (tensors is None) != (move is None):
        given, missing = ("tensors", "move") if move is None else ("move", "tensors")
        raise BatchError(f"register_splitter({cls.__name__}): {given}= needs {missing}= as well (what is found must be movable, and the reverse)")
    _splitters[cls] = Splitter(cls, length, slice, tensors, move)
    _cached_kind.cache_clear()


def _not_copied(obj: Any, why: object) -> BatchError:
    name = type(obj).__qualname__
    return BatchError(
        f"{type_name(type(obj))} cannot be rebuilt with other values: {why}\n  say how it is cut: register_splitter({name}, length=..., slice=...)"
    )


def _shallow(obj: Any) -> Any:
    """A shallow copy without what cached properties have computed from the values that are about to be replaced."""
    try:
        new = copy.copy(obj)
    except TypeError as error:
        raise _not_copied(obj, error) from error
    for name in kind_of(type(obj)).cached:
        vars(new).pop(name, None)
    return new


def _take_mapping(obj: Any) -> tuple[list[Any], list[Any]]:
    return list(obj), [obj[key] for key in obj]


def _take_dict(obj: dict[Any, Any]) -> tuple[list[Any], list[Any]]:
    return list(obj), list(obj.values())


def _take_userdict(obj: Any) -> tuple[list[Any], list[Any]]:
    return _take_dict(obj.data)  # BatchEncoding's own __getitem__ means other things too


def _take_sequence(obj: Any) -> tuple[list[Any], list[Any]]:
    return list(range(len(obj))), list(obj)


def _take_dataclass(obj: Any) -> tuple[list[Any], list[Any]]:
    names = [each.name for each in dataclasses.fields(obj) if hasattr(obj, each.name)]
    return names, [getattr(obj, name) for name in names]


def _put_dict(obj: Any, keys: list[Any], values: list[Any]) -> Any:
    return dict(zip(keys, values, strict=True))


def _put_dict_subclass(obj: Any, keys: list[Any], values: list[Any]) -> Any:
    new = _shallow(obj)
    for key, value in zip(keys, values, strict=True):
        new[key] = value  # by its own __setitem__: HF ModelOutput keeps attributes beside the items
    if getattr(obj, "__dict__", None) is obj:  # `self.__dict__ = self`: the copy has a dict of its own, with the old items in it
        object.__setattr__(new, "__dict__", new)
    else:
        _renew_attributes(obj, new, [dict.get(obj, key) for key in keys], values)
    return new


def _renew_attributes(obj: Any, new: Any, before: list[Any], after: list[Any]) -> None:
    """Parts may be attributes, too, by their names or others."""
    renewed = {id(old): value for old, value in zip(before, after, strict=True) if not isinstance(old, _SCALARS)}  # one 8 is every 8
    present = getattr(new, "__dict__", {})
    present.update({name: renewed[id(old)] for name, old in getattr(obj, "__dict__", {}).items() if id(old) in renewed and present.get(name) is old})


def _put_userdict(obj: Any, keys: list[Any], values: list[Any]) -> Any:
    new = _shallow(obj)
    new.data = dict(zip(keys, values, strict=True))
    _renew_attributes(obj, new, [obj.data.get(key) for key in keys], values)
    return new


def _put_mapping(obj: Any, keys: list[Any], values: list[Any]) -> Any:
    data = dict(zip(keys, values, strict=True))
    # A shallow copy shares the inner dict, so assigning items would change the original: replace the dict itself, which keeps other attributes.
    for name, inner in getattr(obj, "__dict__", {}).items():
        if isinstance(inner, dict) and inner.keys() == data.keys():
            new = _shallow(obj)
            object.__setattr__(new, name, kind_of(type(inner)).put(inner, keys, values))
            if all(new[key] is value for key, value in data.items()):
                _renew_attributes(obj, new, [inner[key] for key in keys], values)
                return new
    try:
        built = type(obj)(data)
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise _not_copied(obj, error) from error
    if list(built) != keys or any(built[key] is not value for key, value in data.items()):
        raise _not_copied(obj, "its constructor does not keep a dict's items")
    return built


def _put_tuple(obj: Any, keys: list[Any], values: list[Any]) -> Any:
    return tuple(values)


def _put_namedtuple(obj: Any, keys: list[Any], values: list[Any]) -> Any:
    return type(obj)._make(values)


def _put_tuple_subclass(obj: Any, keys: list[Any], values: list[Any]) -> Any:
    try:
        built = type(obj)(values)  # torch.return_types and the like
    except (TypeError, ValueError) as error:
        raise _not_copied(obj, error) from error
    if len(built) != len(values) or any(new is not value for new, value in zip(built, values, strict=True)):
        raise _not_copied(obj, "its constructor does not keep a sequence's items")
    return built


def _put_list(obj: Any, keys: list[Any], values: list[Any]) -> Any:
    return list(values)


def _put_list_subclass(obj: Any, keys: list[Any], values: list[Any]) -> Any:
    new = _shallow(obj)
    new[:] = values
    return new


def _put_dataclass(obj: Any, keys: list[Any], values: list[Any]) -> Any:
    # Not dataclasses.replace: __post_init__ has already done its work on these values, and InitVars are gone.
    new = _shallow(obj)
    _renew_attributes(obj, new, [getattr(obj, name) for name in keys], values)
    for name, value in zip(keys, values, strict=True):
        object.__setattr__(new, name, value)
    return new


def _take_none(obj: Any) -> tuple[list[Any], list[Any]]:
    return [], []


def _put_same(obj: Any, keys: list[Any], values: list[Any]) -> Any:
    return obj


@dataclass(frozen=True, slots=True, eq=False)
class Kind:
    """How values of one type are handled.

    Attributes:
        role: what they can be in a batch.
        take: container → (keys, values).
        put: (container, keys, values) → a new container of the same type; the given one is left as it is.
        splitter: what was registered, for `Role.CUSTOM`.
        why: why the type is refused and what to do, for `Role.REFUSED`.
        computed: dataclass fields that the constructor does not take, with their defaults.
        cached: names of cached properties.
        beside: attributes beside the parts that are lists with one item per sample, where they are there.
    """

    role: Role
    take: Callable[[Any], tuple[list[Any], list[Any]]] = _take_none
    put: Callable[[Any, list[Any], list[Any]], Any] = _put_same
    splitter: Splitter | None = None
    why: str = ""
    computed: Mapping[str, Any] = field(default_factory=dict)
    cached: tuple[str, ...] = ()
    beside: tuple[str, ...] = ()


_SCALARS = (str, bytes, bytearray, numbers.Number, type(None), Enum, torch.dtype, torch.device, torch.layout, torch.memory_format)
_PACKED = (
    "its data interleaves the samples, so no range of it is a range of samples: pad the batch and pack inside loss_fn, "
    "or put it in a class of yours and register_splitter(ThatClass, length=..., slice=...)"
)
_SET = "a set has no order, so no range of it is a range of samples: make it a list, or register_splitter({name}, length=..., slice=...)"
_ITERATOR = "it can be read only once, and a replay reads it again: make it a list, or register_splitter({name}, length=..., slice=...)"


def _kind(cls: type) -> Kind:
    for base in cls.__mro__:
        if base in _splitters:
            return Kind(Role.CUSTOM, splitter=_splitters[base])
    numpy = sys.modules.get("numpy")
    if issubclass(cls, Tensor):
        return Kind(Role.TENSOR)
    if issubclass(cls, _SCALARS) or (numpy is not None and issubclass(cls, numpy.generic)):
        return Kind(Role.SCALAR)
    if issubclass(cls, PackedSequence):
        return Kind(Role.REFUSED, why=_PACKED)
    if issubclass(cls, Set):
        return Kind(Role.REFUSED, why=_SET.format(name=cls.__qualname__))
    if issubclass(cls, Iterator | AsyncIterator):
        return Kind(Role.REFUSED, why=_ITERATOR.format(name=cls.__qualname__))
    if numpy is not None and issubclass(cls, numpy.ndarray):
        return Kind(Role.ARRAY)
    return _container_kind(cls)


def _container_kind(cls: type) -> Kind:
    if hasattr(cls, "__torch_function__"):
        return Kind(Role.UNKNOWN)  # tensor-like containers (TensorDict) carry a batch size of their own, which a rebuild would leave as it was
    cached = tuple(name for base in cls.__mro__ for name, value in vars(base).items() if isinstance(value, functools.cached_property))
    if issubclass(cls, dict):
        return Kind(Role.FIELDS, _take_dict, _put_dict if cls is dict else _put_dict_subclass, cached=cached)
    if issubclass(cls, UserDict):
        return Kind(Role.FIELDS, _take_userdict, _put_userdict, cached=cached, beside=("_encodings",))  # HF BatchEncoding's, behind `word_ids(i)`
    if issubclass(cls, Mapping):
        return Kind(Role.FIELDS, _take_mapping, _put_mapping, cached=cached)
    if issubclass(cls, tuple):
        return Kind(Role.FIELDS, _take_sequence, _put_tuple if cls is tuple else _put_namedtuple if hasattr(cls, "_make") else _put_tuple_subclass)
    if issubclass(cls, list):
        return Kind(Role.LIST, _take_sequence, _put_list if cls is list else _put_list_subclass, cached=cached)
    if dataclasses.is_dataclass(cls):
        computed = {each.name: each.default for each in dataclasses.fields(cls) if not each.init}
        return Kind(Role.FIELDS, _take_dataclass, _put_dataclass, computed=computed, cached=cached)
    return Kind(Role.UNKNOWN)


_cached_kind = functools.lru_cache(maxsize=1024)(_kind)
kind_of: Callable[[type], Kind] = _cached_kind
"""The kind of a type; what is registered comes first."""

_WALKED = frozenset({Role.TENSOR, Role.LIST, Role.FIELDS, Role.CUSTOM})


def roles_in(values: Iterable[Any]) -> set[Role]:
    """The roles of the values' types; one look per type, so that a list of many strings costs little."""
    return {kind_of(cls).role for cls in set(map(type, values))}


def tensors_in(obj: Any) -> Iterator[Tensor]:
    """Every tensor inside `obj`, in order; unknown objects are not looked into."""
    kind = kind_of(type(obj))
    if kind.role is Role.TENSOR:
        yield obj
    elif kind.splitter is not None:
        yield from kind.splitter.tensors(obj)
    else:
        _, values = kind.take(obj)
        if roles_in(values) & _WALKED:
            for value in values:
                yield from tensors_in(value)


def map_tensors(obj: Any, fn: Callable[[Tensor], Tensor]) -> Any:
    """`obj` with `fn` applied to every tensor in it, in containers of the same types.

    Args:
        obj: any container that `BatchView` takes, nested at will, or a tensor. Other objects are returned untouched.
        fn: tensor → tensor.

    Returns:
        A new container, or the same object where `fn` returned every tensor as it was (so that moving to the same device costs no rebuild).
    """
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
    return kind.put(obj, keys, [fresh(value) for value in values]) if values else kind.put(obj, [], [])


def dotted(path: Path) -> str:
    """A path as the user writes it: `inputs.position_ids`, `1`; the batch itself is the empty string."""
    return ".".join(map(str, path))


def suffixes(path: Path) -> Iterator[str]:
    """The names that mean `path`, the most specific first: the whole path, then its tails, but an index counts from the root only."""
    yield dotted(path)
    for i in range(1, len(path)):
        if not isinstance(path[i], int):
            yield dotted(path[i:])


def walk(obj: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Every value below `obj` with its path, containers before their parts; lists of plain items are not opened."""
    kind = kind_of(type(obj))
    keys, values = kind.take(obj)
    if kind.role is Role.LIST and not roles_in(values) & _WALKED:
        return
    for key, value in zip(keys, values, strict=True):
        yield (*path, key), value
        yield from walk(value, (*path, key))


_MISSING = object()


def _descend(obj: Any, name: str) -> Any:
    for key, value in zip(*kind_of(type(obj)).take(obj), strict=True):
        if str(key) == name:
            return value
        if name.startswith(f"{key}.") and (found := _descend(value, name[len(str(key)) + 1 :])) is not _MISSING:
            return found
    return _MISSING


def lookup(obj: Any, key: str | int) -> Any:
    """The value that a name, a dotted path or an index means.

    Raises:
        LookupError: nothing or more than one value has that name; the text says which names there are.
    """
    name = str(key)
    if (exact := _descend(obj, name)) is not _MISSING:
        return exact
    found = [(dotted(path), value) for path, value in walk(obj) if name in suffixes(path)]
    if len(found) == 1:
        return found[0][1]
    if found:
        raise LookupError(f"{key!r} is not unique: it could be {some([path for path, _ in found])}")
    names = [dotted(path) for path, _ in walk(obj)]
    raise LookupError(f"there is no {key!r}: there is {some(names)}" if names else f"there is no {key!r}: {type_name(type(obj))} has no named parts")


def some(names: list[str], most: int = 12) -> str:
    """Names for an error's text, cut short when there are many."""
    return ", ".join(map(repr, names[:most])) + (f" and {len(names) - most} more" if len(names) > most else "")
