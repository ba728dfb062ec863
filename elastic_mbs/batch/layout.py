"""The layout of a batch: which values hold samples, along which dimension, in which lists.

A value is read by the first rule that applies:

1. `dims` names it: a dimension, `cut.whole(...)`, `cut.items(...)` or `cut.fields(...)`;
2. a tensor (or numpy array) with at least one dimension holds one sample per index of dim 0; 0-d
   tensors, numbers, strings and None pass whole;
3. mappings, tuples and dataclasses hold fields, and so do lists that hold a tensor with rows
   directly (as `default_collate` makes of `(x, y)` samples);
4. lists and tuples of texts, and lists of numbers, 0-d tensors or other plain objects, hold one
   item per sample;
5. lists of containers hold items if their length is N, fields if the tensors in them have length N,
   and are an error if both are true;
6. where neither types nor shapes decide, a BatchError names the value and the line to add: nothing
   is guessed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

import torch

from elastic_mbs.batch.containers import (
    Kind,
    Path,
    Role,
    dotted,
    fresh,
    has_rows,
    is_collated_text,
    kind_of,
    own_array,
    roles_in,
    row_attributes,
    suffixes,
    tensors_in,
    to_register,
    walk,
)
from elastic_mbs.batch.cut import Dims, Known, ListLayout
from elastic_mbs.batch.ragged.fields import RaggedField
from elastic_mbs.batch.ragged.keys import tells, well_known
from elastic_mbs.batch.ragged.relations import Member, Placeholders, jagged
from elastic_mbs.batch.ragged.settle import settle
from elastic_mbs.batch.splitters import type_name
from elastic_mbs.errors import BatchError


class Cut(Enum):
    """The way to cut a value."""

    NARROW = auto()
    COPY = auto()  # numpy
    ITEMS = auto()
    FIELDS = auto()
    CUSTOM = auto()
    RAGGED = auto()  # its rows are no samples
    WHOLE = auto()


@dataclass(slots=True, eq=False)
class Node:
    """A value of the batch, and the way to cut it."""

    cut: Cut
    path: Path
    value: Any
    kind: Kind
    dim: int = 0
    size: int = -1  # samples; of fields, that of its largest part: -1 where none is cut
    # passed whole with numpy arrays in it, which have no version that would show an edit in place
    copied: bool = False
    ragged: RaggedField | None = None  # the way to cut it, of Cut.RAGGED
    children: dict[Any, Node] = field(default_factory=dict)

    def piece(self, start: int, stop: int) -> Any:
        """Return samples `start` to `stop` of the value."""
        cut, value = self.cut, self.value
        if cut is Cut.NARROW:
            return value.narrow(self.dim, start, stop - start)
        if cut is Cut.FIELDS:
            return self.kind.put(
                value, {key: child.piece(start, stop) for key, child in self.children.items()}
            )
        if cut is Cut.ITEMS:
            return self.with_items(value[start:stop])
        if cut is Cut.COPY:
            return own_array(value[(*(slice(None),) * self.dim, slice(start, stop))].copy())
        if self.ragged is not None:
            part = self.ragged.piece(value, start, stop)
            return self.with_items(part) if type(part) is list else part
        if self.kind.splitter is not None and cut is Cut.CUSTOM:
            return self.kind.splitter.cut(value, start, stop)
        return fresh(value) if self.copied else value

    def with_items(self, items: Sequence[Any]) -> Any:
        """Return a new list of some of the items."""
        if roles_in(items) & {Role.LIST, Role.FIELDS, Role.ARRAY}:
            items = [fresh(item) for item in items]  # an edit of an item must not reach a replay
        return self.kind.put(self.value, dict(enumerate(items)))

    def rebuilt(self, fn: Callable[[Node], Any]) -> Any:
        """Return new containers with `fn(node)` in the place of each node without parts."""
        if self.cut is not Cut.FIELDS:
            return fn(self)
        return self.kind.put(
            self.value, {key: child.rebuilt(fn) for key, child in self.children.items()}
        )

    def ends(self) -> list[Node]:
        """Return the nodes below that have no parts, in order; itself where it has none."""
        if not self.children:
            return [self]
        found = []
        # no comprehension, no call for a child without parts: this runs for every batch
        for child in self.children.values():
            if child.children:
                found += child.ends()
            else:
                found.append(child)
        return found


_NOT_GIVEN = object()
_CONTAINERS = frozenset({Role.LIST, Role.FIELDS, Role.ARRAY, Role.CUSTOM})
# Tensors of one shape in a list are taken as fields up to this number: ids, masks and labels of a
# text are fewer, the crops of a picture more.
MANY = 7


class Layout:
    """A batch, read into a tree of nodes."""

    def __init__(self, dims: Dims, known: Known, placeholders: Placeholders = dict) -> None:
        self.dims, self.placeholders = dims, placeholders
        self.known = known  # how lists of containers were read in this batch and earlier ones
        self.ends: list[Node] = []  # all values without parts, once everything is decided
        self.leaves: list[Node] = []  # those that are cut
        # lists of containers: as items, as fields, and the layout of those
        self.open: list[tuple[Node, Node, Layout]] = []
        self.ragged: list[tuple[Node, Member]] = []
        self.keyed: set[Path] = set()  # containers with a key that tells of rows
        self.unclear: list[Node] = []  # tuples without rows: items, or the same for all samples

    def given(self, path: Path) -> Any:
        return next((self.dims[name] for name in suffixes(path) if name in self.dims), _NOT_GIVEN)

    def _allows_key(self, path: Path) -> bool | Member:
        """Return whether a well-known key may tell how a value is cut, or what `dims` says."""
        given = self.given(path)
        return given if isinstance(given, Member) else given is _NOT_GIVEN

    def read(self, value: Any, path: Path = (), inherited: Any = _NOT_GIVEN) -> Node:
        """Return the node of a value, and collect the open lists and unclear tuples below it."""
        given = self.given(path) if self.dims else _NOT_GIVEN
        if given is _NOT_GIVEN:
            given = inherited
        kind = kind_of(type(value))
        role = kind.role
        if isinstance(given, Member) and role is not Role.FIELDS:
            return self._ragged(value, path, kind, given)
        if given is None or role is Role.SCALAR:
            copied = given is None and bool(tensors_in(value, (Role.ARRAY,)))
            return Node(Cut.WHOLE, path, value, kind, copied=copied)
        if role is Role.TENSOR or role is Role.ARRAY:
            return self._tensor(value, path, kind, given)
        if role is Role.FIELDS:
            collated = given is not ListLayout.FIELDS and is_collated_text(value)
            as_items = given is ListLayout.ITEMS or collated
            read = self._items if as_items else self._fields
            return read(value, path, kind, given)
        if role is Role.LIST:
            return self._list(value, path, kind, given)
        return self._custom(value, path, kind, given)

    def _ragged(self, value: Any, path: Path, kind: Kind, member: Member) -> Node:
        node = Node(Cut.RAGGED, path, value, kind)
        self.ragged.append((node, member))
        return node

    def _custom(self, value: Any, path: Path, kind: Kind, given: Any) -> Node:
        if kind.splitter is None:
            raise _refusal(
                path, f"of type {type_name(type(value))}", f"{kind.why}: {to_register(type(value))}"
            )
        if isinstance(given, int):
            raise BatchError(
                f"{where(path)} is of type {type_name(type(value))}: register_splitter says how "
                f"it is cut, and dim {given} cannot"
            )
        return Node(Cut.CUSTOM, path, value, kind, size=kind.splitter.length(value))

    def _tensor(self, value: Any, path: Path, kind: Kind, given: Any) -> Node:
        is_tensor = kind.role is Role.TENSOR
        if is_tensor and value.is_nested and given in (_NOT_GIVEN, 0):
            member = jagged(value)
            if member is not None:
                return self._ragged(value, path, kind, member)
        if is_tensor and (value.layout is not torch.strided or value.is_nested):
            form = "nested" if value.is_nested else str(value.layout).removeprefix("torch.")
            raise _refusal(
                path,
                f"a {form} tensor",
                "make it dense or padded, or put it in a class of yours and "
                "register_splitter(ThatClass, ...)",
            )
        ndim, dim = value.ndim, 0
        if isinstance(given, int):
            if not -ndim <= given < ndim:
                raise BatchError(
                    f"{where(path)} has no dim {given}: its shape is {tuple(value.shape)} (0-d "
                    "tensors pass whole and are left out of dims)"
                )
            dim = given % ndim
        elif ndim == 0:
            return Node(Cut.WHOLE, path, value, kind, copied=not is_tensor)
        return Node(Cut.NARROW if is_tensor else Cut.COPY, path, value, kind, dim, value.shape[dim])

    def _fields(self, value: Any, path: Path, kind: Kind, given: Any) -> Node:
        node = Node(Cut.FIELDS, path, value, kind)
        inherited = given if isinstance(given, int | Member) else _NOT_GIVEN
        parts = kind.take(value)
        said: Mapping[Any, Any] = {}
        if given is _NOT_GIVEN and tells(parts):
            self.keyed.add(path)
            said = well_known(parts, path, self._allows_key, self.known, self.placeholders)
        for key, part in parts.items():
            child = node.children[key] = self.read(part, (*path, key), said.get(key, inherited))
            node.size = max(node.size, child.size)
        if type(value) not in (tuple, list, dict):
            self._check_attributes(node)
        if node.size < 0 and type(value) is tuple and given is not ListLayout.FIELDS:
            named = self.dims and any(
                self.given((*path, *below)) is not _NOT_GIVEN for below, _ in walk(value)
            )
            ends = [end for child in node.children.values() for end in child.ends()]
            told = named or any(end.cut is Cut.RAGGED for end in ends)
            if not told and any(end.value is not None for end in ends):
                self.unclear.append(node)
        return node

    def _list(self, value: Any, path: Path, kind: Kind, given: Any) -> Node:
        roles = roles_in(value)
        if given is _NOT_GIVEN and not has_rows(value, roles):
            given = self.known.get(path, given) if roles & _CONTAINERS else ListLayout.ITEMS
            if given is _NOT_GIVEN:
                return self._open_list(value, path, kind)
        plain = isinstance(given, int) and not roles & (_CONTAINERS | {Role.TENSOR})
        read = self._items if plain or given is ListLayout.ITEMS else self._fields
        return read(value, path, kind, given)

    def _open_list(self, value: Any, path: Path, kind: Kind) -> Node:
        """Return a list as items, and remember its reading as fields until N is known."""
        node = Node(Cut.ITEMS, path, value, kind, size=len(value))
        fields = Node(Cut.FIELDS, path, value, kind)
        layout = Layout(self.dims, self.known, self.placeholders)
        try:
            fields = layout._fields(value, path, kind, _NOT_GIVEN)
        except BatchError:
            layout = Layout({}, {})  # fields without a length are not chosen
        self.open.append((node, fields, layout))
        return node

    def _items(self, value: Any, path: Path, kind: Kind, given: Any) -> Node:
        if kind.role is not Role.LIST and type(value) is not tuple:
            raise BatchError(
                f"{where(path)} is of type {type_name(type(value))}, and cut.items() is for lists "
                "and tuples"
            )
        if isinstance(given, int) and given not in (0, -1):
            raise BatchError(
                f"{where(path)} has no dim {given}: it is a {type(value).__name__} of "
                f"{len(value)} items"
            )
        node = Node(Cut.ITEMS, path, value, kind, size=len(value))
        self._check_attributes(node)
        return node

    def _check_attributes(self, node: Node) -> None:
        """Refuse values that every piece would get whole, unless `dims` allows it."""
        value, parts = node.value, {key: child.value for key, child in node.children.items()}
        suspects = dict.fromkeys(
            row_attributes(value, parts), "is an attribute next to the parts of"
        )
        for each in dataclasses.fields(value) if dataclasses.is_dataclass(value) else ():
            computed = (
                not each.init
                and parts.get(each.name) is not None
                and parts[each.name] is not each.default
            )
            if computed and all(end.cut is Cut.WHOLE for end in node.children[each.name].ends()):
                suspects[each.name] = "is computed (init=False) by"
        for name, what in suspects.items():
            path = (*node.path, name)
            if self.given(path) is not None:
                raise BatchError(
                    f"{where(path)} {what} {type_name(type(value))}: every piece would get the "
                    f"whole batch's\n  if that is right: dims={call('whole', path)}\n  if not: "
                    f"make it a part, or {to_register(type(value))}"
                )

    def lengths(self, root: Node) -> set[int]:
        """Return the lengths that the batch can have, with the open lists read either way."""
        choices = [{node.size} | layout.lengths(fields) for node, fields, layout in self.open]
        undecided = [node for node, _, _ in self.open]
        sizes = {end.size for end in root.ends() if end.size >= 0 and end not in undecided}
        if sizes:
            choices.append(sizes if len(sizes) == 1 else set())
        return set.intersection(*choices) if choices else set()

    def decide(self, length: int) -> None:
        """Decide the open lists.

        A batch of one sample is not remembered: both readings give the same single piece.
        """
        for node, fields, layout in self.open:
            as_fields = length in layout.lengths(fields)
            if as_fields and node.size == length != 1:
                raise BatchError(_two_readings([node], length))
            if as_fields and node.size != length:
                layout.decide(length)
                node.cut, node.children = fields.cut, fields.children
                self.unclear += layout.unclear
                self.ragged += layout.ragged
            if length != 1:
                self.known[node.path] = (
                    ListLayout.ITEMS if node.cut is Cut.ITEMS else ListLayout.FIELDS
                )

    def finish(self, root: Node) -> int:
        """Decide what is open, and return the number of samples."""
        self._close(root)
        if self.unclear:
            node = self.unclear[-1]  # the outermost: its parts come before it
            raise BatchError(
                f"{where(node.path)} is a tuple of {len(node.value)} with nothing in it that has "
                "rows: is it one item per sample?\n"
                f"  if so: dims={call('items', node.path)}\n  if every piece needs all of it: "
                f"dims={call('whole', node.path)}"
            )
        self.ends = root.ends()
        self.leaves = [end for end in self.ends if end.size >= 0]
        sizes = {leaf.size for leaf in self.leaves}
        if len(sizes) > 1:
            raise BatchError(self._disagreement(root.value))
        if self.ragged:
            plain = [leaf.path for leaf in self.leaves if leaf.path[:-1] in self.keyed]
            sizes = {settle(root.value, self.ragged, next(iter(sizes), None), self.known, plain)}
            self.leaves = [end for end in self.ends if end.size >= 0]
        if not sizes:
            raise BatchError(
                f"there is nothing to cut in the batch (type {type_name(type(root.value))}): no "
                "tensor with a dimension and no list of samples\n  every part of it passes whole"
            )
        size = sizes.pop()
        if not size:
            raise BatchError(
                f"the batch is empty: {_line(self.leaves[0])}\n  skip it before the call"
            )
        lists = self._could_be_samples(root) if root.cut is Cut.FIELDS else []
        if lists:
            raise BatchError(_two_readings(lists, size))
        return size

    def _close(self, root: Node) -> None:
        """Decide the open lists by the length on which the batch agrees."""
        if not self.open:
            return
        lengths = self.lengths(root)
        if len(lengths) < 2:
            self.decide(max(lengths, default=-1))
            return
        # nothing else is cut, and a batch of one sample has one piece either way
        if any(node.size != 1 for node, _, _ in self.open):
            node = self.open[0][0]
            raise BatchError(_two_readings([node], min(lengths - {node.size})))
        self.decide(1)

    def _could_be_samples(self, root: Node) -> list[Node]:
        """Return fields that could be the samples.

        Either many alike tensors in a list, or lists of one length that are all there is
        (`zip(*samples)`).
        """
        first, *others = root.children.values()
        if first.cut is not Cut.FIELDS and len(root.children) <= MANY:
            return []
        lists = [first, *others] if first.cut is Cut.FIELDS else [root]
        if not all(self._is_unsaid_list(each) for each in lists):
            return []
        counts = {len(each.value) for each in lists}
        if len(lists) > 1:
            return lists if len(counts) == 1 and counts != {1} else []
        if counts.pop() <= MANY:
            return []
        forms = {
            (getattr(end.value, "shape", None), getattr(end.value, "dtype", None))
            for end in lists[0].ends()
        }
        return lists if len(forms) == 1 else []

    def _is_unsaid_list(self, node: Node) -> bool:
        """Return whether a node is a list or tuple that was read as fields without being told."""
        return (
            type(node.value) in (list, tuple)
            and node.cut is Cut.FIELDS
            and self.given(node.path) is _NOT_GIVEN
        )

    def _disagreement(self, batch: Any) -> str:
        """Return a text with each leaf, its shape, and the line to add for each possible length."""
        places: list[tuple[Path, Any]] = [((), batch), *walk(batch)]
        lists = {
            path: len(value)
            for path, value in places
            if type(value) in (list, tuple) and roles_in(value) == {Role.TENSOR}
        }
        sizes = sorted({leaf.size for leaf in self.leaves})
        ways = [
            f"  if it has {length} samples: {self._line_to_add(lists, length)}"
            for length in {*sizes, *lists.values()} - {0}
        ]
        unused = ", ".join(
            repr(name)
            for name in self.dims
            if not any(name in suffixes(path) for path, _ in places)
        )
        lines = [
            f"the parts of the batch disagree on its length: {' and '.join(map(str, sizes[:4]))}"
        ]
        lines += [f"  {_line(leaf)}" for leaf in self.leaves[:12]]
        if len(self.leaves) > 12:
            lines.append(f"  … and {len(self.leaves) - 12} more")
        lines += sorted(ways, key=len)[:3]
        return "\n".join(lines) + (
            f"\n  dims names {unused}, which the batch does not have" if unused else ""
        )

    def _line_to_add(self, lists: dict[Path, int], length: int) -> str:
        dims: list[str] = []
        said: dict[Path, str] = {}
        for leaf in self.leaves:
            parent = leaf.path[:-1]
            if leaf.size == length:
                continue
            if lists.get(parent) == length:
                said[parent] = "items"
            elif leaf.cut in (Cut.NARROW, Cut.COPY) and length in leaf.value.shape:
                dims.append(f"{quoted(leaf.path)}: {tuple(leaf.value.shape).index(length)}")
            else:
                said[leaf.path] = "whole"
        ways = [
            call(helper, *[path for path in said if said[path] == helper])
            for helper in dict.fromkeys(said.values())
        ]
        return "dims=" + " | ".join(([f"{{{', '.join(dims)}}}"] if dims else []) + ways)


def where(path: Path) -> str:
    return quoted(path) if path else "the batch"


def quoted(path: Path) -> str:
    return f'"{dotted(path)}"'


def call(helper: str, *paths: Path) -> str:
    """Return a call of `cut.whole`, `cut.items` or `cut.fields` to paste after `dims=`."""
    return f"cut.{helper}({', '.join([quoted(path) for path in paths if path])})"


def _line(leaf: Node) -> str:
    """Return one line on a leaf: its path, its shape, and the dimension it is cut along."""
    if leaf.cut in (Cut.NARROW, Cut.COPY):
        return f"{where(leaf.path)}: shape {tuple(leaf.value.shape)}, {leaf.size} on dim {leaf.dim}"
    unit = "samples" if leaf.cut is Cut.CUSTOM else "items"
    return f"{where(leaf.path)}: {type_name(type(leaf.value))} of {leaf.size} {unit}"


def _refusal(path: Path, what: str, remedy: str) -> BatchError:
    whole = f"\n  or, if every piece needs all of it: dims={call('whole', path)}" if path else ""
    return BatchError(
        f"{where(path)} is {what}, which cannot be cut into samples\n  {remedy}{whole}"
    )


def _two_readings(lists: list[Node], samples: int) -> str:
    paths = [node.path for node in lists]
    length = len(lists[0].value)
    return (
        f"{where(paths[0])} can be read in two ways: as {length} items, one per sample, or as "
        f"{length} fields of {samples} samples each\n"
        f"  items: dims={call('items', *paths)}\n  fields: dims={call('fields', *paths)}"
    )
