"""A limit on the bytes of live tensors: a device that runs out of memory, without the device.

```
   operation ──► __torch_dispatch__ ──► the operation itself ──► outputs
                     │ inputs that are not known yet               │ storages that are not known
                     │                                             │ yet, or have grown
                     ▼                                             ▼
                  counted                                       counted ──► above the limit?
                                                                            drop the outputs, raise
   a storage dies ──► its weak reference goes on a queue ──► settled before anyone reads the count
```

The storages are counted in `live_storages.py`, under a lock. It is re-entrant because a signal
handler or a `__del__` may read a budget.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import TracebackType
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from elastic_mbs.dispatch import VersionedMode, run
from elastic_mbs.errors import MisuseError, UsageError
from elastic_mbs.events import format_bytes
from elastic_mbs.memory.live_storages import LiveStorages
from elastic_mbs.memory.sensor import Headroom, Reading, Usage, parse_bytes

_lock = threading.RLock()  # held to change the counts of any budget
# one for each block that is open, by whatever thread, in the order of entering
_active: list[_CountingMode] = []

_BY_ROW, _BY_COLUMN = (
    ("crow_indices", "col_indices", "values"),
    ("ccol_indices", "row_indices", "values"),
)
_PARTS = {
    torch.sparse_coo: ("_indices", "_values"),
    torch.sparse_csr: _BY_ROW,
    torch.sparse_bsr: _BY_ROW,
}
_PARTS |= {torch.sparse_csc: _BY_COLUMN, torch.sparse_bsc: _BY_COLUMN}


class MemoryBudget:
    """A limit on the bytes of live tensors on one device, which can be moved while training runs.

    Inside the block every operation that brings the live bytes above the limit raises
    `torch.OutOfMemoryError`, as a device's allocator would, in forward and in backward. A test of a
    training loop needs no GPU and no big model:

    ```python
    with MemoryBudget("64MiB", track=(model, optimizer)) as budget:
        train_step(batch)
        budget.limit = "32MiB"      # a co-tenant arrives
        train_step(batch)
    assert budget.ooms == 1
    ```

    Each untyped storage counts once, from the operation that brought it to its end; one that no
    operation brought (`from_numpy`) when first seen. Wrapper subclasses (DTensor, jagged nested
    tensors) count through the plain tensors inside them. Meta and fake tensors, other devices and
    mkldnn tensors do not count. Budgets nest: all of them count, each has its limit. `ElasticMBS`
    inside the block takes it as sensor and meter by itself.

    How it differs from an allocator:

    - The error comes *after* the operation: its outputs are gone, but buffers that it updated and
      random numbers that it drew stay so.
    - Operations in place never raise: the memory that they add (`resize_`, `out=`, a sparse tensor)
      is counted, and fails the next allocation.
    - Temporaries inside an operation are not seen (peaks of convolution nets were up to 6 % low);
      nothing is rounded up or fragmented.
    - Until the error is dropped, its traceback keeps the *inputs* of the failed operation alive:
      retry outside the `except` block.
    - Code under `torch.compile` runs eagerly inside the block: torch switches compilation off under
      a dispatch mode.
    - It counts the threads that entered it, each by its own `with`, and autograd's. In a forked
      child (a DataLoader's worker) nothing counts.
    - It costs about 5 µs for each operation.

    Args:
        limit: bytes, or a string such as `"2GiB"`.
        track: modules, optimizers, tensors (or containers of them) that exist already; see `track`.
        device: device whose storages are counted; a type alone ("cuda") counts all devices of that
            type.
        clock: gives the time stamps of readings, in seconds.

    Attributes:
        ooms: number of times that the limit was passed, so far.
        resets: number of calls of `reset_peak`.
    """

    def __init__(
        self,
        limit: int | str,
        track: Iterable[Any] = (),
        *,
        device: torch.device | str = "cpu",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.device = torch.device(device)
        self.ooms = 0
        self.resets = 0
        self._clock = clock
        self._limit = self._total = parse_bytes(limit)
        self._peak = 0
        self._storages = LiveStorages()
        self.track(
            *(
                [track]
                if isinstance(track, Tensor | torch.nn.Module | torch.optim.Optimizer | Mapping)
                else track
            )
        )

    def covers(self, device: torch.device) -> bool:
        """Return whether tensors on `device` are counted."""
        return device.type == self.device.type and self.device.index in (None, device.index)

    @property
    def limit(self) -> int:
        """Bytes allowed; may be set at any time and from any thread.

        Below `live`, the next allocation fails.
        """
        return self._limit

    @limit.setter
    def limit(self, size: int | str) -> None:
        with _lock:
            self._limit = parse_bytes(size)
            self._total = max(self._total, self._limit)

    @property
    def live(self) -> int:
        """Bytes in live storages, now."""
        with _lock:
            return self._storages.settled()

    @property
    def peak(self) -> int:
        """Most live bytes since `reset_peak`, at the end of any operation that succeeded."""
        return self._peak

    def reset_peak(self) -> None:
        """Start a new interval: the peak is the live bytes now."""
        with _lock:
            self._peak = self.live
            self.resets += 1

    def track(self, *objects: Any) -> None:
        """Count tensors that exist already. Never raises for memory, and keeps no reference.

        Args:
            objects: modules, optimizers, tensors (all with their gradients), and lists, tuples,
                sets or dicts of those.

        Raises:
            UsageError: an object is none of these.
        """
        for item in objects:
            for tensor in _tensors_of(item):
                self._admit(tensor)
        self._check(0, may_refuse=False)

    def read(self) -> Reading:
        """Return the headroom under the limit.

        `total` is the largest limit that was ever set; the limit's distance from it counts as held
        by others.
        """
        with _lock:
            return Headroom(
                max(0, self._limit - self.live),
                self._total,
                self._total - self._limit,
                "budget",
                self._clock(),
            )

    def usage(self) -> Usage:
        """Return live bytes and their peak. A budget has no cache: reserved is allocated."""
        with _lock:
            live = self.live
            return Usage(live, live, self._peak, self._peak, 0)

    @staticmethod
    def current() -> MemoryBudget | None:
        """Return the budget of the innermost open block, entered last by any thread; or None."""
        return next((mode.budget for mode in reversed(_active) if not mode.forked), None)

    def __enter__(self) -> MemoryBudget:
        """Start counting the operations of this thread.

        Raises:
            MisuseError: this thread is inside the budget already.
        """
        if self._mode() is not None:
            raise MisuseError(
                f"{self!r} is already active in this thread: use one `with` block, or a second "
                "MemoryBudget to nest limits"
            )
        mode = _CountingMode(self)
        mode.__enter__()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        _active.append(mode)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Stop counting new storages in this thread; those counted are followed to their end."""
        mode = self._mode()
        if mode is None:
            raise MisuseError(f"{self!r} is not active in this thread, so it cannot be left here")
        _active.remove(mode)
        mode.__exit__(kind, error, traceback)  # type: ignore[no-untyped-call]  # torch leaves it untyped

    def __repr__(self) -> str:
        figures = f"limit={self._limit}, live={self.live}, peak={self._peak}"
        return f"MemoryBudget({figures}, device={str(self.device)!r})"

    def _mode(self) -> _CountingMode | None:
        """Return the mode by which this thread has entered the budget, if it has."""
        return next((mode for mode in _modes_of_this_thread() if mode.budget is self), None)

    def _admit(self, value: Any) -> int:
        """Count the storages in a result or an argument of an operation; return the bytes added."""
        if not isinstance(value, Tensor):
            return sum(map(self._admit, value)) if isinstance(value, list | tuple) else 0
        try:
            storage = value.untyped_storage()
        except RuntimeError:
            return self._admit(_parts_of(value))
        nbytes = storage.nbytes()
        if self._storages.counted(storage) == nbytes or not self.covers(storage.device):
            return 0
        with _lock:
            return self._storages.count(storage, nbytes)

    def _check(self, new: int, *, may_refuse: bool) -> str | None:
        """Return the error's text if `new` bytes pass the limit; else note the peak.

        The bytes are counted already.
        """
        with _lock:
            live = self.live
            if live <= self._limit or not may_refuse:
                self._peak = max(self._peak, live)
                return None
            self.ooms += 1
            wanted, limit, used = map(format_bytes, (new, self._limit, max(0, live - new)))
            return (
                f"virtual device out of memory. Tried to allocate {wanted}. Budget {limit}, of "
                f"which {used} is in use."
            )


def _parts_of(tensor: Tensor) -> list[Tensor]:
    """Return the plain tensors that hold the data of a tensor without a storage of its own."""
    return [getattr(tensor, part)() for part in _PARTS.get(tensor.layout, ())]


def _tensors_of(item: Any) -> Iterable[Tensor]:
    """Yield the plain tensors of a module, an optimizer, a tensor, or a container of those.

    Raises:
        UsageError: the item is none of these.
    """
    if isinstance(item, Tensor):
        if is_traceable_wrapper_subclass(item):
            parts = [getattr(item, name) for name in item.__tensor_flatten__()[0]]
            # a DTensor has its mesh among them
            yield from _tensors_of([part for part in parts if isinstance(part, Tensor)])
        elif type(item).__torch_dispatch__ is Tensor.__torch_dispatch__:
            yield item
        if item.is_leaf and item.grad is not None:
            yield from _tensors_of(item.grad)
    elif isinstance(item, torch.nn.Module):
        yield from _tensors_of([*item.parameters(), *item.buffers()])
    elif isinstance(item, torch.optim.Optimizer):
        state = torch.utils._pytree.tree_leaves(
            [dict(own) for own in item.state.values() if isinstance(own, Mapping)]
        )
        yield from _tensors_of([leaf for leaf in state if isinstance(leaf, Tensor)])
    elif isinstance(item, Mapping):
        yield from _tensors_of(list(item.values()))
    elif isinstance(item, list | tuple | set | frozenset):
        for value in item:
            yield from _tensors_of(value)
    else:
        raise UsageError(
            f"cannot track {type(item).__name__!r}: give modules, optimizers, tensors, or "
            "containers of them"
        )


class _CountingMode(VersionedMode):
    """The counter of one thread's operations; there is one for each entered block.

    Torch keeps its stack of modes per thread.
    """

    def __init__(self, budget: MemoryBudget) -> None:
        super().__init__()
        self.budget = budget
        self.thread = threading.get_ident()
        self.paused = 0  # how many reasons there are not to count
        self.forked = False  # entered by the process that this one was forked from

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: Any = (),
        kwargs: Any = None,
    ) -> Any:
        if types and any(kind.__torch_dispatch__ is not _NO_HANDLER for kind in types):
            # a wrapper subclass runs plain operations inside its own handler, and those come back
            # to this one; fake tensors have no memory, and their handler refuses when it is asked
            # in the place of their mode
            return (
                func(*args, **(kwargs or {}))
                if any(issubclass(kind, FakeTensor) for kind in types)
                else NotImplemented
            )
        if self.paused:
            return run(func, args, kwargs)
        budget = self.budget
        if budget._admit([args, list(kwargs.values())] if kwargs else args):
            budget._check(0, may_refuse=False)
        out = run(func, args, kwargs)
        new = budget._admit(out)
        # While even the upper bound is below peak and limit, the usual case in training, there is
        # nothing to note.
        upper = budget._storages.upper
        if new and (upper > budget._peak or upper > budget._limit):
            refusal = budget._check(new, may_refuse=not _in_place(func))
            if refusal is not None:
                # the error's traceback keeps this frame, which must keep none of the tensors
                args = kwargs = out = None
                raise torch.OutOfMemoryError(refusal)
        return out


_NO_HANDLER = Tensor.__torch_dispatch__


def _in_place(func: Any) -> bool:
    """Return whether all results of an operation are arguments that it writes to.

    Refused after the fact, such an operation would be done twice.
    """
    schema = getattr(func, "_schema", None)  # a higher-order operator has none
    return schema is not None and all(
        value.alias_info is not None and value.alias_info.is_write for value in schema.returns
    )


def _modes_of_this_thread() -> list[_CountingMode]:
    thread = threading.get_ident()
    return [mode for mode in tuple(_active) if mode.thread == thread]


@contextmanager
def on_host(yes: bool = True) -> Iterator[None]:
    """Keep the tensors that this thread makes inside out of every budget.

    They are host memory, and a budget on the CPU stands for a device.
    """
    modes = _modes_of_this_thread() if yes else []
    for mode in modes:
        mode.paused += 1
    try:
        yield
    finally:
        for mode in modes:
            mode.paused -= 1


def makes_host_memory() -> bool:
    """Return whether this thread is inside `on_host`, and a budget leaves out what it makes."""
    return any(mode.paused for mode in _modes_of_this_thread())


def _leave_in_child() -> None:
    """Close every block in a forked child, whose tensors are not on the virtual device."""
    global _lock  # noqa: PLW0603  # a lock of the process's, not of an object's
    _lock = threading.RLock()
    for mode in _active:
        mode.paused += 1
        mode.forked = True


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_in_child)
