"""The runtime in `lightning.pytorch`: `Trainer(callbacks=[ElasticCallback()])`."""

from __future__ import annotations

from lightning.pytorch import Callback

from elastic_mbs.integrations.frameworks import LIGHTNING
from elastic_mbs.integrations.lightning_hooks import LightningHooks
from elastic_mbs.integrations.lightning_names import LightningNames


class ElasticCallback(LightningHooks, Callback):
    """A callback for Trainers of `lightning.pytorch`: see `LightningHooks`."""

    names = LightningNames.of("lightning.pytorch", LIGHTNING)
