"""A batch of any shape as N samples: its length, its pieces, its tensors. How its values are read is in `layout.py`.

Pieces hold `narrow()` views (nothing is copied) in new containers of the same types, so that neither a replay nor the caller sees a `pop`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from elastic_mbs.batch.containers import Path, dotted, lookup, map_tensors, tensors_in
from elastic_mbs.batch.layout import Cut, Layout, Node
from elastic_mbs.batch.splitters import Dims, ListLayout, checked, type_name
from elastic_mbs.errors import BatchError

__all__ = ["BatchView", "map_tensors"]


class BatchView:
    """A batch as N samples. Construction looks at shapes only: no copy, no device synchronisation.

    Args:
        batch: tensor, numpy array, list, tuple, namedtuple, mapping, dataclass or registered type, nested at will.
        dims: what the shapes do not say: `{"position_ids": 1} | whole("mask") | items("images")`. A key is a name (at any depth), a dotted path, an
            index (from the root), or `""` for the batch itself; the most specific one holds. A dimension on a container holds for its tensors.
        known_lists: `known_lists` of an earlier view of a batch of the same kind. A list that only its length decides is read as it was then, so that
            neither a piece nor a short last batch can be read otherwise by chance.

    Raises:
        BatchError: lengths that disagree, an empty batch, nothing to cut, two readings, or a type that cannot be cut.
    """

    __slots__ = ("_elements", "_ends", "_root", "_tensors", "_versioned", "batch", "known_lists", "length")

    def __init__(self, batch: Any, dims: Dims | None = None, known_lists: Mapping[Path, ListLayout] | None = None) -> None:
        layout = Layout(checked(dims) if dims else {}, dict(known_lists) if known_lists else {}, set())
        self.batch = batch
        self._root = layout.read(batch)
        self.length = layout.finish(self._root)  # N
        self.known_lists: Mapping[Path, ListLayout] = layout.known
        self._ends: list[Node] = self._root.ends()
        self._elements: int | None = None
        self._tensors: list[Tensor] | None = None
        self._versioned: list[Tensor] | None = None

    @property
    def elements(self) -> int:
        """Elements of the tensors that are cut, per sample, rounded up; at least 1. Memory is modelled in them."""
        if self._elements is None:
            total = 0
            for end in self._ends:
                if end.cut is Cut.NARROW:
                    total += end.value.numel()
                elif end.cut is not Cut.WHOLE:
                    total += end.value.size if end.cut is Cut.COPY else sum(tensor.numel() for tensor in tensors_in(end.value))
            self._elements = max(1, -(-total // self.length))
        return self._elements

    def piece(self, start: int, stop: int) -> Any:
        """Samples `start` to `stop`: tensors as `narrow()` views, in new containers of the same types.

        Raises:
            BatchError: the range is empty or not inside the batch.
        """
        if not 0 <= start < stop <= self.length:
            raise BatchError(f"there is no piece {start}:{stop} in a batch of {self.length} samples")
        return self._root.piece(start, stop)

    def tensors(self) -> list[Tensor]:
        """Every tensor of the batch, whole ones and those inside per-sample items too."""
        if self._tensors is None:
            self._tensors = []
            for end in self._ends:
                if end.cut is Cut.NARROW:
                    self._tensors.append(end.value)
                else:
                    self._tensors.extend(tensors_in(end.value))
        return self._tensors

    def named_tensors(self) -> list[tuple[str, Tensor]]:
        """(dotted path, tensor) for the tensors that are fields of the batch, those inside per-sample items left out."""
        return [(dotted(end.path), end.value) for end in self._ends if isinstance(end.value, Tensor)]

    def dim_of(self, value: Any) -> int | None:
        """The dimension along which this very value of the batch is cut: 0 for no part of the batch, None for a container of fields."""
        todo = [self._root]
        while todo:
            node = todo.pop()
            if node.value is value and node.cut is not Cut.WHOLE:
                return None if node.cut is Cut.FIELDS else node.dim
            todo.extend(node.children)
        return 0

    def versions(self) -> tuple[int, ...]:
        """The tensors' version counters, to notice an edit in place. Inference tensors have none."""
        if self._versioned is None:
            self._versioned = [tensor for tensor in self.tensors() if not tensor.is_inference()]
        return tuple([tensor._version for tensor in self._versioned])

    def leaf(self, key: str | int) -> Tensor:
        """The tensor that a name, a dotted path or an index means."""
        try:
            value = lookup(self.batch, key)
        except LookupError as error:
            raise BatchError(str(error)) from error
        if not isinstance(value, Tensor):
            raise BatchError(f"{key!r} is of type {type_name(type(value))}, not a tensor")
        return value


def check_graphs(view: BatchView) -> None:
    """Refuses a batch that pieces cannot share.

    Raises:
        BatchError: a tensor carries a graph.
    """
    if all(tensor.grad_fn is None for tensor in view.tensors()):
        return
    for name, tensor in view.named_tensors():
        if tensor.grad_fn is not None:
            raise BatchError(
                f"the tensor {name or 'batch'!r} carries a graph ({tensor.grad_fn.name()}), and each piece would run backward through it again: "
                "compute it inside loss_fn, with its module in model=[...], or detach it"
            )
