"""Where a run takes place: the ways of running out of memory, behind one protocol.

```
kind      what fails                        where                     co-tenant
budget    counted tensors, exactly          any process               takes its share off the limit
shim      torch's allocator (posix_memalign) a child of `run_child`    another process on the same device
rlimit    the kernel, to everybody in here  a child of `run_child`    takes its share off the limit, from inside or outside
cuda      torch's allocator, cudaMalloc     any process               another process that fills the GPU
```
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from elastic_mbs.errors import UsageError

from . import cuda, fence, rlimit
from .budget import BudgetLimit
from .child import Child, ChildError, Crashed, Emit, Failed, Hung, run_child, run_children
from .cuda import Confined, CudaLimit
from .fence import UNLIMITED, Fence
from .limit import MemoryLimit
from .rlimit import ProcessLimit
from .shim import ShimLimit

__all__ = [
    "KINDS",
    "UNLIMITED",
    "BudgetLimit",
    "Child",
    "ChildError",
    "Confined",
    "Crashed",
    "CudaLimit",
    "Emit",
    "Failed",
    "Fence",
    "Hung",
    "MemoryLimit",
    "ProcessLimit",
    "ShimLimit",
    "available",
    "in_child",
    "open_limit",
    "run_child",
    "run_children",
]

_LIMITS: dict[str, Callable[..., MemoryLimit]] = {"budget": BudgetLimit, "shim": ShimLimit, "rlimit": ProcessLimit, "cuda": CudaLimit}
_TROUBLES: dict[str, Callable[[], str | None]] = {"budget": lambda: None, "shim": fence.trouble, "rlimit": rlimit.trouble, "cuda": cuda.trouble}

KINDS = tuple(_LIMITS)
"""Kinds of worlds."""


def available(kind: str) -> str | None:
    """Why a kind of world cannot be had on this machine, in words; None if it can.

    Raises:
        UsageError: there is no such kind.
    """
    return _TROUBLES[_checked(kind)]()


def in_child(kind: str) -> bool:
    """Whether a world of this kind has to be opened in a process of its own, by `run_child`."""
    return _checked(kind) in {"shim", "rlimit"}


def open_limit(kind: str, **options: Any) -> MemoryLimit:
    """A world of this kind, not entered yet.

    Args:
        kind: one of `KINDS`.
        options: as the world's class takes them.

    Raises:
        UsageError: there is no such kind, or it cannot be had here.
    """
    problem = available(kind)
    if problem is not None:
        raise UsageError(problem)
    return _LIMITS[kind](**options)


def _checked(kind: str) -> str:
    if kind not in _LIMITS:
        raise UsageError(f"there is no world {kind!r}; one of {', '.join(KINDS)}")
    return kind
