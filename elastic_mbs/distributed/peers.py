"""The choice of peers for a model: those of its DDP wrapper or of its shards, or none."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import partial

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from elastic_mbs.distributed.replicas import Replicas
from elastic_mbs.distributed.wrappers import (
    NotWrapped,
    OnlyGiven,
    refuse_wrapper,
    wrappers_in,
)
from elastic_mbs.engine.shared.peers import Alone, Peers
from elastic_mbs.engine.shared.trained_model import TrainedModel
from elastic_mbs.memory import oom
from elastic_mbs.options import Settings

_RUN_BEFORE = (
    "run it over the whole batch before the call, and put what it returns into the batch; if it is "
    "the model that is trained, make the ElasticMBS after fully_shard"
)

_FSDP = "torch.distributed.fsdp"

Hooks = tuple[AbstractContextManager[object], ...]


def is_spread(roots: Sequence[nn.Module]) -> bool:
    """Return whether modules are in DDP's wrapper, or sharded by `fully_shard`."""
    if wrappers_in(roots):
        return True
    if _FSDP not in sys.modules:  # its import takes half a second
        return False
    from elastic_mbs.distributed.units import units_in

    return bool(units_in(roots))


def peers_of(model: TrainedModel, settings: Settings) -> Peers:
    """Return the other ranks of a model. Of a model with any every rank has to call it.

    Raises:
        UnsupportedError: a wrapper, or a sharded model, with something that would not be trained
            right.
        PeerError: another rank did not come.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return Alone()
    devices, is_oom = model.devices(), settings.recovery.is_oom
    retry = partial(oom.retry, devices=devices, is_oom=is_oom)
    wrappers = wrappers_in(model.roots)
    hooks: Hooks = (OnlyGiven(model, {DDP: refuse_wrapper}, knows_none=not wrappers),)
    if _FSDP in sys.modules:
        from elastic_mbs.distributed.lockstep import LockStep
        from elastic_mbs.distributed.shards import Shards
        from elastic_mbs.distributed.units import check, only_given, units_in

        units = units_in(model.roots)
        if units:
            check(model.roots, units)
            in_step = settings.distributed.mode == "lockstep"
            return (LockStep if in_step else Shards)(units, model, settings, retry)
        hooks = (only_given(model, _RUN_BEFORE, knows_none=not wrappers),)
    if not wrappers:
        return Alone(NotWrapped(model.roots), *hooks)
    return Replicas(wrappers, model, settings, retry, hooks)
