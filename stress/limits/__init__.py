"""Memory limits: the ways of running out of memory, behind one interface.

```
kind      what fails                        where                     co-tenant
budget    counted tensors, exactly          any process               takes its share off the limit
shim      torch's allocator (posix_memalign) a child of `run_child`    takes its share off the
limit; others may train beside it rlimit    the kernel, for the whole process a child of `run_child`
takes its share off the limit, from inside or outside cuda      torch's allocator, cudaMalloc
any process               another process that fills the GPU simcuda   the same on a simulated
device   a process under `simcuda`  likewise
```
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
    """Why a kind of limit cannot be had on this machine, in words; None if it can."""
    return _LIMITS[kind][1]()


def check_kind(kind: str) -> None:
    """UsageError where a kind of limit cannot be had on this machine."""
    problem = available(kind)
    if problem is not None:
        raise UsageError(f"--kind {kind} cannot be had here: {problem}")


def in_child(kind: str) -> bool:
    """Whether a limit of this kind has to be opened in a process of its own, by `run_child`."""
    return kind in {"shim", "rlimit"}


def open_limit(kind: str, **options: Any) -> MemoryLimit:
    """A limit of this kind with its class's options, not entered yet.

    UsageError where it cannot be had.
    """
    problem = available(kind)
    if problem is not None:
        raise UsageError(problem)
    return _LIMITS[kind][0](**options)
