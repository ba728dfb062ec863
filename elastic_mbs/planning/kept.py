"""Fakes that a plan has left behind: where they are, in words.

A loss function may fill a cache while it is traced: a mask in an attribute, a table under an
`lru_cache`. The cache then holds a tensor without values, which training would find.
"""

from __future__ import annotations

import functools
import gc
import sys
import types
from collections import deque
from typing import Any

from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

_FAR = 8  # holders between a fake and a name that a person knows, at most
_NAMED = 3  # places named, at most
_CONTAINERS = (dict, list, tuple, set, deque, types.CellType)
_CACHE = type(functools.lru_cache(lambda: None))


def places(plan: object) -> tuple[int, list[str]]:
    """Return the number of living fakes that were made under a plan, and the places they are in.

    Args:
        plan: the attribute `planned_by` of the plan's fake mode.
    """
    if not _living(plan):
        return 0, []
    gc.collect()  # what is in a cycle is not kept
    _empty_gradients(_living(plan))
    left = _living(plan)
    found = list(dict.fromkeys(name for fake in left if (name := _place(fake, left)) is not None))
    if len(found) > _NAMED:
        found[_NAMED:] = [f"{len(found) - _NAMED} more places"]
    return len(left), found


def _living(plan: object) -> list[FakeTensor]:
    return [
        each
        for each in gc.get_objects()
        if issubclass(type(each), FakeTensor)
        and getattr(each.fake_mode, "planned_by", None) is plan
    ]


def _empty_gradients(left: list[FakeTensor]) -> None:
    """Empty the gradients that a backward of the loss function's own has left in real leaves.

    They were empty before: a fake cannot be added to a real gradient.
    """
    ids = set(map(id, left))
    for each in gc.get_objects() if ids else ():
        kind = type(each)
        real = issubclass(kind, Tensor) and not issubclass(kind, FakeTensor)
        if real and each.is_leaf and id(each.grad) in ids:
            each.grad = None


def _place(fake: FakeTensor, left: list[FakeTensor]) -> str | None:
    """Return the nearest name of what holds a fake; None where only frames and other fakes do."""
    queue: deque[tuple[object, int]] = deque([(fake, 0)])
    chain: list[object] = [fake]
    seen = {id(queue), id(chain), id(left), *map(id, left)}
    while queue:
        value, far = queue.popleft()
        for holder in gc.get_referrers(value):
            if id(holder) in seen or isinstance(holder, types.FrameType):
                continue
            seen.add(id(holder))
            name = _name(holder, value)
            if name is not None:
                return name
            if far < _FAR and isinstance(holder, _CONTAINERS):
                queue.append((holder, far + 1))
                chain.append(holder)
    return _in_modules(chain)


def _in_modules(chain: list[object]) -> str | None:
    """Return the name in a module of what holds a fake.

    What was there when `gc.freeze` was called counts as no referrer.
    """
    ids = set(map(id, chain))
    for module in list(sys.modules.values()):
        for key, value in list(getattr(module, "__dict__", {}).items()):
            if id(value) in ids:
                return f"the variable {key!r} of the module {module.__name__}"
            inside: list[object] = []
            if type(value) is _CACHE:
                inside = gc.get_referents(value)
            elif type(value) is type:
                inside = list(vars(value).values())
            for each in inside:
                if id(each) in ids:
                    return _name(value, each)
    return None


def _name(holder: Any, value: object) -> str | None:
    """Return the name of a value in its holder, where the holder is one that a person knows."""
    if type(holder) is _CACHE:
        of = f"{holder.__module__}.{holder.__qualname__}"
        return f"the cache of {of} ({holder.__name__}.cache_clear() empties it)"
    if isinstance(holder, types.CellType | types.FunctionType):
        return _in_function(holder, value)
    if not isinstance(holder, dict):
        return _in_object(holder, value)
    if isinstance(holder.get("__name__"), str) and "__builtins__" in holder:
        return f"the variable {_key(holder, value)} of the module {holder['__name__']}"
    for owner in gc.get_referrers(holder):
        name = None if isinstance(owner, types.FrameType | dict) else _in_object(owner, value)
        if name is not None:
            return name
    return None


def _in_object(owner: Any, value: object) -> str | None:
    kind = type(owner)
    if isinstance(owner, types.ModuleType):
        return None
    if isinstance(owner, type):
        key = _key(dict(vars(owner)), value)
        return None if key is None else f"the attribute {key} of the class {owner.__qualname__}"
    slots = [name for base in kind.__mro__ for name in _slots(base)]
    attributes = getattr(owner, "__dict__", {})
    if not isinstance(attributes, dict):
        return None
    found = {**attributes, **{name: getattr(owner, name, None) for name in slots}}
    key = _key(found, value)
    return None if key is None else f"the attribute {key} of a {kind.__qualname__}"


def _slots(kind: type) -> tuple[str, ...]:
    slots = vars(kind).get("__slots__", ())
    return (slots,) if isinstance(slots, str) else tuple(slots)


def _key(own: dict[Any, Any], value: object) -> str | None:
    return next((repr(key) for key, each in list(own.items()) if each is value), None)


def _in_function(holder: Any, value: object) -> str | None:
    if isinstance(holder, types.FunctionType):
        return f"the defaults of {holder.__qualname__}" if value is holder.__defaults__ else None
    for cells in gc.get_referrers(holder):
        for function in gc.get_referrers(cells) if isinstance(cells, tuple) else ():
            if isinstance(function, types.FunctionType) and cells == function.__closure__:
                name = function.__code__.co_freevars[cells.index(holder)]
                return f"the variable {name!r} of {function.__qualname__}"
    return None
