"""A batch of any shape as N samples: its length, its pieces, its tensors. How its values are read is in `elastic_mbs.batch.layout`.

Pieces hold `narrow()` views (nothing is copied) in new containers of the same types, so that neither a replay nor the caller sees a `pop`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from elastic_mbs.batch.containers import Path, dotted, lookup, map_tensors, register_splitter, tensors_in
from elastic_mbs.batch.join import join
from elastic_mbs.batch.layout import Plan, call, disagreement, line, nothing_to_cut, transposed
from elastic_mbs.batch.node import Cut, Node
from elastic_mbs.batch.splitters import Dims, Reading, checked, fields, items, type_name, whole
from elastic_mbs.errors import BatchError

__all__ = ["BatchView", "Dims", "Reading", "fields", "items", "join", "map_tensors", "register_splitter", "whole"]


class BatchView:
    """A batch as N samples. Construction looks at shapes only: no copy, no device synchronisation.

    Args:
        batch: tensor, numpy array, list, tuple, namedtuple, mapping, dataclass or registered type, nested at will.
        dims: what the shapes do not say: `{"position_ids": 1} | whole("mask") | items("images")`. A key is a name (at any depth), a dotted path, an
            index (from the root), or `""` for the batch itself; the most specific one holds. A dimension on a container holds for its tensors.
        readings: `readings` of an earlier view of a batch of the same kind. A list that only its lengths tell apart keeps the reading that it had,
            so that neither a piece nor a short last batch can be taken for something else by chance.

    Attributes:
        batch: the batch as it was given.
        length: N, the number of samples.
        readings: how the lists were read that could have been items or fields, by path.
        unused: keys of `dims` that this batch does not have (perhaps a typing error, perhaps an optional field).
        doubt: a sentence for a warning when the reading chosen is not the only one that fits, else None.

    Raises:
        BatchError: lengths that disagree, an empty batch, nothing to cut, two readings, or a type that cannot be cut.
    """

    __slots__ = ("_elements", "_leaves", "_root", "_tensors", "_versioned", "batch", "doubt", "length", "readings", "unused")

    def __init__(self, batch: Any, dims: Dims | None = None, readings: Mapping[Path, Reading] | None = None) -> None:
        self._elements: int | None = None
        self._versioned: list[Tensor] | None = None
        self._tensors: list[Tensor] | None = None
        self.batch = batch
        said = checked(dims) if dims else {}
        plan = Plan(said, set(), readings or {})
        root = plan.build(batch)
        self.doubt = None
        sizes = {leaf.size for leaf in plan.leaves}
        if plan.open:
            self.doubt = None if sizes else plan.doubt()
            plan.settle(-1 if not sizes else sizes.pop() if len(sizes) == 1 else None)
            sizes = {leaf.size for leaf in plan.leaves}
        if plan.tuples and len(sizes) == 1:
            plan.settle_tuples(next(iter(sizes)))
            sizes = {leaf.size for leaf in plan.leaves}
        self.unused = tuple(key for key in said if key not in plan.used)
        if len(sizes) != 1:
            raise BatchError(disagreement(batch, plan.leaves, self.unused) if sizes else nothing_to_cut(batch))
        self.length = sizes.pop()
        if self.length == 0:
            raise BatchError(f"the batch is empty: {line(plan.leaves[0])}\n  skip it before the call")
        if not said:
            check_samples_as_fields(root)
        if self.doubt is None and not said:
            self.doubt = transposed(root, self.length)
        self.readings = plan.readings
        self._root = root
        self._leaves = plan.leaves

    def __len__(self) -> int:
        return self.length

    @property
    def elements(self) -> int:
        """Elements of the tensors that are cut, per sample, rounded up; at least 1. What memory is modelled in."""
        if self._elements is None:
            total = 0
            for leaf in self._leaves:
                total += leaf.value.size if leaf.cut is Cut.INDEX else sum(tensor.numel() for tensor in tensors_in(leaf.value))
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
            self._tensors = list(tensors_in(self.batch))
        return self._tensors

    def named_tensors(self) -> list[tuple[str, Tensor]]:
        """(dotted path, tensor) for the tensors that are fields of the batch, those inside per-sample items left out."""
        found: list[tuple[str, Tensor]] = []
        todo = [self._root]
        while todo:
            node = todo.pop()
            if isinstance(node.value, Tensor):
                found.append((dotted(node.path), node.value))
            todo.extend(reversed(node.children))
        return found

    def dim_of(self, value: Any) -> int | None:
        """The dimension along which this very value of the batch is cut: 0 for no part of the batch, None for a container of fields."""
        todo = [self._root]
        while todo:
            node = todo.pop()
            if node.value is value and node.cut is not Cut.WHOLE:
                return None if node.cut is Cut.FIELDS else node.dim
            todo.extend(node.children if node.cut is Cut.FIELDS else ())
        return 0

    def versions(self) -> tuple[int, ...]:
        """The tensors' version counters, to notice an edit in place. Inference tensors have none."""
        if self._versioned is None:
            self._versioned = [tensor for tensor in self.tensors() if not tensor.is_inference()]
        return tuple([tensor._version for tensor in self._versioned])

    def devices(self) -> set[torch.device]:
        """The devices that the tensors are on."""
        return {tensor.device for tensor in self.tensors()}

    def leaf(self, key: str | int) -> Tensor:
        """The tensor that a name, a dotted path or an index means.

        Raises:
            BatchError: there is none, or more than one, or it is no tensor.
        """
        try:
            value = lookup(self.batch, key)
        except LookupError as error:
            raise BatchError(str(error)) from error
        if not isinstance(value, Tensor):
            raise BatchError(f"{key!r} is of type {type_name(type(value))}, not a tensor")
        return value


_MANY = 7  # tensors of one shape in a list that are still taken as fields: ids, masks and labels of a text are some, a picture's crops more


def check_samples_as_fields(root: Node) -> None:
    """Refuses a list or tuple of so many alike tensors that they are probably the samples."""
    if type(root.value) not in (list, tuple) or len(root.children) <= _MANY or any(child.cut is not Cut.NARROW for child in root.children):
        return
    first = root.children[0].value
    if all((child.value.shape, child.value.dtype) == (first.shape, first.dtype) for child in root.children):
        n, rows, kind = len(root.children), first.shape[0], type(root.value).__name__
        raise BatchError(
            f"the batch is a {kind} of {n} tensors of shape {tuple(first.shape)}: {n} fields of {rows} samples each, or {n} samples?\n"
            f"  one sample each: {call('items', ())}\n  fields: {call('fields', ())}"
        )
