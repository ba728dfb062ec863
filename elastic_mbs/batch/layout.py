"""The layout of a batch: which values hold samples, along which dimension, in which lists.

A value is read by the first rule that applies:

1. `dims` names it: a dimension, `cut.whole(...)`, `cut.items(...)` or `cut.fields(...)`;
2. a tensor (or numpy array) with at least one dimension holds one sample per index of dim 0; 0-d
   tensors, numbers, strings and None pass whole;
3. mappings, tuples and dataclasses hold fields, and so do lists that hold a tensor with rows
   directly (as `default_collate` makes of `(x, y)` samples);
4. lists and tuples of texts, and lists of numbers, 0-d tensors or other plain objects, hold one
   item per sample;
5. lists of containers hold items if their length is N, fields if the tensors in them have length N;
6. where neither types nor shapes decide, a BatchError names the value and the line to add: nothing
   is guessed.

Rules 3 and 5 give a list or tuple its reading by habit. It can be read in another way, too, and is
asked about (`elastic_mbs.batch.agreement`), if its elements are alike (tensors with as many
dimensions and of one dtype, or containers of one type) and one of these is true:

- it has N elements, and is not the batch itself as a tuple: 3 pictures of 3 channels, beside 3
  targets or alone. Either way the batch has N samples, so nothing else shows which is meant;
- everything that is cut lies in several such lists of one length: what `zip(*samples)` makes;
- it is all that there is, and holds more than `MANY` tensors of one shape;
- it is all that there is, and the shapes of its tensors differ beyond dim 0: pictures (3, H, W). It
  has more tensors than N, or pictures' 3 or 4 channels; a pair (x, y) differs, too;
- it is a list of containers, and both lengths are possible.

Tensors are not asked about: in a dict of tensors with N rows, a tuple `(x, y)` or the batch of a
tokenizer nothing can be read otherwise. The exception is a tensor of whole numbers of shape
(N, N, S) beside one of shape (N, S), which can have its samples on dim 1: position ids of three
axes, for three samples. What an earlier batch has shown is not asked again: a list that was read as
fields where its length was not N.
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
    are_columns,
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
from elastic_mbs.batch.foreign.graphs import is_graph
from elastic_mbs.batch.ragged.fields import RaggedField
from elastic_mbs.batch.ragged.keys import of_pictures, tells, well_known
from elastic_mbs.batch.ragged.relations import Member, Placeholders, jagged
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
    opened: Any = None  # what its splitter cuts, of Cut.CUSTOM
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
            return self.kind.splitter.cut(value, self.opened, start, stop)
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
        # lists of containers: as items, as fields, and the layout of those
        self.open: list[tuple[Node, Node, Layout]] = []
        self.sequences: list[Node] = []  # lists and tuples read as fields, which nothing says
        self.asked: list[Node] = []  # open lists whose readings have the same length
        self.ragged: list[tuple[Node, Member]] = []
        self.keyed: set[Path] = set()  # containers with a key that tells of rows
        self.unclear: list[Node] = []  # tuples without rows: items, or the same for all samples

    def given(self, path: Path) -> Any:
        return next((self.dims[name] for name in suffixes(path) if name in self.dims), _NOT_GIVEN)

    def is_given(self, path: Path) -> bool:
        """Return whether `dims` names a value, or a container that it lies in."""
        places = [path[:depth] for depth in range(len(path) + 1)]
        return any(self.given(place) is not _NOT_GIVEN for place in places)

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
            remedy = f"{kind.why}: {to_register(type(value))}"
            if is_graph(type(value)):
                remedy = (
                    "one graph is one sample, since its edges couple its nodes: give a Batch, or a "
                    "list of graphs"
                )
            raise _refusal(path, f"of type {type_name(type(value))}", remedy)
        if isinstance(given, int):
            raise BatchError(
                f"{where(path)} is of type {type_name(type(value))}: register_splitter says how "
                f"it is cut, and dim {given} cannot"
            )
        opened = kind.splitter.opened(value)
        size = kind.splitter.length(opened)
        return Node(Cut.CUSTOM, path, value, kind, size=size, opened=opened)

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
            said = dict.fromkeys(of_pictures(parts), ListLayout.ITEMS) | well_known(
                parts, path, self._allows_key, self.known, self.placeholders
            )
        for key, part in parts.items():
            child = node.children[key] = self.read(part, (*path, key), said.get(key, inherited))
            node.size = max(node.size, child.size)
        if type(value) not in (tuple, list, dict):
            self._check_attributes(node)
        if type(value) in (tuple, list) and given is not ListLayout.FIELDS:
            named = self.dims and any(
                self.given((*path, *below)) is not _NOT_GIVEN for below, _ in walk(value)
            )
            ends = [end for child in node.children.values() for end in child.ends()]
            told = named or any(end.cut is Cut.RAGGED for end in ends)
            if node.size >= 0:
                if not named and given is _NOT_GIVEN:
                    self.sequences.append(node)
            elif not told and type(value) is tuple and any(end.value is not None for end in ends):
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
        if are_columns(value):
            return self._fields(value, path, kind, _NOT_GIVEN)
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


def where(path: Path) -> str:
    return quoted(path) if path else "the batch"


def quoted(path: Path) -> str:
    return f'"{dotted(path)}"'


def call(helper: str, *paths: Path) -> str:
    """Return a call of `cut.whole`, `cut.items` or `cut.fields` to paste after `dims=`."""
    return f"cut.{helper}({', '.join([quoted(path) for path in paths if path])})"


def _refusal(path: Path, what: str, remedy: str) -> BatchError:
    whole = f"\n  or, if every piece needs all of it: dims={call('whole', path)}" if path else ""
    return BatchError(
        f"{where(path)} is {what}, which cannot be cut into samples\n  {remedy}{whole}"
    )
