"""Every tensor of what a step function gave, wherever in it: a tensor that stays as it is keeps its graph, and with it the piece's activations.

Batches are refused where a type is not known (`batch.containers`). Outputs are not: models return objects of their own with tensors somewhere
in their attributes, such as the cache of keys and values that a decoder hands out in training, too.
"""

from __future__ import annotations

import copy
import functools
from collections import deque
from collections.abc import Callable
from types import BuiltinFunctionType, FunctionType, MemberDescriptorType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from torch.utils.data import DataLoader, Dataset

from elastic_mbs.batch.containers import Kind, Role, kind_of, map_tensors, roles_in
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
        copied or has a finaliser, which would run for the copy as well, modules, optimizers and datasets are handed on as they are.
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
        self._open: set[int] = set()  # containers that are being walked
        self._bare: dict[int, Any] = {}  # what no tensor is to be reached from: walked once, whoever refers to it

    def of(self, value: Any) -> Any:
        cls = type(value)  # what `isinstance` asks beside it, `__class__`, is another's where the value is a proxy
        kind = kind_of(cls)
        if kind.role in _PLAIN:
            return value
        if id(value) in self._made:
            return self._made[id(value)]
        if kind.role is Role.TENSOR or kind.splitter is not None:
            return self._note(value, map_tensors(value, self._fn))
        if id(value) in self._open:
            return value  # a container inside itself
        if issubclass(cls, PackedSequence):
            return self._note(value, cls(*map(self.of, value)))
        if kind.role in (Role.LIST, Role.FIELDS) or issubclass(cls, deque):
            self._open.add(id(value))
            try:
                return self._note(value, self._container(value, kind))
            finally:
                self._open.discard(id(value))
        if issubclass(cls, _CLOSED) or hasattr(cls, "__del__") or not self._holds_tensor(value):
            return value
        return self._object(value)

    def _container(self, value: Any, kind: Kind) -> Any:
        if issubclass(type(value), deque):
            mapped = list(map(self.of, value))
            if all(new is old for new, old in zip(mapped, value, strict=True)):
                return value
            made = copy.copy(value)
            made.clear()
            made.extend(mapped)
            return made
        keys, values = kind.take(value)
        own = _own_dict(value)
        if not own and roles_in(values) <= _PLAIN:
            return value
        mapped = [self.of(each) for each in values]
        same = all(new is old for new, old in zip(mapped, values, strict=True))
        made = value if same else kind.put(value, keys, mapped)
        if own:  # attributes beside the items, which a shallow copy has, too
            changed = {name: new for name, old in list(own.items()) if (new := self._within(old)) is not old}
            present = _own_dict(made)
            changed = {name: new for name, new in changed.items() if present.get(name) is own[name]}
            if changed and same:
                made = self._again(value, kind)
            if changed and (present := _own_dict(made)) is not own:
                present.update(changed)
        return made

    @staticmethod
    def _again(value: Any, kind: Kind) -> Any:
        """The same container anew, or itself where it cannot be made."""
        try:
            return kind.put(value, *kind.take(value))
        except BatchError:
            return value

    def _object(self, value: Any) -> Any:
        try:
            new = copy.copy(value)
        except MemoryError:
            raise
        except Exception:  # it says that it is not to be copied, in whatever way
            return value
        own, copied = _own_dict(value), _own_dict(new)
        if own and copied is own:
            new = value  # to write to it would be to write to the original
        self._note(value, new)
        if new is value:
            return value
        for name, old in list(own.items()):
            mapped = self._within(old)
            if mapped is not old and name in copied:
                copied[name] = mapped  # and not by `setattr`: there may be a property of that name
        for slot, old in _slots(value) if type(new) is type(value) else ():
            mapped = self._within(old)
            if mapped is not old:
                slot.__set__(new, mapped)
        return new

    def _within(self, held: Any) -> Any:
        """What an object holds, mapped; as it is where it cannot be made anew, or lies too deep."""
        try:
            return self.of(held)
        except (BatchError, RecursionError):
            return held

    def _note(self, value: Any, new: Any) -> Any:
        self._met.append(value)
        self._made[id(value)] = new
        return new

    def _holds_tensor(self, value: Any) -> bool:
        """Whether a tensor is to be reached from an object by what is walked."""
        seen: dict[int, Any] = {}
        todo = [value]
        while todo:
            each = todo.pop()
            cls = type(each)
            kind = kind_of(cls)
            if kind.role is Role.TENSOR or kind.splitter is not None or issubclass(cls, PackedSequence):
                return True
            if kind.role in _PLAIN or id(each) in seen or id(each) in self._bare or issubclass(cls, _CLOSED):
                continue
            seen[id(each)] = each
            held = [*_own_dict(each).values(), *(part for _, part in _slots(each))]
            if kind.role in (Role.LIST, Role.FIELDS):
                held += kind.take(each)[1]
            elif issubclass(cls, deque):
                held += each
            if not roles_in(held) <= _PLAIN:
                todo += held
        self._bare |= seen
        return False


def _own_dict(value: Any) -> dict[str, Any]:
    """The dict of an object's attributes, past what it makes of `__getattr__`; an empty one where it has none."""
    try:
        found = object.__getattribute__(value, "__dict__")
    except Exception:  # a class may have anything of that name
        return {}
    return found if isinstance(found, dict) else {}


@functools.lru_cache(maxsize=1024)
def _slots_of(cls: type) -> tuple[MemberDescriptorType, ...]:
    """The slots of a class and its bases, private ones too, whose names are others than `__slots__` says."""
    return tuple(part for base in cls.__mro__ if "__slots__" in vars(base) for part in vars(base).values() if isinstance(part, MemberDescriptorType))


def _slots(value: Any) -> list[tuple[MemberDescriptorType, Any]]:
    """The slots of an object that are filled, and what is in them."""
    found = []
    cls: Any = type(value)
    for slot in _slots_of(cls):
        try:
            found.append((slot, slot.__get__(value, cls)))
        except AttributeError:  # an empty one
            continue
    return found
