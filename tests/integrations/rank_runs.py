"""Jobs of several ranks that have trainers: their start, their shards, and how far runs differ."""

from __future__ import annotations

import os
from multiprocessing import forkserver
from typing import Any

import pytest
from torch import Tensor, nn

from stress.ranks.job import server
from stress.ranks.shards import full

FSDP2: dict[str, Any] = {"fsdp": True, "fsdp_config": {"fsdp_version": 2}}
"""Arguments of a trainer that shards its model by `fully_shard`."""


@pytest.fixture(scope="module")
def trainers_at_hand() -> None:
    """Start the server of the ranks with the trainers in it: importing them takes seconds."""
    packages = ("accelerate", "fabric", "lightning", "transformers")
    runs = ("lightning_runs", "preference_runs", "test_trl", "test_trl_rollouts", "trainer_runs")
    server(
        *(f"elastic_mbs.integrations.{name}" for name in packages),
        *(f"tests.integrations.{name}" for name in runs),
    )
    forkserver.ensure_running()


def as_torchrun(rank: int, world: int) -> None:
    """Set the variables that torchrun sets."""
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "GROUP_RANK": "0",
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world),
        "TORCHELASTIC_RUN_ID": "test",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "1",
    }


def shard_on_cpus() -> None:
    """Have accelerate shard on CPUs, where it takes DDP in place of FSDP."""
    from accelerate.state import AcceleratorState, PartialState
    from accelerate.utils import DistributedType

    plain = AcceleratorState.__init__

    def init(self: Any, *args: Any, fsdp_plugin: Any = None, **kwargs: Any) -> None:
        plain(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
        if fsdp_plugin is None:
            return
        if self.mixed_precision != "no":
            fsdp_plugin.set_mixed_precision(self.mixed_precision)
        for state in (PartialState(), self):
            state.distributed_type = DistributedType.FSDP
        self.fsdp_plugin = fsdp_plugin

    AcceleratorState.__init__ = init


def whole(module: nn.Module) -> list[Tensor]:
    """Return the parameters of a module, gathered where they are sharded."""
    found = [full(each.detach()) for each in module.parameters()]
    return [each for each in found if each is not None]


def worst(mine: list[Tensor], stock: list[Tensor]) -> float:
    return max(
        float((a - b).abs().max()) / float(b.abs().max()) for a, b in zip(mine, stock, strict=True)
    )
