"""Memory limits: the ways of running out of memory, behind one interface.

```
kind     the allocator that fails            where
budget   counted tensors, exactly            any process
shim     torch's (posix_memalign)            a child of `run_child`; others may train beside it
rlimit   the kernel's, of the whole process  a child of `run_child`
cuda     torch's, cudaMalloc                 any process
simcuda  the same on a simulated device      a process under `simcuda`
```

The co-tenant takes its share off the limit. On a GPU, simulated or not, it is another process that
fills the device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from elastic_mbs.errors import UsageError

from . import cuda, fence, rlimit, simcuda
from .budget import BudgetLimit
from .child import Child, ChildError, Emit, Line, run_child, run_children
from .cuda import Confined, CudaLimit
from .fence import Fence, ShimLimit
from .limit import MemoryLimit, switch_onednn_off
from .rlimit import ProcessLimit

__all__ = [
    "KINDS",
    "ON_GPU",
    "BudgetLimit",
    "Child",
    "ChildError",
    "Confined",
    "CudaLimit",
    "Emit",
    "Fence",
    "Line",
    "MemoryLimit",
    "ProcessLimit",
]
__all__ += [
    "ShimLimit",
    "available",
    "check_kind",
    "in_child",
    "open_limit",
    "run_child",
    "run_children",
    "switch_onednn_off",
]

_LIMITS: dict[str, tuple[Callable[..., MemoryLimit], Callable[[], str | None]]] = {
    "budget": (BudgetLimit, lambda: None),
    "shim": (ShimLimit, fence.trouble),
    "rlimit": (ProcessLimit, rlimit.trouble),
    "cuda": (CudaLimit, cuda.trouble),
    "simcuda": (CudaLimit, simcuda.trouble_here),
}
KINDS = tuple(_LIMITS)
ON_GPU = ("cuda", "simcuda")


def available(kind: str) -> str | None:
    """Return why a kind of limit cannot be had on this machine, in words; None if it can."""
    return _LIMITS[kind][1]()


def check_kind(kind: str) -> None:
    """Refuse a kind of limit that cannot be had on this machine.

    Raises:
        UsageError: it cannot be had.
    """
    problem = available(kind)
    if problem is not None:
        raise UsageError(f"--kind {kind} cannot be had here: {problem}")


def in_child(kind: str) -> bool:
    """Return whether a limit of this kind has to be opened in its own process, by `run_child`."""
    return kind in {"shim", "rlimit"}


def open_limit(kind: str, **options: Any) -> MemoryLimit:
    """Return a limit of this kind with its class's options, not entered yet.

    Raises:
        UsageError: it cannot be had.
    """
    problem = available(kind)
    if problem is not None:
        raise UsageError(problem)
    return _LIMITS[kind][0](**options)
