"""One value of a batch and how it is cut."""

from __future__ import annotations

from enum import Enum, auto
from typing import Any

from elastic_mbs.batch.beside import cut_beside
from elastic_mbs.batch.containers import Kind, Path, Role, fresh, roles_in


class Cut(Enum):
    """How a node of the plan is cut."""

    NARROW = auto()
    WHOLE = auto()
    FIELDS = auto()
    ITEMS = auto()
    INDEX = auto()  # numpy
    CUSTOM = auto()
    OPEN = auto()  # a list of containers: decided when N is known


class Node:
    """One value of the batch and how it is cut."""

    __slots__ = ("children", "cut", "dim", "keys", "kind", "path", "size", "value")

    def __init__(self, cut: Cut, path: Path, value: Any, kind: Kind, dim: int = 0, size: int = -1) -> None:
        self.cut = cut
        self.path = path
        self.value = value
        self.kind = kind
        self.dim = dim
        self.size = size
        self.keys: list[Any] = []
        self.children: list[Node] = []

    def piece(self, start: int, stop: int) -> Any:
        """Samples `start` to `stop` of this value."""
        cut = self.cut
        if cut is Cut.NARROW:
            return self.value.narrow(self.dim, start, stop - start)
        if cut is Cut.FIELDS:
            length = stop - start
            parts = [
                child.value.narrow(child.dim, start, length) if child.cut is Cut.NARROW else child.piece(start, stop)  # a frame less for most
                for child in self.children
            ]
            made = self.kind.put(self.value, self.keys, parts)
            return cut_beside(self.value, made, {child.size for child in self.children}, start, stop) if self.kind.beside else made
        if cut is Cut.WHOLE:
            return self.value
        if cut is Cut.ITEMS:
            part = self.value[start:stop]
            # New containers: a pop from an item must not reach a replay.
            renewed = [fresh(item) for item in part] if roles_in(part) & _RENEWED else part
            return self.kind.put(self.value, list(range(len(part))), renewed)
        if cut is Cut.INDEX:
            # A copy: an array has no version that would tell of an edit in place.
            return self.value[(*(slice(None),) * self.dim, slice(start, stop))].copy()
        assert self.kind.splitter is not None
        return self.kind.splitter.cut(self.value, start, stop)


_RENEWED = frozenset({Role.LIST, Role.FIELDS})
