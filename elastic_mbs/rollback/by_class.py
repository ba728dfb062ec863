"""Answers that depend on a class alone, kept as long as the class lives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar
from weakref import ReferenceType, ref

T = TypeVar("T")
_UNKNOWN: Any = object()


class ByClass(Generic[T]):
    """A function of a class that remembers its answers, and keeps no class alive.

    A class that is defined inside a function can reach the model, because its methods are closures.
    """

    def __init__(self, function: Callable[[Any], T]) -> None:
        """Decorate a function whose answers do not refer to the class."""
        self._function = function
        # not a WeakKeyDictionary, whose lookup is one more function of Python's
        self._known: dict[ReferenceType[Any], T] = {}

    def __call__(self, kind: Any) -> T:
        """Return the answer for a class."""
        found: T = self._known.get(ref(kind), _UNKNOWN)
        if found is _UNKNOWN:
            found = self._known[ref(kind, self._forget)] = self._function(kind)
        return found

    def clear(self) -> None:
        """Forget all answers."""
        self._known.clear()

    def _forget(self, gone: ReferenceType[Any]) -> None:
        self._known.pop(gone, None)
