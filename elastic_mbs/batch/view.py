"""A batch of any shape as N samples: its length, its pieces, its tensors.

`layout.py` reads its values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import accumulate, compress
from math import ceil
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from elastic_mbs.batch.agreement.agree import Agreement
from elastic_mbs.batch.agreement.questions import is_certain
from elastic_mbs.batch.agreement.said_graphs import check_said_graphs
from elastic_mbs.batch.containers import (
    Path,
    Role,
    count_attributes,
    dotted,
    kind_of,
    map_tensors,
    tensors_in,
    to_register,
)
from elastic_mbs.batch.cut import Dims, ListLayout
from elastic_mbs.batch.layout import MANY, Cut, Layout, Node, quoted, where
from elastic_mbs.batch.lengths import ByLength
from elastic_mbs.batch.pieces import Costs, PaddedTokens, RowCosts, RowTokens, Tokens
from elastic_mbs.batch.ragged.keys import tells
from elastic_mbs.batch.ragged.relations import Belongs, Member, Placeholders
from elastic_mbs.batch.ragged.rows import Rows
from elastic_mbs.batch.splitters import type_name
from elastic_mbs.errors import BatchError

__all__ = ["BatchView", "map_tensors"]


_VERSION, _NUMEL = attrgetter("_version"), Tensor.numel
_LAYOUT, _SHAPE = map(attrgetter, ("layout", "shape"))
_FLAT, _PLAIN, _DENSE = {dict, tuple, list}, {Tensor}, {torch.strided}


class BatchView:
    """A batch as N samples.

    Construction reads shapes only: no copy, no device synchronisation. A BatchError names what
    cannot be cut.
    """

    def __init__(
        self,
        batch: Any,
        dims: Dims | None = None,
        known_lists: Mapping[Path, ListLayout | Belongs] | None = None,
        by_length: ByLength | None = None,
        placeholders: Placeholders = dict,
    ) -> None:
        self.batch, self._dims, self._placeholders = batch, dims, placeholders
        # Kept for the next batch of the kind: a list that only its length decides is read as here,
        # so a short last batch cannot change its reading by chance.
        self.known_lists: Mapping[Path, ListLayout | Belongs] = known_lists or {}
        self._rows = None if dims else rows_of(batch)  # None: the batch has to be read as a tree
        if self._rows is not None:
            self.tensors = list(self._rows.values())
            self.length, elements = self.tensors[0].shape[0], sum(map(_NUMEL, self.tensors))
            if known_lists is None and self.length > 1:  # once for each loss function
                self.known_lists = _shown(batch, self._rows)
        else:
            # also those that pass whole and those inside per-sample items
            self.tensors, elements = [], 0
            self.length = self._tree[2]
            for end in self._tree[1]:
                tensors = tensors_in(end.value)
                self.tensors += tensors
                if end.cut is not Cut.WHOLE:
                    elements += _elements(end, tensors)
        # of the values that are cut, per sample, rounded up: memory is modelled in elements
        self.elements = max(1, -(-elements // self.length))
        self.worth = self.length  # of the batch, in samples of `elements` each
        self._lengths = (
            None if by_length is None else by_length.read(batch, self._tree[1], self.length)
        )
        # None: pieces are ranges of the batch
        self.sorted = None if self._lengths is None else self._lengths.sorted
        self.costs: Costs | None = None if self.sorted is None else self.sorted.costs
        if self._rows is None and self.sorted is None:
            self.costs = _row_costs(self._tree[1], elements, self.length)
        if self.costs is not None:
            self.elements, self.worth = self.costs.unit, self.costs.samples

    @property
    def even_costs(self) -> Costs:
        """The elements of each sample, also where all are the same."""
        return self.costs or RowCosts([self.elements] * self.length)

    @cached_property
    def _tree(self) -> tuple[Node, Sequence[Node], int]:
        """Nodes of the batch: the root, the nodes without parts; and the number of samples."""
        dims = _checked(self._dims) if self._dims else {}
        read = Agreement(self.batch, dims, self.known_lists, self._placeholders)
        _check_counts(read.root, read.samples, read.layout)
        if dims:
            check_said_graphs(read.root, read.samples)
        self.known_lists = read.known
        return read.root, read.ends, read.samples

    def tokens(self) -> Tokens:
        """Return the tokens of each sample: its length, or the rows that it brings.

        Raises:
            BatchError: nothing says how long samples are.
        """
        if self.sorted is not None:
            return PaddedTokens(self.sorted.lengths)
        if self._lengths is not None:
            return PaddedTokens([self._lengths.longest] * self.length)
        found = [] if self._rows is not None else list(map(_rows_in, self._tree[1]))
        each = {id(rows): rows for rows in found if rows is not None}
        if len(each) == 1:
            return RowTokens(next(iter(each.values())).lengths)
        problem = (
            "has several fields with rows of samples" if each else "does not say their lengths"
        )
        raise BatchError(
            f"max_tokens counts the tokens of samples, and the batch {problem}: where it is "
            'padded, say pieces="by_length" and length= (the name of an attention mask); where it '
            "is packed, give it cu_seqlens; else leave max_tokens out"
        )

    def piece(self, start: int, stop: int) -> Any:
        """Return samples `start` to `stop`: views in new containers.

        So neither a replay nor the caller sees a `pop`.
        """
        if self.sorted is not None:
            return self.sorted.piece(self._tree[0], start, stop)
        if self._rows is None:
            return self._tree[0].piece(start, stop)
        if type(self.batch) is Tensor:
            return self.batch[start:stop]
        parts = {}
        # not a comprehension, which is a call of its own: this runs for every piece
        for key, tensor in self._rows.items():
            parts[key] = tensor[start:stop]
        return kind_of(type(self.batch)).put(self.batch, parts)

    def numbers(self, start: int, stop: int) -> Sequence[int]:
        """Return the numbers in the batch of samples `start` to `stop` of the pieces' order."""
        every = range(self.length) if self.sorted is None else self.sorted.order
        return every[start:stop]

    def example(self, size: int) -> tuple[int, int, float]:
        """Return the start and stop of a piece of about `size`, and its size to a fraction."""
        return (0, size, size) if self.costs is None else self.costs.example(size)

    def named_tensors(self) -> list[tuple[str, Tensor]]:
        """Return (dotted path, tensor) of each tensor that is a field of the batch.

        Tensors inside per-sample items are left out.
        """
        return [
            (dotted(end.path), end.value) for end in self._tree[1] if isinstance(end.value, Tensor)
        ]

    def dim_of(self, value: Any) -> int | None:
        """Return the dimension along which a value of the batch is cut.

        0 for a value that is no part of the batch, None for a container of fields.
        """
        node = self._node_of(value)
        return 0 if node is None else None if node.cut is Cut.FIELDS else node.dim

    def rows_of(self, value: Any) -> Rows | None:
        """Return the rows that each sample brings to a field; None where it has one each."""
        node = self._node_of(value)
        return None if node is None or node.ragged is None else node.ragged.rows

    def _node_of(self, value: Any) -> Node | None:
        todo = [self._tree[0]]
        while todo:
            node = todo.pop()
            if node.value is value and node.cut is not Cut.WHOLE:
                return node
            todo.extend(node.children.values())
        return None

    @property
    def nbytes(self) -> int:
        """Bytes of its tensors."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors)

    def versions(self) -> tuple[int, ...]:
        """Return the tensors' version counters, by which an edit in place is noticed."""
        try:
            return tuple(map(_VERSION, self.tensors))
        except RuntimeError:  # inference tensors have none
            return tuple(
                [-1 if tensor.is_inference() else tensor._version for tensor in self.tensors]
            )

    @property
    def has_whole(self) -> bool:
        """True if every piece gets some tensor of the batch whole."""
        return self._rows is None and any(
            end.cut is Cut.WHOLE and tensors_in(end.value) for end in self._tree[1]
        )

    def whole_edited(self, since: tuple[int, ...]) -> bool:
        """Return whether a tensor that every piece gets whole was edited since `versions`."""
        if self._rows is not None:
            return False
        whole = {
            id(tensor)
            for end in self._tree[1]
            if end.cut is Cut.WHOLE
            for tensor in tensors_in(end.value)
        }
        moved = (version != before for version, before in zip(self.versions(), since, strict=True))
        return any(id(tensor) in whole for tensor in compress(self.tensors, moved))


def _check_counts(root: Node, samples: int, layout: Layout) -> None:
    """Refuse numbers of samples that every piece would get whole, unless `dims` allows it."""
    todo = [root]
    while todo:
        node = todo.pop()
        todo.extend([child for child in node.children.values() if child.children])
        if node.cut is not Cut.FIELDS or type(node.value) in _FLAT:
            continue
        for name, equal in count_attributes(node.value, node.children, samples).items():
            path = (*node.path, name)
            if not equal:
                layout.known[path] = Belongs.WHOLE
            elif samples > 1 and path not in layout.known and layout.given(path) is not None:
                raise BatchError(
                    f"{where(path)} of {type_name(type(node.value))} is {samples}, the number of "
                    "samples, and every piece would get it\n"
                    f"  if it is no number of samples: dims=cut.whole({quoted(path)})\n"
                    f"  if it is: take len(...) of a part in its place, or "
                    f"{to_register(type(node.value))}"
                )


def _elements(end: Node, tensors: Sequence[Tensor]) -> int:
    return int(end.value.size) if end.kind.role is Role.ARRAY else sum(map(_NUMEL, tensors))


def _rows_in(end: Node) -> Rows | None:
    if end.ragged is not None:
        return end.ragged.rows
    lengths = None if end.kind.splitter is None else end.kind.splitter.rows_of(end.value)
    return None if lengths is None else Rows([0, *accumulate(lengths)])


def _row_costs(ends: Sequence[Node], elements: int, samples: int) -> Costs | None:
    """Return the elements of samples that bring rows in unequal numbers; None where none do.

    Args:
        ends: the values of the batch.
        elements: of the whole batch.
        samples: of the batch.
    """
    by_row: dict[int, float] = {}  # elements of a row in all fields, by the id of the rows
    found: dict[int, Rows] = {}
    for end in ends:
        rows = _rows_in(end)
        if rows is None or not rows.total:
            continue
        own = _elements(end, tensors_in(end.value))
        found[id(rows)] = rows
        by_row[id(rows)] = by_row.get(id(rows), 0.0) + own / rows.total
        elements -= own
    each = [elements / samples] * samples
    for key, rows in found.items():
        each = [other + by_row[key] * own for other, own in zip(each, rows.lengths, strict=True)]
    return RowCosts([max(1, ceil(one)) for one in each]) if len(set(each)) > 1 else None


def _checked(dims: Any) -> dict[str, Any]:
    """Return `dims` with every key as text."""
    if not isinstance(dims, Mapping):
        raise BatchError(
            'dims must be a mapping such as {"position_ids": 1} or cut.whole("mask"), '
            f"not {dims!r}"
        )
    for key, value in dims.items():
        if isinstance(key, bool) or not isinstance(key, str | int):
            raise BatchError(
                f"dims has the key {key!r}: a key is a name, a dotted path or an index"
            )
        if isinstance(value, bool) or not (
            value is None or isinstance(value, int | ListLayout | Member)
        ):
            raise BatchError(
                f"dims says {value!r} of {key!r}: say a dimension (an int), "
                f"cut.whole({key!r}), cut.items({key!r}), cut.fields({key!r}) or cut.ragged(...)"
            )
    return {str(key): value for key, value in dims.items()}


def rows_of(batch: Any) -> Mapping[Any, Tensor] | None:
    """Return the parts of a dict, tuple or list of a few dense tensors of one length.

    A dense tensor is its own part. Most loaders give such batches. None for any other, which has to
    be read as a tree.
    """
    if type(batch) is Tensor:
        parts: Mapping[Any, Tensor] = {(): batch}
    elif type(batch) not in _FLAT or not 0 < len(batch) <= MANY:
        return None
    else:
        parts = kind_of(type(batch)).take(batch)
    tensors = parts.values()
    if tells(parts) or set(map(type, tensors)) != _PLAIN or set(map(_LAYOUT, tensors)) != _DENSE:
        return None
    try:
        shapes = list(map(_SHAPE, tensors))
    except RuntimeError:  # nested tensors have none
        return None
    lengths = {shape[0] if shape else 0 for shape in shapes}
    if len(lengths) > 1 or 0 in lengths:
        return None
    (length,) = lengths
    # can be read in another way, see `agreement.questions`
    pictures = length <= 4 and len(shapes[0]) == 3
    if type(batch) is list and (len(batch) >= length or pictures):
        return None
    for shape in shapes:
        if len(shape) > 2 and shape[1] == length:
            return None
    return parts


def _shown(batch: Any, rows: Mapping[Any, Tensor]) -> Mapping[Path, ListLayout | Belongs]:
    """Return what a batch whose reading is certain shows for later ones."""
    if type(batch) is Tensor:
        return {}
    shown: dict[Path, ListLayout | Belongs] = {
        (key,): Belongs.SAMPLES for key, part in rows.items() if is_certain(part, len(part))
    }
    return shown | {(): ListLayout.FIELDS} if type(batch) is list else shown


def check_graphs(view: BatchView) -> None:
    """Refuse a batch whose tensors carry a graph: pieces cannot share it."""
    for tensor in view.tensors:
        if tensor.grad_fn is not None:
            name = next((name for name, each in view.named_tensors() if each is tensor), "")
            raise BatchError(
                f"the tensor {name or 'batch'!r} carries a graph ({tensor.grad_fn.name()}), and "
                "each piece would run backward through it again: "
                "compute it inside loss_fn, with its module in model=[...], or detach it"
            )
