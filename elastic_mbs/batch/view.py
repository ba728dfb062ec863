"""A batch of any shape as N samples: its length, its pieces and where they go, its tensors. How its values are read is in `layout.py`."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import compress
from operator import attrgetter
from typing import Any

from torch import Tensor

from elastic_mbs.batch.containers import Path, dotted, map_tensors, tensors_in
from elastic_mbs.batch.layout import Cut, Layout
from elastic_mbs.batch.lengths import ByLength
from elastic_mbs.batch.splitters import Dims, ListLayout, checked
from elastic_mbs.errors import BatchError

__all__ = ["BatchView", "map_tensors"]


_AHEAD = 16  # pieces
_VERSION = attrgetter("_version")


class BatchView:
    """A batch as N samples; a BatchError where it cannot be cut. Construction looks at shapes only: no copy, no device synchronisation."""

    def __init__(
        self, batch: Any, dims: Dims | None = None, known_lists: Mapping[Path, ListLayout] | None = None, by_length: ByLength | None = None
    ) -> None:
        layout = Layout(checked(dims) if dims else {}, dict(known_lists) if known_lists else {})
        self.batch = batch
        self._root = layout.read(batch)
        self.length = layout.finish(self._root)  # N
        # For the next batch of the kind: a list that only its length decides is read as in this one. A short last batch cannot change it by chance.
        self.known_lists: Mapping[Path, ListLayout] = layout.known
        self._ends = layout.ends
        self.tensors: list[Tensor] = []  # of the whole batch: those that pass whole and those inside per-sample items, too
        self._only_views = True  # plain tensors are cut into views; all else can be copied by its cut
        elements = 0
        for end in self._ends:
            value = end.value
            if end.cut is Cut.NARROW:
                self.tensors.append(value)
                elements += value.numel()
                self._only_views = self._only_views and type(value) is Tensor
                continue
            tensors = tensors_in(value)
            self.tensors += tensors
            self._only_views = self._only_views and end.cut is Cut.WHOLE and not end.copied
            if end.cut is Cut.COPY:
                elements += value.size
            elif end.cut is not Cut.WHOLE:
                elements += sum([tensor.numel() for tensor in tensors])
        self.elements = max(1, -(-elements // self.length))  # of what is cut, per sample, rounded up. Memory is modelled in them
        self.worth = self.length  # in samples of so many elements
        self.sorted = None if by_length is None else by_length.read(batch, self._ends, self.length)  # None: pieces are ranges of the batch
        self.costs = None if self.sorted is None else self.sorted.costs
        if self.costs is not None:
            self.elements, self.worth = self.costs.each[0], self.costs.samples
        self._size, self._ahead = 0, dict[int, Any]()  # pieces of one size that were cut and not handed out yet, by their first sample

    def piece(self, start: int, stop: int) -> Any:
        """Samples `start` to `stop`: `narrow()` views in new containers, so that neither a replay nor the caller sees a `pop`."""
        if self.sorted is not None:
            return self.sorted.piece(self._root, start, stop)
        if not self._only_views:
            return self._root.piece(start, stop)
        size = stop - start
        if size != self._size or start not in self._ahead:
            # With those that probably follow: a cut takes a third of the time in a row with others as between two backwards.
            starts = range(start, min(self.length, start + _AHEAD * size) - size + 1, size)
            pieces = self._root.pieces(starts, size) if len(starts) > 1 else [self._root.piece(start, stop)]
            self._size, self._ahead = size, dict(zip(starts, pieces, strict=True))
        return self._ahead.pop(start)

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
            todo.extend(node.children.values())
        return 0

    def versions(self) -> tuple[int, ...]:
        """The tensors' version counters, to notice an edit in place."""
        try:
            return tuple(map(_VERSION, self.tensors))
        except RuntimeError:  # inference tensors have none
            return tuple([-1 if tensor.is_inference() else tensor._version for tensor in self.tensors])

    def whole_edited(self, since: tuple[int, ...]) -> bool:
        """Whether a tensor that every piece gets whole has been edited since `versions` was called."""
        whole = {id(tensor) for end in self._ends if end.cut is Cut.WHOLE for tensor in tensors_in(end.value)}
        moved = (version != before for version, before in zip(self.versions(), since, strict=True))
        return any(id(tensor) in whole for tensor in compress(self.tensors, moved))


def check_graphs(view: BatchView) -> None:
    """Refuses a batch that pieces cannot share: one whose tensors carry a graph."""
    for tensor in view.tensors:
        if tensor.grad_fn is not None:
            name = next((name for name, each in view.named_tensors() if each is tensor), "")
            raise BatchError(
                f"the tensor {name or 'batch'!r} carries a graph ({tensor.grad_fn.name()}), and each piece would run backward through it again: "
                "compute it inside loss_fn, with its module in model=[...], or detach it"
            )
