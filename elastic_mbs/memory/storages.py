"""The storages that hold tensors' data: which tensors there are, and giving back what an operation has enlarged."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from elastic_mbs.errors import UsageError

_RESIZES = frozenset({"aten::resize_", "aten::resize_as_", "aten::_resize_output_", "aten::set_"})
_written: dict[Any, tuple[tuple[Any, ...], bool]] = {}  # by operation: the arguments that it writes to, and whether it can resize strided ones


class Enlarged:
    """What an operation may enlarge. If it is refused, no trace of it may stay: what is run again would be done twice.

    A sparse COO tensor is replaced by a twin, because what enlarges it in place gives it new parts; a strided one can be given its old storage and
    size back. CSR and its like resize their parts in place: they stay as they are.
    """

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any] | None, places: tuple[Any, ...]) -> None:
        self.args: Any = list(args)
        self.kwargs = dict(kwargs or {})
        self._twins: list[tuple[Tensor, Tensor]] = []
        self._strided: list[tuple[Tensor, torch.UntypedStorage, int, tuple[Any, ...]]] = []
        for place in places:
            holder: Any = self.kwargs if isinstance(place, str) else self.args
            tensor = holder[place]
            if tensor.layout is torch.strided:
                storage = tensor.untyped_storage()
                self._strided.append((tensor, storage, storage.nbytes(), (tensor.storage_offset(), tensor.size(), tensor.stride())))
            elif tensor.layout is torch.sparse_coo:
                holder[place] = tensor.detach()
                self._twins.append((tensor, holder[place]))

    @classmethod
    def by(cls, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Enlarged | None:
        """What `func` may enlarge, or None."""
        known = _written.get(func)
        if known is None:
            known = _written[func] = _writes_of(func)
        places, resizes = known
        return cls(args, kwargs, places) if places and (resizes or args[places[0]].layout is torch.sparse_coo) else None

    def put_back(self) -> list[Tensor]:
        """Makes the strided tensors what they were; returns them."""
        for tensor, storage, nbytes, geometry in self._strided:
            tensor.set_(storage, *geometry)
            if storage.nbytes() > nbytes:
                storage.resize_(nbytes)
        return [tensor for tensor, *_ in self._strided]

    def keep(self, out: Any) -> Any:
        """Lets the sparse tensors have what was done to their twins; returns the operation's result with them in it."""
        for tensor, twin in self._twins:
            tensor.data = twin
            out = tensor if out is twin else out
        return out


def _writes_of(func: Any) -> tuple[tuple[Any, ...], bool]:
    if not isinstance(func, torch._ops.OpOverload):  # a higher-order operator
        return (), False
    written = [
        (place, argument) for place, argument in enumerate(func._schema.arguments) if argument.alias_info is not None and argument.alias_info.is_write
    ]
    places = tuple([argument.name if argument.kwarg_only else place for place, argument in written if str(argument.type) == "Tensor"])
    return places, func._schema.name in _RESIZES or any(isinstance(place, str) for place in places)


def parts_of(tensor: Tensor) -> list[Tensor]:
    """The plain tensors in which a tensor without a storage of its own keeps its data."""
    layout = tensor.layout
    if layout is torch.sparse_coo:
        return [tensor._indices(), tensor._values()]
    if layout in (torch.sparse_csr, torch.sparse_bsr):
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    if layout in (torch.sparse_csc, torch.sparse_bsc):
        return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    return []


def tensors_of(item: Any) -> Iterable[Tensor]:
    """The plain tensors of a module, an optimizer, a tensor, or a container of those.

    Raises:
        UsageError: it is none of these.
    """
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
