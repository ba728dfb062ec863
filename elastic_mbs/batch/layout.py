"""How a batch is read: which of its values hold samples, along which dimension, and in which lists.

In this order:

1. what `dims` says: a dimension, `whole(...)`, `items(...)` or `fields(...)`;
2. a tensor (or numpy array) with at least one dimension holds one sample per index of dim 0; 0-d tensors, numbers, strings and None pass whole;
3. mappings, tuples, dataclasses and lists that hold a tensor with rows directly (as `default_collate` makes of `(x, y)` samples) hold fields;
4. lists and tuples of texts, and lists of numbers, 0-d tensors or other plain objects, hold one item per sample;
5. lists of containers are per-sample items if their length is N, fields if the tensors in them have length N, and an error if both are true;
6. where neither types nor shapes decide, a BatchError names the value and the line to add: nothing is guessed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

import torch
from torch import Tensor

from elastic_mbs.batch.containers import Kind, Path, Role, attributes_with_rows, dotted, fresh, kind_of, roles_in, some, suffixes, to_register
from elastic_mbs.batch.splitters import Dims, ListLayout, type_name
from elastic_mbs.errors import BatchError


class Cut(Enum):
    """How a value is cut."""

    NARROW = auto()
    COPY = auto()  # numpy: an array has no version that would show an edit in place
    ITEMS = auto()
    FIELDS = auto()
    CUSTOM = auto()
    WHOLE = auto()
    OPEN = auto()  # a list of containers: decided when N is known


@dataclass(slots=True, eq=False)
class Node:
    """One value of the batch and how it is cut."""

    cut: Cut
    path: Path
    value: Any
    kind: Kind
    dim: int = 0
    size: int = -1  # samples; of Cut.OPEN items
    keys: list[Any] = field(default_factory=list)
    children: list[Node] = field(default_factory=list)

    def piece(self, start: int, stop: int) -> Any:
        cut, value = self.cut, self.value
        if cut is Cut.NARROW:
            return value.narrow(self.dim, start, stop - start)
        if cut is Cut.FIELDS:
            length = stop - start
            parts = [
                child.value.narrow(child.dim, start, length) if child.cut is Cut.NARROW else child.piece(start, stop)  # a frame less for most
                for child in self.children
            ]
            return self.kind.put(value, self.keys, parts)
        if cut is Cut.ITEMS:
            items = value[start:stop]
            if roles_in(items) & {Role.LIST, Role.FIELDS}:
                items = [fresh(item) for item in items]  # a pop from an item must not reach a replay
            return self.kind.put(value, list(range(len(items))), list(items))
        if cut is Cut.COPY:
            return value[(*(slice(None),) * self.dim, slice(start, stop))].copy()
        return self.kind.splitter.cut(value, start, stop) if self.kind.splitter is not None and cut is Cut.CUSTOM else value

    def ends(self) -> list[Node]:
        """The nodes below that have no parts, in order; itself where it has none."""
        return [end for child in self.children for end in child.ends()] if self.children else [self]


_NOT_GIVEN = object()
_CONTAINERS = frozenset({Role.LIST, Role.FIELDS, Role.ARRAY, Role.CUSTOM})
_MANY = 7  # tensors of one shape in a list that are still taken as fields: ids, masks and labels of a text are some, a picture's crops more


class Layout:
    """Reads one batch into a tree of nodes."""

    def __init__(self, dims: Dims, known: dict[Path, ListLayout], used: set[str]) -> None:
        self.dims = dims
        self.known = known  # how lists of containers were read in this batch and earlier ones
        self.used = used  # keys of dims that were found
        self.leaves: list[Node] = []  # what is cut
        self.open: list[tuple[Node, Layout | None]] = []  # lists of containers, each with its layout as fields
        self.unclear: list[Node] = []  # tuples without rows: items, or the same for all samples
        self.root: Node | None = None

    def given(self, path: Path, inherited: Any = _NOT_GIVEN) -> Any:
        for name in suffixes(path):
            if name in self.dims:
                self.used.add(name)
                return self.dims[name]
        return inherited

    def _leaf(self, node: Node) -> Node:
        self.leaves.append(node)
        return node

    def read(self, value: Any, path: Path = (), inherited: Any = _NOT_GIVEN) -> Node:
        """The node of a value; its leaves and open lists are collected."""
        given = self.given(path, inherited) if self.dims else inherited
        kind = kind_of(type(value))
        if given is _NOT_GIVEN and type(value) is Tensor and value.layout is torch.strided and value.ndim and not value.is_nested:
            return self._leaf(Node(Cut.NARROW, path, value, kind, 0, value.shape[0]))  # most of a batch, without the questions below
        role = kind.role
        if given is None or role is Role.SCALAR:
            return Node(Cut.WHOLE, path, value, kind)
        if role is Role.TENSOR or role is Role.ARRAY:
            return self._tensor(value, path, kind, given)
        if role is Role.FIELDS:
            items = given is ListLayout.ITEMS or (given is not ListLayout.FIELDS and _is_texts(value))
            return self._items(value, path, kind, given) if items else self._fields(value, path, kind, given)
        if role is Role.LIST:
            return self._list(value, path, kind, given)
        if kind.splitter is not None:
            if isinstance(given, int):
                raise BatchError(f"{where(path)} is of type {type_name(type(value))}: register_splitter says how it is cut, and dim {given} cannot")
            return self._leaf(Node(Cut.CUSTOM, path, value, kind, size=kind.splitter.length(value)))
        raise BatchError(_refusal(value, path, kind))

    def _tensor(self, value: Any, path: Path, kind: Kind, given: Any) -> Node:
        is_tensor = kind.role is Role.TENSOR
        if is_tensor and (value.layout is not torch.strided or value.is_nested):
            raise BatchError(_not_dense(value, path))
        ndim = value.ndim
        dim = given if isinstance(given, int) else 0
        if ndim == 0 and not isinstance(given, int):
            return Node(Cut.WHOLE, path, value, kind)
        if not -ndim <= dim < ndim:
            raise BatchError(
                f"{where(path)} has no dim {dim}: its shape is {tuple(value.shape)}\n  dims={{{quoted(path)}: d}} needs {-ndim} ≤ d < {ndim}"
                if ndim
                else f"{where(path)} has no dim {dim}: it is 0-d\n  leave it out of dims (0-d tensors pass whole)"
            )
        dim %= ndim
        return self._leaf(Node(Cut.NARROW if is_tensor else Cut.COPY, path, value, kind, dim, value.shape[dim]))

    def _fields(self, value: Any, path: Path, kind: Kind, given: Any) -> Node:
        node = Node(Cut.FIELDS, path, value, kind)
        node.keys, parts = kind.take(value)
        if hasattr(value, "__dict__"):
            self._check_attributes(value, path, parts)
        inherited = given if isinstance(given, int) else _NOT_GIVEN
        cut = len(self.leaves) + len(self.open)
        for key, part in zip(node.keys, parts, strict=True):
            before = len(self.leaves) + len(self.open)
            child = self.read(part, (*path, key), inherited)
            node.children.append(child)
            if key in kind.computed and part is not None and part is not kind.computed[key] and before == len(self.leaves) + len(self.open):
                self._check_whole(child.path, f"is computed by {type_name(type(value))} (init=False)", value)
        if isinstance(value, tuple) and cut == len(self.leaves) + len(self.open):
            if all(child.cut is Cut.WHOLE for child in node.children):
                node.cut = Cut.WHOLE
            if type(value) is tuple and given in (0, -1) and self.given(path) == given:
                return self._items(value, path, kind, given)
            if type(value) is tuple and given is _NOT_GIVEN and any(end.value is not None for child in node.children for end in child.ends()):
                self.unclear.append(node)
        return node

    def _list(self, value: Any, path: Path, kind: Kind, given: Any) -> Node:
        roles = roles_in(value)
        with_rows = Role.TENSOR in roles and (given is not _NOT_GIVEN or _has_rows(value, roles))
        if given is ListLayout.ITEMS:
            return self._items(value, path, kind, given)
        if given is ListLayout.FIELDS or with_rows or (isinstance(given, int) and roles & _CONTAINERS):
            return self._fields(value, path, kind, given)
        known = self.known.get(path)
        if not roles & _CONTAINERS or known is ListLayout.ITEMS:
            return self._items(value, path, kind, given)
        if known is ListLayout.FIELDS:
            return self._fields(value, path, kind, given)
        node = Node(Cut.OPEN, path, value, kind, size=len(value))
        self.open.append((node, self._as_fields(node)))
        return node

    def _as_fields(self, node: Node) -> Layout | None:
        layout = Layout(self.dims, self.known, self.used)
        try:
            layout.root = layout._fields(node.value, node.path, node.kind, _NOT_GIVEN)
        except BatchError:
            return None
        return layout

    def _items(self, value: Any, path: Path, kind: Kind, given: Any) -> Node:
        if kind.role is not Role.LIST and type(value) is not tuple:
            raise BatchError(f"{where(path)} is of type {type_name(type(value))}, and items() is for lists and tuples")
        if isinstance(given, int) and given not in (0, -1):
            raise BatchError(f"{where(path)} has no dim {given}: it is a {type(value).__name__} of {len(value)} items")
        self._check_attributes(value, path, ())
        return self._leaf(Node(Cut.ITEMS, path, value, kind, size=len(value)))

    def _check_attributes(self, value: Any, path: Path, parts: Sequence[Any]) -> None:
        for name in attributes_with_rows(value, parts):
            self._check_whole((*path, name), f"is an attribute next to the parts of {type_name(type(value))}", value)

    def _check_whole(self, path: Path, what: str, owner: Any) -> None:
        """Every piece would get the whole batch's: `dims` must say that this is right."""
        if self.given(path) is not None:
            remedy = f"if that is right: {argument('whole', path)}\n  if not: make it a part, or {to_register(type(owner))}"
            raise BatchError(f"{where(path)} {what}: every piece would get the whole batch's\n  {remedy}")

    def lengths(self) -> set[int]:
        """The lengths that the batch can have, with the open lists read either way."""
        choices = [{node.size, *(fields.lengths() if fields is not None else ())} for node, fields in self.open]
        sizes = {leaf.size for leaf in self.leaves}
        if len(sizes) > 1 or not (sizes or choices):
            return set()
        return set.intersection(*choices, *([sizes] if sizes else []))

    def decide(self, length: int) -> None:
        """Decides the open lists. A batch of one sample is not remembered: both readings give the same, only, piece."""
        for node, fields in self.open:
            as_fields = fields is not None and length in fields.lengths()
            if as_fields and node.size == length != 1:
                raise BatchError(_two_readings(node, length))
            if fields is None or fields.root is None or not as_fields or node.size == length:
                node.cut = Cut.ITEMS
                self.leaves.append(node)
            else:
                fields.decide(length)
                node.cut, node.keys, node.children = fields.root.cut, fields.root.keys, fields.root.children
                self.leaves += fields.leaves
                self.unclear += fields.unclear
            if length != 1:
                self.known[node.path] = ListLayout.ITEMS if node.cut is Cut.ITEMS else ListLayout.FIELDS

    def finish(self, root: Node) -> int:
        """N, once everything is decided."""
        lengths = self.lengths()
        if not self.leaves and all(node.size == 1 for node, _ in self.open):
            lengths &= {1}
        if len(lengths) > 1:
            node = self.open[0][0]
            raise BatchError(_two_readings(node, min(lengths - {node.size})))
        self.decide(lengths.pop() if lengths else -1)
        self._check_unclear()
        sizes = {leaf.size for leaf in self.leaves}
        if not sizes:
            what = f"there is nothing to cut in the batch (type {type_name(type(root.value))})"
            raise BatchError(f"{what}: no tensor with a dimension and no list of samples\n  every part of it passes whole")
        if len(sizes) > 1:
            raise BatchError(_disagreement(root.value, self.leaves, [key for key in self.dims if key not in self.used]))
        if 0 in sizes:
            raise BatchError(f"the batch is empty: {_line(self.leaves[0])}\n  skip it before the call")
        if len(root.children) > _MANY or (root.children and root.children[0].cut is Cut.FIELDS):
            self._check_lists_of_samples(root)
        return sizes.pop()

    def _check_unclear(self) -> None:
        for node in sorted(self.unclear, key=lambda each: len(each.path)):
            if not self._given_below(node):
                raise BatchError(
                    f"{where(node.path)} is a tuple of {len(node.value)} with nothing in it that has rows: is it one item per sample?\n"
                    f"  if so: {argument('items', node.path)}\n  if every piece needs all of it: {argument('whole', node.path)}"
                )

    def _given_below(self, node: Node) -> bool:
        return bool(self.dims) and any(self.given(child.path) is not _NOT_GIVEN or self._given_below(child) for child in node.children)

    def _check_lists_of_samples(self, root: Node) -> None:
        """Refuses fields that could be the samples: many alike tensors in a list, or lists of one length each (zip(*samples))."""
        lists = [root] if root.children[0].cut is not Cut.FIELDS else root.children
        if any(type(each.value) not in (list, tuple) or each.cut is not Cut.FIELDS or self.given(each.path) is not _NOT_GIVEN for each in lists):
            return
        n, rows = len(lists[0].value), self.leaves[0].size
        looks = {(getattr(end.value, "shape", None), getattr(end.value, "dtype", None)) for end in root.ends()}
        if (n > _MANY and len(looks) == 1) if len(lists) == 1 else (n > 1 and len({len(each.value) for each in lists}) == 1):
            names = ", ".join(quoted(each.path) for each in lists if each.path)
            raise BatchError(
                f"{where(lists[0].path)} is a {type(lists[0].value).__name__} of {n} parts with {rows} rows each: "
                f"{n} fields of {rows} samples, or {n} samples?\n  one sample each: dims=items({names})\n  fields: dims=fields({names})"
            )


def _is_texts(value: Any) -> bool:
    """A tuple as `default_collate` makes of texts."""
    return type(value) is tuple and bool(value) and isinstance(value[0], str | bytes) and all(isinstance(part, str | bytes) for part in value)


def _has_rows(value: Any, roles: set[Role]) -> bool:
    """Whether a list that holds tensors has more in it than 0-d ones and numbers, which would be one item per sample."""
    return not roles <= {Role.TENSOR, Role.SCALAR} or any(isinstance(part, Tensor) and part.ndim > 0 for part in value)


def where(path: Path) -> str:
    return quoted(path) if path else "the batch"


def quoted(path: Path) -> str:
    return f'"{dotted(path)}"'


def argument(helper: str, path: Path) -> str:
    """What to add to the call, ready to paste."""
    return f"dims={helper}({quoted(path) if path else ''})"


def _line(leaf: Node) -> str:
    """One line on a leaf: its path, its shape, and the dimension it is cut along."""
    if leaf.cut in (Cut.NARROW, Cut.COPY):
        return f"{where(leaf.path)}: shape {tuple(leaf.value.shape)}, {leaf.size} on dim {leaf.dim}"
    return f"{where(leaf.path)}: {type_name(type(leaf.value))} of {leaf.size} {'samples' if leaf.cut is Cut.CUSTOM else 'items'}"


def _refusal(value: Any, path: Path, kind: Kind) -> str:
    way = f"{kind.why}: " if kind.why else "say how: "
    also = f"\n  or, if every piece needs all of it: {argument('whole', path)}" if path else ""
    return f"{where(path)} is of type {type_name(type(value))}, which cannot be cut into samples\n  {way}{to_register(type(value))}{also}"


def _not_dense(value: Tensor, path: Path) -> str:
    what = "nested" if value.is_nested else str(value.layout).removeprefix("torch.")
    why = "its rows are no views of one block of memory" if value.is_nested else "a range of its rows would be a copy with indices of its own"
    whole_hint = f"\n  if every piece needs all of it: {argument('whole', path)}" if path else ""
    return (
        f"{where(path)} is a {what} tensor, which cannot be cut on dim 0 without a copy ({why})\n"
        f"  make it dense or padded, or put it in a class of yours and register_splitter(ThatClass, length=..., slice=...){whole_hint}"
    )


def _two_readings(node: Node, samples: int) -> str:
    return (
        f"{where(node.path)} can be read in two ways: as {node.size} items, one per sample, or as {node.size} fields of {samples} samples each\n"
        f"  one item per sample: {argument('items', node.path)}\n  fields: {argument('fields', node.path)}"
    )


def _disagreement(batch: Any, leaves: list[Node], unused: list[str]) -> str:
    """Names each leaf, its shape, and the line to add."""
    common, groups = _common_length(leaves)
    hints = []
    for path, group in groups.items():
        odd = [leaf for leaf in group if leaf.size != common]
        if odd and len(group) == common and len(group) > 1:
            hints.append(argument("items", path))
        else:
            hints.extend(_hint(leaf, common) for leaf in odd)
    if isinstance(batch, list | tuple) and len(leaves) == len(batch) > 1 and all(isinstance(each, Tensor) for each in batch):
        hints.append(f"{argument('items', ())} (if the batch is {len(batch)} samples)")
    shown = [f"  {_line(leaf)}" for leaf in leaves[:12]] + ([f"  … and {len(leaves) - 12} more"] if len(leaves) > 12 else [])
    sizes = " and ".join(map(str, sorted({leaf.size for leaf in leaves})[:4]))
    missing = f"\n  dims names {some(unused)}, which the batch does not have" if unused else ""
    return "\n".join([f"the parts of the batch disagree on its length: {sizes}", *shown, f"  say which is right: {'; '.join(hints[:6])}"]) + missing


def _common_length(leaves: list[Node]) -> tuple[int, dict[Path, list[Node]]]:
    """The length that the batch most likely has, and the leaves by the list that they are in."""
    groups: dict[Path, list[Node]] = {}
    for leaf in leaves:
        in_list = len(leaf.path) > 1 and isinstance(leaf.path[-1], int) and leaf.cut is Cut.NARROW
        groups.setdefault(leaf.path[:-1] if in_list else leaf.path, []).append(leaf)
    # 256 images in a list must not outvote the labels next to it.
    single = [group[0] for group in groups.values() if len(group) == 1]
    votes = Counter(leaf.size for leaf in single or leaves)
    fewest = min((leaf.value.ndim for leaf in leaves if leaf.cut in (Cut.NARROW, Cut.COPY)), default=0)

    def standing(size: int) -> tuple[int, int, bool]:
        # A leaf with more dimensions than others, one of them this long, probably has something else in front: positions of shape (3, N, L).
        fronted = sum(_other_dim(leaf, size) is not None and leaf.value.ndim > fewest for leaf in leaves if leaf.size != size)
        return votes[size], fronted, size != 1  # what has length 1 is usually there to be broadcast

    return max(votes, key=standing), groups


def _other_dim(leaf: Node, size: int) -> int | None:
    if leaf.cut not in (Cut.NARROW, Cut.COPY) or size not in tuple(leaf.value.shape):
        return None
    return tuple(leaf.value.shape).index(size)


def _hint(leaf: Node, common: int) -> str:
    dim = _other_dim(leaf, common)
    return argument("whole", leaf.path) if dim is None else f"dims={{{quoted(leaf.path)}: {dim}}}"
