"""Attributes of modules that are no tensors: numbers, flags and strings, and containers."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from enum import Enum
from itertools import repeat
from numbers import Number
from operator import is_
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.nn.utils import parametrize

ABSENT: Any = object()  # hangs where there is nothing
Key = tuple[int, str]

# Values that nothing changes in place. The scalars of numpy are numbers.
PLAIN = (bool, int, float, str, type(None), Number, Enum)
_PLAIN_TYPES = frozenset((bool, int, float, str, type(None), type(ABSENT)))
CONTAINERS = (list, deque, dict, set)
_TORCHS = frozenset(vars(nn.Module()))


class Contents(NamedTuple):
    """A list, deque, set or dict of a module, and what is in it.

    Its items are kept as they are: what changes inside an item is not put back.
    """

    module: nn.Module
    name: str
    container: Any
    items: Any  # a container of the same kind

    @classmethod
    def of(cls, module: nn.Module, name: str) -> Contents:
        """Return the contents as they are now."""
        container = vars(module)[name]
        kind = next(kind for kind in CONTAINERS if isinstance(container, kind))
        return cls(module, name, container, kind(container))

    @property
    def key(self) -> Key:
        """The place, as what is learned of it is kept."""
        return id(vars(self.module)), self.name

    def changed(self) -> bool:
        """Return whether another container hangs there, or other items are in it."""
        now, then = vars(self.module).get(self.name), self.items
        if now is not self.container or len(now) != len(then):
            return True
        if isinstance(then, set):
            return bool(now != then)
        if isinstance(then, dict):
            if list(map(id, now)) != list(map(id, then)):
                return True
            now, then = now.values(), then.values()
        return not all(map(is_, now, then))

    def put_back(self) -> None:
        """Put the container back with its items."""
        if not self.changed():
            return
        vars(self.module)[self.name] = self.container
        self.container.clear()
        put = "extend" if isinstance(self.container, list | deque) else "update"
        getattr(self.container, put)(self.items)


# Of torch's own the mode is the caller's to set. The other says that transformers has put its hooks
# in place. They stay where they are: it would do so again, and take every output twice.
_LEFT = _TORCHS | {"_output_capturing_hooks_installed"}


def _is_plain(name: str, value: Any) -> bool:
    return isinstance(value, PLAIN) and name not in _LEFT


class Numbers(NamedTuple):
    """The numbers, flags and strings of some modules at one moment, as columns.

    A look takes 0.2 µs for each module, so they are kept for each piece: one can raise a flag and
    lower it again, and fail in between.

    Attributes:
        modules: the modules.
        own: the attributes of each module.
        sizes: the number of attributes of each module. Names that come later are at the end.
        owners: the attributes of the module that has each number.
        names: the name of each number.
        values: each number; ABSENT where it is none any more.
    """

    modules: Sequence[nn.Module]
    own: list[dict[str, Any]]
    sizes: list[int]
    owners: list[dict[str, Any]]
    names: list[str]
    values: list[Any]

    @classmethod
    def of(cls, modules: Sequence[nn.Module]) -> Numbers:
        """Return the numbers of these modules as they are now."""
        own = list(map(vars, modules))
        sizes = list(map(len, own))
        found = [(each, *item) for each in own for item in each.items() if _is_plain(*item)]
        owners, names, values = map(list, zip(*found, strict=True)) if found else ([], [], [])
        return cls(modules, own, sizes, owners, names, values)

    def now(self) -> Numbers:
        """Return the numbers of the same modules as they are now; itself where none has changed."""
        if not self.own:
            return self
        if list(map(len, self.own)) != self.sizes:
            return Numbers.of(self.modules)
        values = list(map(dict.get, self.owners, self.names, repeat(ABSENT)))
        if all(map(is_, values, self.values)):
            return self
        if not _PLAIN_TYPES.issuperset(map(type, values)):
            # Features that a module puts in the place of a number must not be kept alive.
            values = [value if isinstance(value, PLAIN) else ABSENT for value in values]
        return self._replace(values=values)

    def changed(self) -> list[nn.Module]:
        """Return the modules with another number, or with a new one."""
        moved = {
            id(owner)
            for owner, name, value in zip(self.owners, self.names, self.values, strict=True)
            if value is not ABSENT and not _is_same(owner.get(name, ABSENT), value)
        }
        return [
            module
            for module, own, size in zip(self.modules, self.own, self.sizes, strict=True)
            if id(own) in moved or _new(own, size)
        ]

    def put_back(self) -> None:
        """Put every number back, and remove new ones."""
        for own, size in zip(self.own, self.sizes, strict=True):
            for name in _new(own, size):
                del own[name]
        for owner, name, value in zip(self.owners, self.names, self.values, strict=True):
            if value is not ABSENT and owner.get(name, ABSENT) is not value:
                owner[name] = value


def _is_same(now: Any, then: Any) -> bool:
    return now is then or (isinstance(now, PLAIN) and now == then)


def _new(own: dict[str, Any], size: int) -> list[str]:
    """Return the names of numbers that were set since there were so many attributes."""
    return [name for name in list(own)[size:] if _is_plain(name, own[name])]


def is_torchs(module: nn.Module) -> bool:
    """Return whether the class of a module is one of torch's own.

    A parametrization (`weight_norm`) gives a module a class that torch makes: the one before it
    counts.
    """
    kind = type(module)
    if kind.__module__ == parametrize.__name__:
        kind = kind.__bases__[0]
    return kind.__module__.startswith("torch.nn.")


def tensors_of(module: nn.Module) -> list[str]:
    """Return the names of attributes that are tensors without a graph."""
    return [
        name
        for name, value in vars(module).items()
        if isinstance(value, Tensor) and not value.requires_grad
    ]


def containers_of(module: nn.Module) -> list[str]:
    """Return the names of the user's own attributes that are containers of items."""
    return [
        name
        for name, value in vars(module).items()
        if isinstance(value, CONTAINERS) and name not in _TORCHS
    ]
