"""Every tensor of what a step function gave, wherever in it: a tensor that stays as it is keeps its graph, and with it the piece's activations.

Batches are refused where a type is not known (`elastic_mbs.containers`). Outputs are not: models return objects of their own with tensors somewhere
in their attributes, such as the cache of keys and values that a decoder hands out in training, too.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterator
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from torch.utils.data import DataLoader, Dataset

from elastic_mbs.containers import Role, kind_of, map_tensors, roles_in
from elastic_mbs.errors import BatchError

_CLOSED = (
    nn.Module,
    torch.optim.Optimizer,
    Dataset,
    DataLoader,
    torch.Generator,
    type,
    FunctionType,
    BuiltinFunctionType,
    MethodType,
    ModuleType,
)
"""What is no output, whatever refers to it: its tensors stay what and where they are."""

_PLAIN = frozenset({Role.SCALAR, Role.ARRAY})


def map_everywhere(value: Any, fn: Callable[[Tensor], Tensor]) -> Any:
    """`map_tensors`, and into the attributes of objects, however deep.

    Args:
        value: what a step function returned.
        fn: tensor → tensor; called once for each.

    Returns:
        The same with each tensor replaced, in new containers and shallow copies of the objects around it. What holds no tensor, what cannot be
        copied, modules, optimizers and datasets are handed on as they are.
    """
    kind = kind_of(type(value))
    if kind.role is Role.TENSOR:
        return fn(value)
    if kind.role in _PLAIN:
        return value
    return _Mapping(fn).of(value)


class _Mapping:
    """One walk. An object that is met again, in a cycle too, is the copy that was made of it."""

    def __init__(self, fn: Callable[[Tensor], Tensor]) -> None:
        self._fn = fn
        self._made: dict[int, Any] = {}
        self._met: list[Any] = []  # keeps what the ids belong to

    def of(self, value: Any) -> Any:
        kind = kind_of(type(value))
        if kind.role in _PLAIN:
            return value
        if id(value) in self._made:
            return self._made[id(value)]
        if kind.role is Role.TENSOR or kind.splitter is not None:
            return self._note(value, map_tensors(value, self._fn))
        if isinstance(value, PackedSequence):
            return self._note(value, type(value)(*map(self.of, value)))
        if kind.role in (Role.LIST, Role.FIELDS):
            keys, values = kind.take(value)
            if roles_in(values) <= _PLAIN:
                return value
            mapped = [self.of(each) for each in values]
            same = all(new is old for new, old in zip(mapped, values, strict=True))
            return self._note(value, value if same else kind.put(value, keys, mapped))
        if isinstance(value, deque):
            return self._note(value, type(value)(map(self.of, value), value.maxlen))
        if isinstance(value, _CLOSED) or not _holds_tensor(value):
            return value
        return self._object(value)

    def _object(self, value: Any) -> Any:
        try:
            new = copy.copy(value)
        except MemoryError:
            raise
        except Exception:  # it says that it is not to be copied, in whatever way
            return value
        self._note(value, new)
        if new is value:
            return value
        for name, old in _attributes(value):
            try:
                mapped = self.of(old)
            except BatchError:  # a container that cannot be made anew: what is in it stays
                continue
            if mapped is not old:
                object.__setattr__(new, name, mapped)
        return new

    def _note(self, value: Any, new: Any) -> Any:
        self._met.append(value)
        self._made[id(value)] = new
        return new


def _attributes(value: Any) -> Iterator[tuple[str, Any]]:
    """Names and values of what an object holds itself, in its dict and in its slots."""
    yield from list(getattr(value, "__dict__", {}).items())
    for base in type(value).__mro__:
        slots = vars(base).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name not in ("__dict__", "__weakref__") and hasattr(value, name):
                yield name, getattr(value, name)


def _holds_tensor(value: Any) -> bool:
    """Whether a tensor is to be reached from an object by what is walked."""
    seen: set[int] = set()
    todo = [value]
    while todo:
        each = todo.pop()
        kind = kind_of(type(each))
        if kind.role is Role.TENSOR or kind.splitter is not None or isinstance(each, PackedSequence):
            return True
        if kind.role in _PLAIN or id(each) in seen or isinstance(each, _CLOSED):
            continue
        seen.add(id(each))
        if kind.role in (Role.LIST, Role.FIELDS):
            todo.extend(kind.take(each)[1])
        elif isinstance(each, deque):
            todo.extend(each)
        else:
            todo.extend(held for _, held in _attributes(each))
    return False
