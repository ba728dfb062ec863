"""The adapter to what torch keeps to itself, or promises to nobody. One test holds all of it.

tests/distributed/test_torch_private.py is the contract.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import ProcessGroupGloo, Store, Work
from torch.nn.parallel import DistributedDataParallel as DDP


def comm_hook(ddp: DDP) -> str:
    """Return the name of the hook that takes the place of DDP's sums, or ""."""
    logged: dict[str, Any] = ddp._get_ddp_logging_data() if ddp.logger is not None else {}
    return str(logged.get("comm_hook", ""))


def has_buffer_hook(ddp: DDP) -> bool:
    """Return whether a hook takes the place of DDP's broadcast of buffers."""
    return hasattr(ddp, "buffer_hook")


def is_joining(ddp: DDP) -> bool:
    """Return whether `with ddp.join():` is in force."""
    return bool(ddp._join_config.enable)


def is_mixed(ddp: DDP) -> bool:
    """Return whether DDP casts parameters by itself."""
    return ddp.mixed_precision is not None


def delays_parameters(ddp: DDP) -> bool:
    """Return whether DDP sums some parameters in hooks of their own."""
    return bool(ddp._delay_all_reduce_params)


def ignored(ddp: DDP) -> set[str]:
    """Return the names of parameters and buffers that DDP leaves to each rank."""
    return set(ddp.parameters_to_ignore)


def sends_buffers(ddp: DDP) -> bool:
    """Return whether buffers are to be those of rank 0."""
    return bool(ddp.broadcast_buffers)


def wrapper_in_forward() -> DDP | None:
    """Return the DDP wrapper whose forward runs now."""
    found: DDP | None = DDP._active_ddp_module
    return found


def silence(ddp: DDP) -> None:
    """Make a call of the wrapper a call of the module inside: an attribute precedes a method."""
    vars(ddp)["forward"] = ddp.module


def unsilence(ddp: DDP) -> None:
    """Undo `silence`. Can be repeated."""
    vars(ddp).pop("forward", None)


def store_of(group: dist.ProcessGroup) -> Store:
    """Return the store that the ranks of a group share."""
    found = getattr(group, "get_group_store", None)
    if found is not None:
        store: Store = found()
        return store
    return dist.distributed_c10d._world.pg_map[group][1]


def gloo_group(store: Store, rank: int, size: int, seconds: float) -> ProcessGroupGloo:
    """Return a group of gloo over the keys of a store, which no name of torch's stands before.

    Raises:
        RuntimeError: another rank did not connect.
    """
    return ProcessGroupGloo(store, rank, size, timedelta(seconds=seconds))


def all_gather(group: ProcessGroupGloo, everyone: list[torch.Tensor], mine: torch.Tensor) -> Work:
    """Begin to put every rank's tensor in `everyone`. No dispatch mode sees it."""
    gather: Callable[..., Work] = group.allgather  # type: ignore[attr-defined]
    with unseen():
        return gather([everyone], [mine])


def is_over(work: Work, seconds: float) -> bool:
    """Wait for a collective of gloo for some seconds; return whether it is over.

    Raises:
        RuntimeError: it has failed: the connection to another rank is gone.
    """
    limit = timedelta(seconds=seconds)
    try:
        work.wait(limit)
    except RuntimeError:
        if not work.is_completed():
            return False
        work.wait(limit)  # it ended just now, or it raises what has ended it
    return True


def unseen() -> AbstractContextManager[object]:
    """Return a block whose operations no dispatch mode sees.

    Operations that allocate nothing are no place for an error that a test injects: one rank would
    leave the others waiting.
    """
    guard: AbstractContextManager[object] = torch._C._DisableTorchDispatch()
    return guard


def sharded(module: nn.Module) -> str | None:
    """Return the name of a parameter that is one shard of a larger one, or None."""
    for name, parameter in module.named_parameters():
        if hasattr(parameter, "device_mesh"):  # a DTensor
            return name
    return None
