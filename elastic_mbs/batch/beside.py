"""What containers keep beside their parts: HF `BatchEncoding`'s encodings, say, of which each sample has one, or a mask that `__init__` computed."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from elastic_mbs.batch.containers import Role, kind_of


def cut_beside(obj: Any, made: Any, lengths: set[int], start: int, stop: int) -> Any:
    """The piece `made` of `obj`, with its own samples in what `obj` keeps beside its parts, where that is as long as one of them."""
    for name in kind_of(type(obj)).beside:
        items = vars(obj).get(name)
        if isinstance(items, list) and len(items) in lengths:
            vars(made)[name] = items[start:stop]
    return made


def join_beside(made: Any, pieces: list[Any], lengths: Sequence[int]) -> None:
    """Gives `made`, put together from `pieces`, what they keep beside their parts, where that is as long as each of them."""
    for name in kind_of(type(made)).beside:
        items = [vars(piece).get(name) for piece in pieces]
        if all(isinstance(part, list) and len(part) == length for part, length in zip(items, lengths, strict=True)):
            vars(made)[name] = [item for part in items for item in part or ()]


def left_behind(obj: Any, parts: Sequence[Any]) -> list[str]:
    """Attributes beside the parts of `obj` with rows in them, which every piece would keep as they are: those of the whole batch.

    What is a part as well is not among them, because a piece gets its own; nor is what a mapping keeps its items in.
    """
    attributes = getattr(obj, "__dict__", None)
    if not attributes or attributes is obj:
        return []
    kind = kind_of(type(obj))
    stores = isinstance(obj, Mapping) and not isinstance(obj, dict)
    keys = set(kind.take(obj)[0]) if stores else set()
    store = {name for name, value in attributes.items() if stores and isinstance(value, Mapping) and set(value) == keys}
    if stores and not store:
        return []  # its constructor makes the pieces, attributes and all
    known = set(map(id, parts))
    if kind.role is not Role.LIST:
        known.update(id(each) for part in parts for each in _with_rows(part))
    beside = {name: value for name, value in attributes.items() if name not in store and name not in kind.cached}
    return [name for name, value in beside.items() if any(id(each) not in known for each in _with_rows(value))]


def _with_rows(value: Any) -> Iterator[Any]:
    """Tensors and arrays with at least one dimension; only Python's own containers are looked into."""
    numpy = sys.modules.get("numpy")
    if isinstance(value, Tensor) or (numpy is not None and isinstance(value, numpy.ndarray)):
        if value.ndim > 0:
            yield value
    elif type(value) in (dict, list, tuple):
        for each in value.values() if type(value) is dict else value:
            yield from _with_rows(each)
