"""The adapter to what torch keeps to itself, or promises to nobody. One test holds all of it.

tests/distributed/test_torch_private.py is the contract.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import ProcessGroupGloo, Store, Work
from torch.nn.parallel import DistributedDataParallel as DDP

if TYPE_CHECKING:  # it takes half a second, and only sharded models need it
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy


Group = dist.ProcessGroup | ProcessGroupGloo  # one of torch's, or of `gloo_group`


def comm_hook(ddp: DDP) -> str:
    """Return the name of the hook that takes the place of DDP's sums, or ""."""
    logged: dict[str, Any] = ddp._get_ddp_logging_data() if ddp.logger is not None else {}
    return str(logged.get("comm_hook", ""))


def has_comm_hooks(ddp: DDP) -> bool:
    """Return whether `register_comm_hook` was called. Cheap, and blind to torch's built-in ones."""
    return bool(ddp._comm_hooks)


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


def communicates(ddp: DDP) -> bool:
    """Return whether a forward of the wrapper sends buffers, or its backward sums gradients."""
    sums = torch.is_grad_enabled() and ddp.require_backward_grad_sync
    return sums or bool(ddp.will_sync_module_buffers())


def sums_in_python(ddp: DDP) -> bool:
    """Return whether hooks in Python sum each gradient (`optimize_ddp = "python_reducer"`)."""
    return bool(ddp._use_python_reducer)


def parameters_of(ddp: DDP) -> list[nn.Parameter]:
    """Return the parameters that were the same on all ranks when the wrapper was made."""
    found: list[nn.Parameter] = ddp._module_parameters
    return found


def has_own_forward(ddp: DDP) -> bool:
    """Return whether a call of the wrapper runs another forward than DDP's."""
    return "forward" in vars(ddp) or type(ddp).forward is not DDP.forward


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
    """Make a call of the wrapper a call of the module inside: an attribute precedes a method.

    A forward before, of which no backward came, has told DDP's own hooks to sum in the next one.
    """
    if torch.is_grad_enabled():
        ddp.reducer._reset_state()
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


def all_reduce(group: Group, tensor: torch.Tensor) -> Work:
    """Begin to sum a tensor over the ranks of a group."""
    if isinstance(group, ProcessGroupGloo):
        begin: Callable[..., Work] = group.allreduce  # type: ignore[attr-defined]
        return begin([tensor])
    work: Work = dist.all_reduce(tensor, group=group, async_op=True)
    return work


def broadcast(group: Group, tensor: torch.Tensor) -> Work:
    """Begin to put the tensor of a group's first rank in everybody's."""
    if isinstance(group, ProcessGroupGloo):
        begin: Callable[..., Work] = group.broadcast  # type: ignore[attr-defined]
        return begin(tensor, 0)
    work: Work = dist.broadcast(tensor, group_src=0, group=group, async_op=True)
    return work


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


# ---------------------------------------------------------------------- fully_shard


def precision_of(unit: FSDPModule) -> MixedPrecisionPolicy:
    """Return the types that `fully_shard` was given for a unit."""
    policy: MixedPrecisionPolicy = _state_of(unit)._mp_policy
    return policy


def _state_of(unit: FSDPModule) -> Any:
    return unit._get_fsdp_state()


def sums_of_its_own(unit: FSDPModule) -> str:
    """Return the setting by which a unit sums its gradients in another way, or ""."""
    state = _state_of(unit)
    groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
    settings = {
        "_all_reduce_hook": "set_all_reduce_hook",
        "gradient_divide_factor": "set_gradient_divide_factor",
    }
    for group in groups:
        for name, method in settings.items():
            if getattr(group, name, None) is not None:
                return method
    return ""


def is_of_fsdp(hook: object) -> bool:
    """Return whether a forward hook of a module is one of `fully_shard`."""
    return str(getattr(hook, "__module__", "")).startswith("torch.distributed.fsdp")


def forward_methods(unit: FSDPModule) -> list[str]:
    """Return the methods that `register_fsdp_forward_method` has wrapped."""
    return [
        name
        for name, value in vars(unit).items()
        if "register_fsdp_forward_method" in _code_name(value)
    ]


def silence_methods(
    unit: FSDPModule, before: Callable[..., object], after: Callable[..., object]
) -> None:
    """Have the methods that `register_fsdp_forward_method` has wrapped call these around them."""
    vars(_state_of(unit)).update(_pre_forward=before, _post_forward=after)


def unsilence_methods(unit: FSDPModule) -> None:
    """Undo `silence_methods`. Can be repeated."""
    for name in ("_pre_forward", "_post_forward"):
        vars(_state_of(unit)).pop(name, None)


def _code_name(value: object) -> str:
    code = getattr(getattr(value, "__func__", None), "__code__", None)
    return str(getattr(code, "co_qualname", ""))


def gathers_by_itself(local: torch.Tensor) -> bool:
    """Return whether a shard has an extension that decides what is gathered (float8)."""
    return hasattr(local, "fsdp_pre_all_gather")


def begin_gather(whole: torch.Tensor, part: torch.Tensor, group: dist.ProcessGroup) -> Work:
    """Begin to put the parts of all ranks of a group, one after the other, in `whole`."""
    # renamed in torch 2.13
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    work: Work = gather(whole, part, group=group, async_op=True)
    return work


def begin_scatter(
    part: torch.Tensor,
    whole: torch.Tensor,
    group: dist.ProcessGroup,
    op: dist.ReduceOp | dist.ReduceOp.RedOpType = dist.ReduceOp.SUM,
) -> Work:
    """Begin to put this rank's part of the sum of all `whole` in `part`."""
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    work: Work = scatter(part, whole, op=op, group=group, async_op=True)
    return work


# ---------------------------------------------------------------------- fully_shard in lock-step


def collectives_of(unit: FSDPModule) -> list[type]:
    """Return the kinds of the collectives that a unit makes."""
    groups = _state_of(unit)._fsdp_param_groups
    return [type(each) for g in groups for each in (g._all_gather_comm, g._reduce_scatter_comm)]


def make_ready(root: FSDPModule) -> None:
    """Do what the first forward of `fully_shard` does before all else. Can be repeated."""
    _state_of(root)._lazy_init()


def shards_and_wholes(unit: FSDPModule) -> list[tuple[torch.Tensor, torch.Tensor | None]]:
    """Return the parameters of a unit: the shard, and the whole once it was gathered."""
    return [
        (each.sharded_param, getattr(each, "_unsharded_param", None))
        for group in _state_of(unit)._fsdp_param_groups
        for each in group.fsdp_params
    ]


def drop_whole_gradients(unit: FSDPModule) -> None:
    """Drop the gradients of whole parameters, which `reset_iter_state` leaves."""
    for group in _state_of(unit)._fsdp_param_groups:
        for each in group.fsdp_params:
            each.unsharded_accumulated_grad = None
    for _, whole in shards_and_wholes(unit):
        if whole is not None:
            whole.grad = None


def leaves_sums_out(unit: FSDPModule) -> bool:
    """Return whether `set_requires_gradient_sync(False)` was called on a unit."""
    return any(not g.reduce_grads for g in _state_of(unit)._fsdp_param_groups)


def sums_unused(unit: FSDPModule) -> bool:
    """Return whether a unit sums zeros for parameters without a gradient."""
    return any(g.reduce_scatter_unused_params for g in _state_of(unit)._fsdp_param_groups)


def add_no_gradient(unit: FSDPModule) -> None:
    """Take part in the sums of a unit's gradients with zeros, as after a backward without any."""
    for group in _state_of(unit)._fsdp_param_groups:
        group.post_backward()
        group.finalize_backward()
