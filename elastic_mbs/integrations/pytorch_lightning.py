"""The runtime in `pytorch_lightning`: `Trainer(callbacks=[ElasticCallback()])`."""

from __future__ import annotations

from pytorch_lightning import Callback

from elastic_mbs.integrations.frameworks import PYTORCH_LIGHTNING
from elastic_mbs.integrations.lightning_hooks import LightningHooks
from elastic_mbs.integrations.lightning_names import LightningNames


class ElasticCallback(LightningHooks, Callback):
    """A callback for Trainers of `pytorch_lightning`: see `LightningHooks`."""

    names = LightningNames.of("pytorch_lightning", PYTORCH_LIGHTNING)
