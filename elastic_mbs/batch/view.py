"""A batch of any shape as N samples: its length, its pieces and where they go, its tensors.

How its values are read is in `layout.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import compress
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from elastic_mbs.batch.containers import Path, dotted, kind_of, map_tensors, tensors_in
from elastic_mbs.batch.cut import Dims, ListLayout
from elastic_mbs.batch.layout import MANY, Cut, Layout, Node, checked_dims
from elastic_mbs.batch.lengths import ByLength
from elastic_mbs.errors import BatchError

__all__ = ["BatchView", "map_tensors"]


_VERSION, _NUMEL = attrgetter("_version"), Tensor.numel
_LAYOUT, _SHAPE = map(attrgetter, ("layout", "shape"))
_FLAT, _PLAIN, _DENSE = {dict, tuple, list}, {Tensor}, {torch.strided}


class BatchView:
    """A batch as N samples; a BatchError where it cannot be cut.

    Construction looks at shapes only: no copy, no device synchronisation.
    """

    def __init__(
        self,
        batch: Any,
        dims: Dims | None = None,
        known_lists: Mapping[Path, ListLayout] | None = None,
        by_length: ByLength | None = None,
    ) -> None:
        self.batch, self._dims = batch, dims
        # For the next batch of the kind: a list that only its length decides is read as in this
        # one. A short last batch cannot change it by chance.
        self.known_lists: Mapping[Path, ListLayout] = known_lists or {}
        self._rows = None if dims else rows_of(batch)  # None: the batch has to be read as a tree
        if self._rows is not None:
            self.tensors = list(self._rows.values())
            self.length, elements = self.tensors[0].shape[0], sum(map(_NUMEL, self.tensors))
        else:
            # of the whole batch: those that pass whole and those inside per-sample items, too
            self.tensors, elements = [], 0
            self.length = self._tree[2]  # N
            for end in self._tree[1]:
                tensors = tensors_in(end.value)
                self.tensors += tensors
                if end.cut is Cut.COPY:
                    elements += end.value.size
                elif end.cut is not Cut.WHOLE:
                    elements += sum(map(_NUMEL, tensors))
        # of what is cut, per sample, rounded up. Memory is modelled in them
        self.elements = max(1, -(-elements // self.length))
        self.worth = self.length  # in samples of so many elements
        # None: pieces are ranges of the batch
        self.sorted = (
            None if by_length is None else by_length.read(batch, self._tree[1], self.length)
        )
        self.costs = None if self.sorted is None else self.sorted.costs
        if self.costs is not None:
            self.elements, self.worth = self.costs.each[0], self.costs.samples

    @cached_property
    def _tree(self) -> tuple[Node, Sequence[Node], int]:
        """The batch as a tree, its values without parts, and N."""
        layout = Layout(checked_dims(self._dims) if self._dims else {}, dict(self.known_lists))
        root = layout.read(self.batch)
        length = layout.finish(root)
        self.known_lists = layout.known
        return root, layout.ends, length

    def piece(self, start: int, stop: int) -> Any:
        """Return samples `start` to `stop`: views in new containers.

        So neither a replay nor the caller sees a `pop`.
        """
        if self.sorted is not None:
            return self.sorted.piece(self._tree[0], start, stop)
        if self._rows is None:
            return self._tree[0].piece(start, stop)
        parts = {key: tensor[start:stop] for key, tensor in self._rows.items()}
        return kind_of(type(self.batch)).put(self.batch, parts)

    def named_tensors(self) -> list[tuple[str, Tensor]]:
        """(dotted path, tensor) for the tensors that are fields of the batch, those inside per-sample items left out."""
        return [
            (dotted(end.path), end.value) for end in self._tree[1] if isinstance(end.value, Tensor)
        ]

    def dim_of(self, value: Any) -> int | None:
        """The dimension along which this very value of the batch is cut: 0 for no part of the batch, None for a container of fields."""
        todo = [self._tree[0]]
        while todo:
            node = todo.pop()
            if node.value is value and node.cut is not Cut.WHOLE:
                return None if node.cut is Cut.FIELDS else node.dim
            todo.extend(node.children.values())
        return 0

    def versions(self) -> tuple[int, ...]:
        """The tensors' version counters, to notice an edit in place."""
        try:
            return tuple(map(_VERSION, self.tensors))
        except RuntimeError:  # inference tensors have none
            return tuple(
                [-1 if tensor.is_inference() else tensor._version for tensor in self.tensors]
            )

    def whole_edited(self, since: tuple[int, ...]) -> bool:
        """Whether a tensor that every piece gets whole has been edited since `versions` was called."""
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


def rows_of(batch: Any) -> Mapping[Any, Tensor] | None:
    """The parts of a dict, tuple or list of a few dense tensors of one length, as most loaders give them; None for a batch that has to be read."""
    if type(batch) not in _FLAT or not 0 < len(batch) <= MANY:
        return None
    parts = kind_of(type(batch)).take(batch)
    tensors = parts.values()
    if set(map(type, tensors)) != _PLAIN or set(map(_LAYOUT, tensors)) != _DENSE:
        return None
    try:
        lengths = {shape[0] if shape else 0 for shape in map(_SHAPE, tensors)}
    except RuntimeError:  # nested tensors have none
        return None
    return parts if len(lengths) == 1 and 0 not in lengths else None


def check_graphs(view: BatchView) -> None:
    """Refuses a batch that pieces cannot share: one whose tensors carry a graph."""
    for tensor in view.tensors:
        if tensor.grad_fn is not None:
            name = next((name for name, each in view.named_tensors() if each is tensor), "")
            raise BatchError(
                f"the tensor {name or 'batch'!r} carries a graph ({tensor.grad_fn.name()}), and "
                "each piece would run backward through it again: "
                "compute it inside loss_fn, with its module in model=[...], or detach it"
            )
