"""How a batch is read: which of its values hold samples, along which dimension, and in which lists.

How a value is read, in this order:

1. what `dims` says of it: a dimension, `whole(...)`, `items(...)` or `fields(...)`;
2. a tensor (or numpy array) with at least one dimension holds one sample per index of dim 0; 0-d tensors, numbers, strings and None pass whole;
3. mappings, tuples, dataclasses and lists that hold a tensor with rows directly (what `default_collate` makes of `(x, y)` samples) are containers of
   fields; a tuple of N texts (what it makes of texts) holds one item per sample, and of another tuple without rows that has length N it must be said;
4. lists of strings, numbers, 0-d tensors or other plain objects hold one item per sample;
5. lists of containers are per-sample items if their length is N, fields if the tensors in them have length N, and an error if both are true.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from elastic_mbs.batch.beside import left_behind
from elastic_mbs.batch.containers import Kind, Path, Role, dotted, kind_of, roles_in, some, suffixes
from elastic_mbs.batch.node import Cut, Node
from elastic_mbs.batch.splitters import Dims, Reading, type_name
from elastic_mbs.errors import BatchError


class _Disagree(Exception):
    """A trial reading does not hold."""


_UNSAID = object()
_CONTAINERS = frozenset({Role.LIST, Role.FIELDS, Role.ARRAY, Role.CUSTOM})


class Plan:
    """Collects the leaves that are cut, and the lists whose reading is still open."""

    def __init__(self, dims: Dims, used: set[str], readings: Mapping[Path, Reading], expect: int | None = None) -> None:
        self.dims = dims
        self.used = used
        self.readings = dict(readings)
        self.expect = expect  # a trial: the first leaf that disagrees ends it (-1: the first leaf says what to expect)
        self.leaves: list[Node] = []
        self.open: list[Node] = []
        self.tuples: list[Node] = []  # without rows: whole, unless one has an item for each sample
        self.root: Node | None = None
        self.top: Path | None = None  # a trial: the list that is tried

    def _said(self, path: Path, inherited: Any) -> Any:
        for name in suffixes(path):
            if name in self.dims:
                self.used.add(name)
                return self.dims[name]
        return inherited

    def _leaf(self, node: Node) -> Node:
        if self.expect is not None:
            if self.expect == -1:
                self.expect = node.size
            if node.size != self.expect:
                raise _Disagree
        self.leaves.append(node)
        return node

    def build(self, value: Any, path: Path = (), inherited: Any = _UNSAID) -> Node:
        """The node of a value; its leaves and open lists are collected.

        Raises:
            BatchError: the type cannot be cut, or `dims` says something of it that cannot be.
        """
        says = self._said(path, inherited) if self.dims else inherited
        kind = kind_of(type(value))
        if says is _UNSAID and type(value) is Tensor and value.layout is torch.strided and value.ndim and not value.is_nested:
            return self._leaf(Node(Cut.NARROW, path, value, kind, 0, value.shape[0]))  # what most of a batch is, without the questions below
        role = kind.role
        if says is None or role is Role.SCALAR:
            return Node(Cut.WHOLE, path, value, kind)
        if role is Role.TENSOR or role is Role.ARRAY:
            return self._tensor(value, path, kind, says)
        if role is Role.FIELDS:
            if says is Reading.ITEMS:
                if type(value) is not tuple:
                    raise BatchError(f"{where(path)} is of type {type_name(type(value))}, and items() is for lists and tuples")
                return self._items(value, path, kind)
            return self._fields(value, path, kind, says)
        if role is Role.LIST:
            return self._list(value, path, kind, says)
        if kind.splitter is not None:
            if isinstance(says, int):
                raise BatchError(f"{where(path)} is of type {type_name(type(value))}: register_splitter says how it is cut, and dim {says} cannot")
            return self._leaf(Node(Cut.CUSTOM, path, value, kind, size=kind.splitter.length(value)))
        raise BatchError(refusal(value, path, kind))

    def _tensor(self, value: Any, path: Path, kind: Kind, says: Any) -> Node:
        is_tensor = kind.role is Role.TENSOR
        if is_tensor and (value.is_nested or value.layout is not torch.strided):
            raise BatchError(unsplittable(value, path))
        ndim = value.ndim
        dim = says if isinstance(says, int) else 0
        if ndim == 0 and not isinstance(says, int):
            return Node(Cut.WHOLE, path, value, kind)
        if not -ndim <= dim < ndim:
            raise BatchError(
                f"{where(path)} has no dim {dim}: its shape is {tuple(value.shape)}\n  dims={{{quoted(path)}: d}} needs {-ndim} ≤ d < {ndim}"
                if ndim
                else f"{where(path)} has no dim {dim}: it is 0-d\n  leave it out of dims (0-d tensors pass whole)"
            )
        dim %= ndim
        return self._leaf(Node(Cut.NARROW if is_tensor else Cut.INDEX, path, value, kind, dim, value.shape[dim]))

    def _fields(self, value: Any, path: Path, kind: Kind, says: Any) -> Node:
        node = Node(Cut.FIELDS, path, value, kind)
        if type(value) is tuple and not self.dims and roles_in(value) == {Role.SCALAR}:
            return self._without_rows(node, says)  # thousands of texts are looked at as one
        node.keys, parts = kind.take(value)
        self._check_left_behind(value, path, parts)
        below = says if isinstance(says, int) else _UNSAID
        found = len(self.leaves) + len(self.open)
        for key, part in zip(node.keys, parts, strict=True):
            before = len(self.leaves) + len(self.open)
            child = self.build(part, (*path, key), below)
            node.children.append(child)
            if key in kind.computed and part is not None and part is not kind.computed[key] and before == len(self.leaves) + len(self.open):
                self._check_computed(child, value)
        if found == len(self.leaves) + len(self.open):
            if type(value) is tuple:
                return self._without_rows(node, says)
            if says is Reading.FIELDS:
                for child in node.children:
                    self._is_items(child, child in self.tuples and _texts(child.value))
        if isinstance(value, tuple) and all(child.cut is Cut.WHOLE for child in node.children):
            node.cut = Cut.WHOLE
        return node

    def _is_items(self, node: Node, holds: bool = True) -> None:
        if holds:
            node.cut, node.size = Cut.ITEMS, len(node.value)
            self._leaf(node)

    def _without_rows(self, node: Node, says: Any) -> Node:
        """A tuple of numbers or texts: whole, unless it has an item for each sample."""
        if all(child.cut is Cut.WHOLE for child in node.children):
            node.cut = Cut.WHOLE
        field = self.expect is not None and node.path and node.path[:-1] == self.top and _texts(node.value)  # as default_collate makes it of texts
        if (field and says is _UNSAID) or (says in (0, -1) and self._said(node.path, None) == says):
            self._is_items(node)
        elif says is _UNSAID and any(part is not None for part in node.value):
            self.tuples.append(node)
        return node

    def _check_left_behind(self, value: Any, path: Path, parts: Sequence[Any]) -> None:
        for name in left_behind(value, parts):
            if self._said((*path, name), _UNSAID) is not None:
                raise BatchError(
                    f"{where((*path, name))} is an attribute beside the parts of {type_name(type(value))}: every piece would have the whole batch's\n"
                    f"  if that is right: {call('whole', (*path, name))}\n"
                    f"  if not: make it a part, or register_splitter({type(value).__qualname__}, length=..., slice=...)"
                )

    def _check_computed(self, node: Node, owner: Any) -> None:
        """A field that the constructor computes from others (a length, say) would be the whole batch's in every piece: somebody must say so."""
        if not self.dims or self._said(node.path, _UNSAID) is _UNSAID:
            name = type(owner).__qualname__
            raise BatchError(
                f"{where(node.path)} is computed by {type_name(type(owner))} (init=False) and would be the whole batch's in every piece\n"
                f"  if that is right: {call('whole', node.path)}\n  if not: register_splitter({name}, length=..., slice=...)"
            )

    def _list(self, value: Any, path: Path, kind: Kind, says: Any) -> Node:
        roles = roles_in(value)
        if says is not Reading.ITEMS:
            with_rows = Role.TENSOR in roles and (says is not _UNSAID or _has_rows(value, roles))
            if says is Reading.FIELDS or with_rows or (isinstance(says, int) and roles & _CONTAINERS):
                return self._fields(value, path, kind, says)
            if roles & _CONTAINERS:
                if (known := self.readings.get(path)) is not None:
                    return self._items(value, path, kind) if known is Reading.ITEMS else self._fields(value, path, kind, says)
                node = Node(Cut.OPEN, path, value, kind, size=len(value))
                self.open.append(node)
                return node
            if isinstance(says, int) and says not in (0, -1):
                raise BatchError(f"{where(path)} has no dim {says}: it is a list of {len(value)} items")
        return self._items(value, path, kind)

    def _items(self, value: Any, path: Path, kind: Kind) -> Node:
        self._check_left_behind(value, path, ())
        return self._leaf(Node(Cut.ITEMS, path, value, kind, size=len(value)))

    def _trial(self, node: Node, expect: int) -> Plan | None:
        """The fields reading of an open list, if every leaf in it has the length expected and there is one; -1: any common length."""
        plan = Plan(self.dims, self.used, self.readings, expect)
        plan.top = node.path
        try:
            plan.root = plan._fields(node.value, node.path, node.kind, _UNSAID)
            plan.settle(plan.expect)
        except _Disagree:
            return None
        return plan if plan.leaves else None

    def settle(self, length: int | None) -> None:
        """Decides the open lists, now that the batch's length is known (-1: these lists are all there is)."""
        for node in self.open:
            if length in (-1, node.size):
                # Of a batch of one sample both readings give the same, only, piece.
                if length not in (-1, 1) and self._holds_as_fields(node, node.size):
                    raise BatchError(two_readings(node))
                if length != 1:
                    self.readings[node.path] = Reading.ITEMS
                node.cut = Cut.ITEMS
                self._leaf(node)
            elif length is not None and (plan := self._trial(node, length)) is not None and plan.root is not None:
                node.cut, node.keys, node.children = plan.root.cut, plan.root.keys, plan.root.children
                self.leaves.extend(plan.leaves)
                self.tuples.extend(plan.tuples)
                self.readings |= plan.readings | {node.path: Reading.FIELDS}
            else:
                node.cut = Cut.ITEMS  # neither reading holds, or the rest disagrees already: the error will show it
                self._leaf(node)

    def settle_tuples(self, length: int) -> None:
        """Decides the tuples without rows. One whose length once was another than the batch's stays whole, so that no batch can meet it by chance.

        Raises:
            BatchError: one is as long as the batch, and whether it holds the samples' items is not known.
        """
        for node in sorted((each for each in self.tuples if each.cut is not Cut.ITEMS), key=lambda each: len(each.path)):
            known = self.readings.get(node.path)
            if len(node.value) != length and known is not Reading.ITEMS:
                self.readings[node.path] = Reading.FIELDS
            elif length > 1 and known is not Reading.FIELDS and not self._said_below(node):
                if known is None and not _texts(node.value):
                    raise BatchError(with_or_without(node))
                self.readings[node.path] = Reading.ITEMS
                self._is_items(node)

    def _said_below(self, node: Node) -> bool:
        return bool(self.dims) and any(self._said(child.path, _UNSAID) is not _UNSAID or self._said_below(child) for child in node.children)

    def _holds_as_fields(self, node: Node, length: int) -> Plan | None:
        try:
            return self._trial(node, length)
        except BatchError:
            return None

    def doubt(self) -> str | None:
        """A sentence when an open list that is taken as items could be fields as well."""
        for node in self.open:
            plan = self._holds_as_fields(node, -1) if node.size > 1 else None
            if plan is not None and plan.leaves[0].size > 1:
                return (
                    f"{where(node.path)} is taken as {node.size} items, one per sample; it could also be {node.size} fields of "
                    f"{plan.leaves[0].size} samples each: say {call('items', node.path)} or {call('fields', node.path)}"
                )
        return None


def _texts(value: tuple[Any, ...]) -> bool:
    return all(isinstance(part, str | bytes) for part in value)


def _has_rows(value: Any, roles: set[Role]) -> bool:
    """Whether a list that holds tensors has more in it than 0-d ones and numbers, which would be one item per sample."""
    return not roles <= {Role.TENSOR, Role.SCALAR} or any(isinstance(part, Tensor) and part.ndim > 0 for part in value)


def where(path: Path) -> str:
    """A value of the batch in an error's text."""
    return quoted(path) if path else "the batch"


def quoted(path: Path) -> str:
    """A path in double quotes, to paste."""
    return f'"{dotted(path)}"'


def call(helper: str, path: Path) -> str:
    """The argument to paste."""
    return f"dims={helper}({quoted(path) if path else ''})"


def line(leaf: Node) -> str:
    """One line on a leaf: its path, its shape, and what it is cut on."""
    if leaf.cut in (Cut.NARROW, Cut.INDEX):
        return f"{where(leaf.path)}: shape {tuple(leaf.value.shape)}, {leaf.size} on dim {leaf.dim}"
    unit = "samples" if leaf.cut is Cut.CUSTOM else "items"
    return f"{where(leaf.path)}: {type_name(type(leaf.value))} of {leaf.size} {unit}"


def refusal(value: Any, path: Path, kind: Kind) -> str:
    """Why a type is refused, and the ways out."""
    name = type(value).__qualname__
    first = f"{where(path)} is of type {type_name(type(value))}, which cannot be cut into samples"
    if kind.why:
        return f"{first}\n  {kind.why}"
    also = f"\n  or, if every piece needs all of it: {call('whole', path)}" if path else ""
    return f"{first}\n  say how: register_splitter({name}, length=..., slice=...){also}"


def unsplittable(value: Tensor, path: Path) -> str:
    """Why a nested or sparse tensor is refused, and the ways out."""
    what = "nested" if value.is_nested else str(value.layout).removeprefix("torch.")
    why = "its rows are no views of one block of memory" if value.is_nested else "a range of its rows would be a copy with indices of its own"
    whole_hint = f"\n  if every piece needs all of it: {call('whole', path)}" if path else ""
    return (
        f"{where(path)} is a {what} tensor, which cannot be cut on dim 0 without a copy ({why})\n"
        f"  make it dense or padded, or put it in a class of yours and register_splitter(ThatClass, length=..., slice=...){whole_hint}"
    )


def two_readings(node: Node) -> str:
    """Both readings of a list, and how to choose."""
    return (
        f"{where(node.path)} can be read in two ways: as {node.size} items, one per sample, or as {node.size} fields of {node.size} samples each\n"
        f"  one item per sample: {call('items', node.path)}\n  fields: {call('fields', node.path)}"
    )


def with_or_without(node: Node) -> str:
    """A tuple that may be one item per sample or the same for all of them, and how to choose."""
    return (
        f"{where(node.path)} is a tuple of {len(node.value)}, as many as the batch has samples, with nothing in it that has rows: "
        f"is it one item per sample?\n  if so: {call('items', node.path)}\n  if every piece needs all of it: {call('whole', node.path)}"
    )


def transposed(root: Node, length: int) -> str | None:
    """A sentence when all fields of a batch are lists or tuples of one length that is not the batch's: `zip(*samples)`, taken as something else."""
    if root.cut is not Cut.FIELDS or len(root.children) < 2 or any(type(child.value) not in (list, tuple) for child in root.children):
        return None
    lengths = {len(child.value) for child in root.children}
    n = lengths.pop()
    if lengths or n in (1, length):
        return None
    ways = [f"{helper}({', '.join(quoted(child.path) for child in root.children)})" for helper in ("items", "fields")]
    return (
        f"the batch is taken as {length} samples, by the shape of what is inside its parts, which have {n} entries each; if it is {n} samples "
        f"(zip(*samples)), say dims={ways[0]}; if not, dims={ways[1]}"
    )


def nothing_to_cut(batch: Any) -> str:
    """Why there are no samples."""
    return (
        f"there is nothing to cut in the batch (type {type_name(type(batch))}): no tensor with a dimension and no list of samples\n"
        f"  every part of it passes whole"
    )


def disagreement(batch: Any, leaves: list[Node], unused: tuple[str, ...]) -> str:
    """Names each leaf, its shape, and the line to add."""
    common, groups = _common_length(leaves)
    hints = []
    for path, group in groups.items():
        odd = [leaf for leaf in group if leaf.size != common]
        if odd and len(group) == common and len(group) > 1:
            hints.append(call("items", path))
        else:
            hints.extend(_hint(leaf, common) for leaf in odd)
    if isinstance(batch, list | tuple) and len(leaves) == len(batch) > 1 and all(isinstance(each, Tensor) for each in batch):
        hints.append(f"{call('items', ())} (if the batch is {len(batch)} samples)")
    shown = [f"  {line(leaf)}" for leaf in leaves[:12]] + ([f"  … and {len(leaves) - 12} more"] if len(leaves) > 12 else [])
    sizes = " and ".join(map(str, sorted({leaf.size for leaf in leaves})[:4]))
    missing = f"\n  dims names {some(list(unused))}, which the batch does not have" if unused else ""
    return "\n".join([f"the parts of the batch disagree on its length: {sizes}", *shown, f"  say which is right: {'; '.join(hints[:6])}"]) + missing


def _common_length(leaves: list[Node]) -> tuple[int, dict[Path, list[Node]]]:
    """The length that the batch most likely has, and the leaves by the list that they are in."""
    groups: dict[Path, list[Node]] = {}
    for leaf in leaves:
        in_list = len(leaf.path) > 1 and isinstance(leaf.path[-1], int) and leaf.cut is Cut.NARROW
        groups.setdefault(leaf.path[:-1] if in_list else leaf.path, []).append(leaf)
    # 256 images in a list must not outvote the labels beside it.
    single = [group[0] for group in groups.values() if len(group) == 1]
    votes = Counter(leaf.size for leaf in single or leaves)

    fewest = min((leaf.value.ndim for leaf in leaves if leaf.cut in (Cut.NARROW, Cut.INDEX)), default=0)

    def standing(size: int) -> tuple[int, int, bool]:
        # A leaf with more dimensions than others, one of them this long, probably has something else in front: positions of shape (3, N, L).
        fronted = sum(_other_dim(leaf, size) is not None and leaf.value.ndim > fewest for leaf in leaves if leaf.size != size)
        return votes[size], fronted, size != 1  # what has length 1 is usually there to be broadcast

    return max(votes, key=standing), groups


def _other_dim(leaf: Node, size: int) -> int | None:
    if leaf.cut not in (Cut.NARROW, Cut.INDEX) or size not in tuple(leaf.value.shape):
        return None
    return tuple(leaf.value.shape).index(size)


def _hint(leaf: Node, common: int) -> str:
    dim = _other_dim(leaf, common)
    return call("whole", leaf.path) if dim is None else f"dims={{{quoted(leaf.path)}: {dim}}}"
