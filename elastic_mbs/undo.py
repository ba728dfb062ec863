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


class Undo:
    """What one step of an optimizer can change, and copies of it.

    Args:
        optimizer: with its gradients there.
        gradients: whether the step may change gradients too; torch's own optimizers do not.
        values: whether copies are taken of what is large. False for a step that works in place alone and allocates nothing, so that memory cannot end
            it half-way.

    Attributes:
        complete: whether copies are taken of everything.
    """

    def __init__(self, optimizer: Optimizer, *, gradients: bool, values: bool = True) -> None:
        self._optimizer = optimizer
        groups = optimizer.param_groups
        self._parameters = [parameter for group in groups for parameter in group["params"]]
        self._grads = [(parameter, parameter.grad) for parameter in self._parameters] if gradients else []
        self._state = {parameter: _renewed(state) for parameter, state in optimizer.state.items()}
        self._groups = [(group, {key: _renewed(value) for key, value in group.items() if key != "params"}) for group in groups]
        self._attributes = {name: value for name, value in vars(optimizer).items() if isinstance(value, _PLAIN)}
        own = [p for p in self._parameters if p.grad is not None or gradients]
        found = [*own, *(grad for _, grad in self._grads if grad is not None)]
        found += [tensor for part in (*self._state.values(), *(saved for _, saved in self._groups)) for tensor in _tensors(part)]
        unique = list({id(tensor): tensor for tensor in found}.values())
        self._copied = unique if values else []
        self.complete = values
        self._blocks: list[_Block] = []

    @classmethod
    def of_gradients(cls, optimizer: Optimizer) -> Undo:
        """Of nothing but the gradients."""
        undo = cls(optimizer, gradients=True)
        grads = {id(grad) for _, grad in undo._grads if grad is not None}
        undo._copied = [tensor for tensor in undo._copied if id(tensor) in grads]
        return undo

    @property
    def nbytes(self) -> int:
        """Bytes that the copies take."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self._copied)

    def take(self, *, host: bool) -> None:
        """Copies the values, beside the originals or on the host. Changes nothing; after an error it may be called again."""
        self._blocks = []
        self._blocks = [_Block(tensors, host=host) for tensors in _in_blocks(self._copied)]

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
            wanted = {id(only), *(id(tensor) for tensor in _tensors(self._state.get(only, {})))}
        for parameter in [only] if only is not None else list(state):
            if parameter not in self._state:
                state.pop(parameter, None)
            else:
                present = state[parameter]
                present.clear()
                present.update(_renewed(self._state[parameter]))
        if only is None:
            for group, saved in self._groups:
                for key in group.keys() - saved.keys() - {"params"}:
                    del group[key]
                group.update(_renewed(saved))
            for name, value in self._attributes.items():
                setattr(self._optimizer, name, value)
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


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)
    elif type(value) in (list, tuple):
        for item in value:
            yield from _tensors(item)
