"""The limit on counted tensors: exact, in this process, the same in every run."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Self

import torch
from torch.utils._pytree import tree_leaves

from elastic_mbs.dispatch import VersionedMode, run
from elastic_mbs.events import format_bytes
from elastic_mbs.memory import MemoryBudget

from .limit import HostLimit

_UNLIMITED = 1 << 60


class BudgetLimit(HostLimit):
    """A `MemoryBudget` whose limit is the capacity less the co-tenant's share.

    The share counts at once: bytes that we hold above the limit make the next allocation fail.
    """

    kind = "budget"

    def __init__(self) -> None:
        super().__init__()
        self.budget = MemoryBudget(_UNLIMITED)
        self._blocks = _BlockLimit(self.budget)

    def __enter__(self) -> Self:
        self._undo.enter_context(self._blocks)
        self._undo.enter_context(self.budget)
        return self

    def fragment(self, largest: int | None) -> None:
        self._blocks.largest = largest

    def lift(self) -> None:
        self.fragment(None)
        super().lift()

    def live(self) -> int:
        return self.budget.live

    def failures(self) -> int:
        return self.budget.ooms

    def apply(self) -> None:
        self.budget.limit = (
            _UNLIMITED if self.capacity is None else max(0, self.capacity - self._held)
        )

    def peak_of_interval(self) -> int:
        return self.budget.peak

    def begin_interval(self) -> None:
        self.budget.reset_peak()


class _BlockLimit(VersionedMode):
    """A mode that refuses storages above a size.

    It lies below the budget, so that a storage that it refuses has not been counted.
    """

    def __init__(self, budget: MemoryBudget) -> None:
        super().__init__()
        self._budget = budget
        self.largest: int | None = None

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: Any = (),
        kwargs: Any = None,
    ) -> Any:
        out = run(func, args, kwargs)
        largest = self.largest
        # this thread is inside `on_host` now
        if largest is None or ((mode := self._budget._mode()) is not None and mode.paused > 0):
            return out
        known = {id(storage) for storage in _storages((args, kwargs))}
        for storage in _storages(out):
            if storage.nbytes() > largest and id(storage) not in known:
                self._budget.ooms += 1
                wanted = format_bytes(storage.nbytes())
                raise torch.OutOfMemoryError(
                    f"virtual device out of memory. Tried to allocate {wanted}, in blocks of "
                    f"{format_bytes(largest)} at most."
                )
        return out


def _storages(value: Any) -> Iterator[torch.UntypedStorage]:
    for each in tree_leaves(value):
        if isinstance(each, torch.Tensor):
            # wrapper subclasses and mkldnn tensors have none
            with contextlib.suppress(RuntimeError):
                yield each.untyped_storage()
