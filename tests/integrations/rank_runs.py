"""Jobs of several ranks that have trainers: their start, and how far two runs are apart."""

from __future__ import annotations

import os
from multiprocessing import forkserver

import pytest
from torch import Tensor

from stress.ranks.job import server


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


def worst(mine: list[Tensor], stock: list[Tensor]) -> float:
    return max(
        float((a - b).abs().max()) / float(b.abs().max()) for a, b in zip(mine, stock, strict=True)
    )
