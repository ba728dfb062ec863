"""The values that an optimizer's step will change, kept so that a step that failed half-way can be taken back.

A failed step leaves what its operations did before: moments that moved while the parameters did not, states of which one tensor was made and another
was not. Calling `step()` again then is wrong more often than not (shared/reference/autograd.md, "optimizer.step()").
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from elastic_mbs.memory.budget import on_host

_BLOCK = 64 * 2**20
"""Bytes that are copied in one go: a copy of its own for each of a thousand tensors would cost more than the step, one for all of them would need a
piece of memory that large."""

_PLAIN = (bool, int, float, str, type(None))
_OWN = frozenset({"state", "param_groups", "defaults"})
"""Attributes of every optimizer that are looked at by themselves. Those with hooks in them hold no state."""


class Undo:
    """What one step of an optimizer can change, and copies of it.

    Args:
        optimizer: with its gradients there.
        foreign: whether it is no optimizer of torch's, which may change gradients, and keep state in attributes and in optimizers that it wraps.
        values: whether copies are taken of what is large. False for a step that works in place alone and allocates nothing, so that memory cannot end
            it half-way.

    Attributes:
        complete: whether copies are taken of everything.
    """

    def __init__(self, optimizer: Optimizer, *, foreign: bool, values: bool = True) -> None:
        self._optimizer = optimizer
        groups = optimizer.param_groups
        self._parameters = [parameter for group in groups for parameter in group["params"]]
        self._grads = [(parameter, parameter.grad) for parameter in self._parameters] if foreign else []
        self._state = {parameter: _renewed(state) for parameter, state in optimizer.state.items()}
        self._groups = [(group, {key: _renewed(value) for key, value in group.items() if key != "params"}) for group in groups]
        kinds = (*_PLAIN, dict, list, tuple, Tensor) if foreign else _PLAIN
        attributes = {name: value for name, value in vars(optimizer).items() if name not in _OWN and "hook" not in name and isinstance(value, kinds)}
        self._attributes = {name: _renewed(value) for name, value in attributes.items()}
        self._copied: list[Tensor] = []
        self._inner = [Undo(value, foreign=True) for value in vars(optimizer).values() if isinstance(value, Optimizer)] if foreign else []
        own = [p for p in self._parameters if p.grad is not None or foreign]
        found = [*own, *(grad for _, grad in self._grads if grad is not None)]
        parts = (*self._state.values(), *(saved for _, saved in self._groups), *self._attributes.values())
        found += [tensor for part in parts for tensor in tensors_in_state(part)]
        unique = {id(tensor): tensor for tensor in found}
        for inner in self._inner:  # an optimizer that wraps another one shares its parameters with it
            unique |= {id(tensor): tensor for tensor in inner._copied}
            inner._copied = []
        self._copied = list(unique.values()) if values else []
        self.complete = values
        self._blocks: list[_Block] = []

    @classmethod
    def of_gradients(cls, optimizer: Optimizer) -> Undo:
        """Of nothing but the gradients."""
        undo = cls(optimizer, foreign=True)
        grads = {id(grad) for _, grad in undo._grads if grad is not None}
        undo._copied = [tensor for tensor in undo._copied if id(tensor) in grads]
        return undo

    @property
    def nbytes(self) -> int:
        """Bytes that the copies take."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self._copied)

    def take(self, *, host: bool, apart: bool = False) -> None:
        """Copies the values, beside the originals or on the host. Changes nothing; after an error it may be called again.

        Args:
            host: on the host.
            apart: each in a piece of memory of its own.
        """
        self._blocks = []
        together = ([tensor] for tensor in self._copied) if apart else _in_blocks(self._copied)
        self._blocks = [_Block(tensors, host=host) for tensors in together]

    def to_host(self) -> None:
        """Moves the copies to the host, block by block."""
        for block in self._blocks:
            block.to_host()

    def restore(self, only: Tensor | None = None) -> None:
        """Puts everything back, in place: no memory is needed for it.

        Args:
            only: just this parameter and its state.
        """
        state = self._optimizer.state
        wanted: set[int] | None = None
        if only is not None:
            wanted = {id(only), *(id(tensor) for tensor in tensors_in_state(self._state.get(only, {})))}
        for parameter in [only] if only is not None else list({**state, **self._state}):
            if parameter not in self._state:
                state.pop(parameter, None)
            elif isinstance(saved := _renewed(self._state[parameter]), dict) and isinstance(present := state[parameter], dict):
                present.clear()
                present.update(saved)
            else:
                state[parameter] = saved
        if only is None:
            for group, saved in self._groups:
                for key in group.keys() - saved.keys() - {"params"}:
                    del group[key]
                group.update(_renewed(saved))
            for name, value in self._attributes.items():
                setattr(self._optimizer, name, _renewed(value))
            for inner in self._inner:
                inner.restore()
            for parameter, grad in self._grads:
                parameter.grad = grad
        for block in self._blocks:
            block.restore(wanted)


class _Block:
    """Copies of a few tensors, one after the other in one piece of memory."""

    def __init__(self, tensors: list[Tensor], *, host: bool) -> None:
        self._tensors = tensors
        self._host = host
        with torch.no_grad(), torch.inference_mode(False), on_host(host):
            if len(tensors) == 1:  # of any layout
                only = tensors[0].detach()
                self._copy = only.to("cpu", copy=True) if host else only.clone()
            elif host:
                self._copy = torch.empty(sum(tensor.numel() for tensor in tensors), dtype=tensors[0].dtype)
                for tensor, piece in self._pieces():
                    piece.copy_(tensor)
            else:
                self._copy = torch.cat([tensor.detach().reshape(-1) for tensor in tensors])

    def _pieces(self) -> Iterator[tuple[Tensor, Tensor]]:
        if len(self._tensors) == 1:
            yield self._tensors[0], self._copy
            return
        start = 0
        for tensor in self._tensors:
            yield tensor, self._copy[start : start + tensor.numel()].view(tensor.shape)
            start += tensor.numel()

    def to_host(self) -> None:
        if not self._host:
            with on_host(True):
                self._copy = self._copy.to("cpu", copy=True)
            self._host = True

    def restore(self, wanted: set[int] | None) -> None:
        with torch.no_grad(), on_host(self._host):
            for tensor, piece in self._pieces():
                if wanted is None or id(tensor) in wanted:
                    tensor.copy_(piece)


def _in_blocks(tensors: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Tensors that can be copied together: of one device and type, and not too many bytes."""
    open_blocks: dict[tuple[torch.device, torch.dtype], tuple[list[Tensor], int]] = {}
    for tensor in tensors:
        size = tensor.numel() * tensor.element_size()
        if tensor.layout is not torch.strided or size >= _BLOCK:
            yield [tensor]
            continue
        key = tensor.device, tensor.dtype
        block, filled = open_blocks.get(key, ([], 0))
        if filled + size > _BLOCK:
            yield block
            block, filled = [], 0
        block.append(tensor)
        open_blocks[key] = block, filled + size
    for block, _ in open_blocks.values():
        yield block


def _renewed(value: Any) -> Any:
    """New containers with the same tensors and numbers in them."""
    if isinstance(value, dict):
        return {key: _renewed(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(_renewed, value))
    return value


def tensors_in_state(value: Any) -> Iterator[Tensor]:
    """The tensors in a parameter's state, which is a dict with torch's optimizers and anything with others."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_in_state(item)
    elif type(value) in (list, tuple):
        for item in value:
            yield from tensors_in_state(item)
