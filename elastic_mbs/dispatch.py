"""Dispatch modes, and edits of tensors under them.

A tensor's version tells that something has been written to it; gradients, buffers and batches are
watched by it. Operations on lists (`torch._foreach_mul_` and its kind, which `clip_grad_norm_` and
optimizers use) raise versions below the dispatcher's autograd keys. Under any `TorchDispatchMode`
they are run without those keys, and write without a trace.
"""

from __future__ import annotations

import functools
import importlib
import sys
import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C import _len_torch_dispatch_stack
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    _get_current_dispatch_mode_stack,
)

# integers as wide as a number, whose sum tells of a change that a sum of floats would round away
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@functools.cache
def import_compiler() -> None:
    """Import torch's compiler, as the first operation under any mode does.

    `torch.fx.wrap` keeps its own frame in a cycle during that import, and with it all frames around
    it: a batch in one of them would live on. On a thread of its own nothing is around it.
    """
    if "torch._dynamo" not in sys.modules:
        thread = threading.Thread(target=importlib.import_module, args=("torch._dynamo",))
        thread.start()
        thread.join()


class VersionedMode(TorchDispatchMode):
    """A mode under which every edit in place raises versions, as it does without a mode."""

    # torch 2.8 does not ask, and refuses `torch.cond` and its like under any mode
    supports_higher_order_operators = True

    def __init__(self) -> None:
        import_compiler()
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it untyped

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: Any = (),
        kwargs: Any = None,
    ) -> Any:
        return run(func, args, kwargs)


def run(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> Any:
    """Run an operation inside a mode, and raise the versions that torch does not raise there."""
    if not _edits_lists(func):
        return func(*args, **kwargs) if kwargs else func(*args)
    try:
        return func(*args, **(kwargs or {}))
    finally:  # it may have ended half-way
        for tensor in args[0]:
            _raise_version(tensor)


def hides_edits() -> bool:
    """Return whether a mode of this thread runs operations on lists without raising versions."""
    # Asked for every piece: mostly there is no mode, and the list of them takes longer.
    if not _len_torch_dispatch_stack():
        return False
    return not isinstance(_get_current_dispatch_mode_stack()[-1], VersionedMode)


class VersionsRaised:
    """A block in which edits in place raise versions, whatever modes it is inside of."""

    _mode: VersionedMode | None = None

    def __enter__(self) -> None:
        if hides_edits():
            self._mode = VersionedMode()
            self._mode.__enter__()  # type: ignore[no-untyped-call]  # torch leaves it untyped

    def __exit__(self, *error: object) -> None:
        mode, self._mode = self._mode, None
        # One that the user has left open lies above it, and would be taken off in its place.
        if mode is not None and _get_current_dispatch_mode_stack()[-1:] == [mode]:
            mode.__exit__(*error)  # type: ignore[no-untyped-call]  # torch leaves it untyped


class Contents:
    """The contents of tensors at one moment, each as a number.

    They are needed where versions do not tell of edits (`hides_edits`).
    """

    def __init__(self, tensors: Iterable[Tensor | None]) -> None:
        with _disable_current_modes():
            self._sums = [
                (tensor, _sum_of_bits(tensor))
                for tensor in tensors
                if tensor is not None and _is_plain(tensor)
            ]

    def raise_versions(self) -> None:
        """Raise the versions of the tensors whose contents have changed since, once."""
        sums, self._sums = self._sums, []
        with _disable_current_modes():
            for tensor, before in sums:
                if _sum_of_bits(tensor) != before:
                    _raise_version(tensor)


@functools.cache
def _edits_lists(func: Any) -> bool:
    schema = getattr(func, "_schema", None)  # a higher-order operator has none
    return schema is not None and schema.name.startswith("aten::_foreach_") and schema.is_mutable


def _raise_version(tensor: Tensor) -> None:
    if not tensor.is_inference():  # which has none
        torch.autograd.graph.increment_version(tensor)


def _is_plain(tensor: Tensor) -> bool:
    return (
        type(tensor) is Tensor and tensor.layout is torch.strided and tensor.device.type != "meta"
    )


def _sum_of_bits(tensor: Tensor) -> int:
    numbers = torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor.detach()
    return int(numbers.view(_BITS[numbers.itemsize]).sum(dtype=torch.int64))
