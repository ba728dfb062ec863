"""`torch.OutOfMemoryError` at chosen operations: at the n-th, n = 1, 2, …, or from there on."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from elastic_mbs.dispatch import VersionedMode, run


def can_allocate(operation: torch._ops.OpOverload, args: Sequence[Any]) -> bool:
    """Return whether an operation may ask for memory.

    It does if it returns a tensor that is no view of an argument, or works on a sparse tensor.
    """
    if any(isinstance(arg, torch.Tensor) and arg.is_sparse for arg in args):
        return True
    return any(
        returned.alias_info is None and "Tensor" in str(returned.type)
        for returned in operation._schema.returns
    )


class InjectOOM(VersionedMode):
    """A `with` block in which chosen operations, forward and backward, run out of memory.

    Args:
        at: numbers of the operations that fail, from 1; each fails once.
        always_from: every operation from this number on fails (a persistent fault), or None.

    Attributes:
        count: operations that can allocate seen so far.
        hits: names of the operations that failed.
    """

    def __init__(self, at: Iterable[int] = (), always_from: int | None = None) -> None:
        super().__init__()
        self._at = frozenset(at)
        self._always_from = always_from
        self.count = 0
        self.hits: list[str] = []

    def step(self, name: str) -> None:
        """Count one operation.

        Raises:
            torch.OutOfMemoryError: it is this one's turn to fail.
        """
        self.count += 1
        if self.count in self._at or (
            self._always_from is not None and self.count >= self._always_from
        ):
            self.hits.append(name)
            raise torch.OutOfMemoryError(
                f"injected: out of memory. Tried to allocate 1.00 MiB in operation {self.count}, "
                f"{name}"
            )

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: Any = (),
        kwargs: Any = None,
    ) -> Any:
        if isinstance(func, torch._ops.OpOverload) and can_allocate(func, args):
            try:
                self.step(func._schema.name)
            except torch.OutOfMemoryError:
                args, kwargs = (), None  # the error's traceback keeps this frame
                raise
        return run(func, args, kwargs)
