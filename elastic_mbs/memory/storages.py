"""The plain tensors, and so the storages, that hold the data of what a user has."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from elastic_mbs.errors import UsageError

_BY_ROW, _BY_COLUMN = ("crow_indices", "col_indices", "values"), ("ccol_indices", "row_indices", "values")
_PARTS = {torch.sparse_coo: ("_indices", "_values"), torch.sparse_csr: _BY_ROW, torch.sparse_bsr: _BY_ROW}
_PARTS |= {torch.sparse_csc: _BY_COLUMN, torch.sparse_bsc: _BY_COLUMN}


def parts_of(tensor: Tensor) -> list[Tensor]:
    """The plain tensors in which a tensor without a storage of its own keeps its data."""
    return [getattr(tensor, part)() for part in _PARTS.get(tensor.layout, ())]


def tensors_of(item: Any) -> Iterable[Tensor]:
    """The plain tensors of a module, an optimizer, a tensor, or a container of those; UsageError for anything else."""
    if isinstance(item, Tensor):
        if is_traceable_wrapper_subclass(item):
            yield from tensors_of([getattr(item, name) for name in item.__tensor_flatten__()[0]])
        elif type(item).__torch_dispatch__ is Tensor.__torch_dispatch__:
            yield item
        if item.is_leaf and item.grad is not None:
            yield from tensors_of(item.grad)
    elif isinstance(item, torch.nn.Module):
        yield from tensors_of([*item.parameters(), *item.buffers()])
    elif isinstance(item, torch.optim.Optimizer):
        state = torch.utils._pytree.tree_leaves([dict(own) for own in item.state.values() if isinstance(own, Mapping)])
        yield from tensors_of([leaf for leaf in state if isinstance(leaf, Tensor)])
    elif isinstance(item, Mapping):
        yield from tensors_of(list(item.values()))
    elif isinstance(item, list | tuple | set | frozenset):
        for value in item:
            yield from tensors_of(value)
    else:
        raise UsageError(f"cannot track {type(item).__name__!r}: give modules, optimizers, tensors, or containers of them")
