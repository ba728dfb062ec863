"""Units of a sharded model (`fully_shard`): finding them, refusals by name, how they keep quiet."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn.parallel import DistributedDataParallel as DDP

from elastic_mbs.batch.containers import map_tensors
from elastic_mbs.distributed import torch_private
from elastic_mbs.distributed.wrappers import (
    OnlyGiven,
    Refusal,
    refuse_wrapper,
    refused_modules,
    wrappers_in,
)
from elastic_mbs.engine.shared.trained_model import TrainedModel
from elastic_mbs.errors import UnsupportedError, UsageError

Hooks = MutableMapping[int, Callable[..., Any]]
# What to do with a module whose parameters are in no unit, in words.
WRAPPER = "apply fully_shard to that and give it in model=[…]"


def units_in(roots: Iterable[nn.Module]) -> list[FSDPModule]:
    """Return every module that `fully_shard` was applied to, the outer ones first."""
    modules = (module for root in roots for module in root.modules())
    return list(dict.fromkeys(module for module in modules if isinstance(module, FSDPModule)))


def as_module(unit: FSDPModule) -> nn.Module:
    """Return a unit as the module that it is, too."""
    assert isinstance(unit, nn.Module)
    return unit


def owners(units: Sequence[FSDPModule]) -> dict[int, FSDPModule]:
    """Return the innermost unit around each parameter, by the parameter's id."""
    # Inner units come later.
    return {id(each): unit for unit in units for each in as_module(unit).parameters()}


# ---------------------------------------------------------------------- refusals


def check(roots: Sequence[nn.Module], units: Sequence[FSDPModule]) -> None:
    """Refuse by name what would not be trained right.

    Raises:
        UnsupportedError: a hook, a mode or a module that needs collectives of its own.
    """
    refused = next(_reasons(roots, units), None)
    if refused is not None:
        raise UnsupportedError(refused)


def _reasons(roots: Sequence[nn.Module], units: Sequence[FSDPModule]) -> Iterator[str]:
    if wrappers_in(roots):
        yield (
            "the model has units of fully_shard and a DistributedDataParallel: for replicas of "
            "shards give fully_shard a mesh of two dimensions (HSDP) and leave the wrapper out"
        )
    for root in roots:
        yield from refused_modules(root)
    yield from _own_sums(units)


def check_again(units: Sequence[FSDPModule], *, in_step: bool = False) -> None:
    """Refuse by name what can come after the runtime was made.

    Args:
        units: the modules that `fully_shard` was applied to.
        in_step: they sum gradients by themselves.

    Raises:
        UnsupportedError: a unit sums gradients in another way, or not at all.
    """
    refused = next(_own_sums(units), None)
    if refused is not None:
        raise UnsupportedError(refused)
    if in_step and any(map(torch_private.leaves_sums_out, units)):
        raise UnsupportedError(
            "set_requires_gradient_sync(False) leaves out the sums of gradients, which each call "
            "makes with mode='lockstep': set it to True"
        )


def _own_sums(units: Sequence[FSDPModule]) -> Iterator[str]:
    for unit in units:
        setting = torch_private.sums_of_its_own(unit)
        if setting:
            yield (
                f"{setting} of {type(unit).__name__} changes how gradients are summed, which is "
                "done here, each rank by its share of the counts: leave it out"
            )


def check_parameter(name: str, parameter: Tensor) -> DTensor | None:
    """Return a parameter as the shard that it is; None for a frozen one that every rank has.

    Raises:
        UnsupportedError: it is placed in a way that is not known here.
        UsageError: it has no values yet.
    """
    if not isinstance(parameter, DTensor):
        if parameter.requires_grad:
            raise UnsupportedError(
                f"the parameter {name!r} is trained and not sharded, so its gradient would differ "
                "from rank to rank: apply fully_shard to the module that holds it, to the whole "
                "model last"
            )
        return None
    places = parameter.placements
    shard, replicas = places[-1], places[:-1]
    known = type(shard) is Shard and [type(each) for each in replicas] in ([], [Replicate])
    if not known:
        raise UnsupportedError(
            f"the parameter {name!r} is placed as {places}: only fully_shard over a mesh of one "
            "dimension, or of two (HSDP), is supported, without tensor parallelism"
        )
    mesh = parameter.device_mesh
    if mesh.ndim == 2 and mesh.size() != dist.get_world_size():
        raise UnsupportedError(
            f"the mesh of {name!r} has {mesh.size()} of {dist.get_world_size()} ranks: HSDP over "
            "a part of a job is not supported"
        )
    local = parameter.to_local()
    if torch_private.gathers_by_itself(local):
        raise UnsupportedError(
            f"the parameter {name!r} is a {type(local).__name__}, which decides itself how it is "
            "gathered (float8): use plain parameters, with MixedPrecisionPolicy(param_dtype=…)"
        )
    if local.is_meta:
        raise UsageError(
            f"the parameter {name!r} is on 'meta', where it has no values: fill the model first, "
            "by to_empty(device=…) and its checkpoint"
        )
    return parameter


def only_given(model: TrainedModel, way_out: str, *, knows_none: bool = False) -> OnlyGiven:
    """Return a block in which no unit and no DDP wrapper may run that the runtime was not given.

    Args:
        model: the modules that it was given.
        way_out: what to do about a unit, in words.
        knows_none: it was given no unit and no wrapper.
    """
    refuse_unit: Refusal = partial(_refuse_unit, way_out)
    return OnlyGiven(model, {FSDPModule: refuse_unit, DDP: refuse_wrapper}, knows_none=knows_none)


def _refuse_unit(way_out: str, module: nn.Module, args: object) -> None:
    raise UnsupportedError(
        f"the step runs a {type(module).__name__} of fully_shard that the runtime was not given. "
        f"It gathers in every piece, where a rank may be alone: {way_out}"
    )


# ---------------------------------------------------------------------- quiet


class _Swap(NamedTuple):
    """A forward hook of `fully_shard`, and the one that takes its place."""

    hooks: Hooks
    key: int
    loud: Callable[..., Any]
    quiet: Callable[..., Any]


class QuietUnits:
    """A block in which the forward hooks of units cast tensors, and do nothing else.

    The same holds of methods that `register_fsdp_forward_method` has wrapped. No collective runs,
    and no state of `fully_shard` is left half-way by an error. `__exit__` can be repeated.
    """

    def __init__(self, units: Sequence[FSDPModule]) -> None:
        self._units = units
        self._swaps = list(_swaps(units))

    def __enter__(self) -> None:
        for hooks, key, loud, quiet in self._swaps:
            if hooks.get(key) is not loud:
                raise UnsupportedError(
                    "the forward hooks of fully_shard were changed after the ElasticMBS was made: "
                    "make it when the model is complete"
                )
            hooks[key] = quiet
        for unit in self._units:
            policy = torch_private.precision_of(unit)
            casts = partial(_cast_inputs, policy), partial(_cast_outputs, policy)
            torch_private.silence_methods(unit, *casts)

    def __exit__(self, *error: object) -> None:
        for hooks, key, loud, quiet in self._swaps:
            if hooks.get(key) is quiet:
                hooks[key] = loud
        for unit in self._units:
            torch_private.unsilence_methods(unit)


def _swaps(units: Sequence[FSDPModule]) -> Iterator[_Swap]:
    for unit in units:
        module, policy = as_module(unit), torch_private.precision_of(unit)
        before, after = partial(_cast_inputs, policy), partial(_cast_outputs, policy)
        for hooks, quiet in ((module._forward_pre_hooks, before), (module._forward_hooks, after)):
            found = [key for key, hook in hooks.items() if torch_private.is_of_fsdp(hook)]
            if not found:
                raise UnsupportedError(
                    f"the forward hooks of fully_shard on {type(unit).__name__} are not known "
                    f"here (torch {torch.__version__})"
                )
            for key in found:
                yield _Swap(hooks, key, hooks[key], quiet)


def _cast_inputs(
    policy: MixedPrecisionPolicy,
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> tuple[Any, Any]:
    if policy.param_dtype is None or not policy.cast_forward_inputs:
        return args, kwargs
    cast = partial(_cast, policy.param_dtype)
    return map_tensors(args, cast), map_tensors(kwargs, cast)


def _cast_outputs(policy: MixedPrecisionPolicy, module: nn.Module, args: Any, output: Any) -> Any:
    if policy.output_dtype is None:
        return output
    return map_tensors(output, partial(_cast, policy.output_dtype))


def _cast(dtype: torch.dtype, tensor: Tensor) -> Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() else tensor
