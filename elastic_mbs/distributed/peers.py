"""The choice of peers for a model: those of its DDP wrapper, or none."""

from __future__ import annotations

from functools import partial

import torch.distributed as dist

from elastic_mbs.distributed.replicas import Replicas
from elastic_mbs.distributed.wrappers import NotWrapped, wrappers_in
from elastic_mbs.engine.shared.peers import Alone, Peers
from elastic_mbs.engine.shared.trained_model import TrainedModel
from elastic_mbs.memory import oom
from elastic_mbs.options import Settings


def peers_of(model: TrainedModel, settings: Settings) -> Peers:
    """Return the other ranks of a model. With a DDP wrapper every rank has to call it.

    Raises:
        UnsupportedError: a wrapper with something that would not be trained right.
        PeerError: another rank did not come.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return Alone()
    wrappers = wrappers_in(model.roots)
    if not wrappers:
        return Alone(NotWrapped(model.roots))
    devices, is_oom = model.devices(), settings.recovery.is_oom
    retry = partial(oom.retry, devices=devices, is_oom=is_oom)
    return Replicas(wrappers, model, settings, retry)
