"""Modules with buffers, and the copies that a call makes of them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from elastic_mbs import StepResult
from elastic_mbs.rollback.buffers import BufferCopies

F64 = torch.float64


class Holder(nn.Module):
    """A module with named buffers."""

    def __init__(self, **buffers: Tensor | None) -> None:
        super().__init__()
        for name, tensor in buffers.items():
            self.register_buffer(name, tensor)

    def __getitem__(self, name: str) -> Tensor:
        """The buffer of that name, as a tensor."""
        tensor = self._buffers[name]
        assert tensor is not None
        return tensor


def numbers(*values: float) -> Tensor:
    return torch.tensor(values, dtype=F64)


def learned(*modules: nn.Module) -> BufferCopies:
    """Copies that have seen one clean call in which nothing changed."""
    copies = BufferCopies()
    copies.begin_call(modules)
    copies.end_clean_piece()
    return copies


def clean_piece(copies: BufferCopies, change: Callable[[], object], *, first: bool = False) -> bool:
    if not first:
        copies.begin_piece()
    change()
    return copies.end_clean_piece()


def batch_norm() -> tuple[nn.BatchNorm1d, Callable[[], Tensor]]:
    module = nn.BatchNorm1d(3).double()
    x = torch.randn(8, 3, dtype=F64)
    return module, lambda: module(x)


def values(module: nn.Module) -> dict[str, list[float]]:
    return {name: tensor.tolist() for name, tensor in module.named_buffers()}


def assert_as_by_hand(model: nn.Module, twin: nn.Module, result: StepResult, x: Tensor) -> None:
    """The buffers are those of `twin`, the model as it was before the call, once it has run the committed pieces."""
    for start, stop in result.partition:
        twin(x[start:stop])
    for (name, buffer), wanted in zip(model.named_buffers(), twin.buffers(), strict=True):
        assert torch.allclose(buffer, wanted, rtol=1e-12), name
