"""A round: a job of its own, from its first step to its last, as one rank runs it."""

from __future__ import annotations

import logging
import random
import warnings
from typing import Any

from .replicas import Replicas, counting_early_sums
from .shards import Shards
from .training import STEPS, Counts, Training


def run_round(
    rank: int, world: int, kind: str, seed: int, steps: int, overlap: bool | None
) -> dict[str, Any]:
    """Train one model after the other until `steps` steps are made.

    Args:
        rank: the number of this rank.
        world: how many there are.
        kind: "ddp", "fsdp2", "hsdp" or "lockstep".
        seed: of models, batches, and where errors strike.
        steps: steps of the job.
        overlap: sums begin in the last backward; drawn for each model where it is None.

    Returns:
        The counts of this rank, as JSON.
    """
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    shared = random.Random(seed)  # it draws the same on every rank
    counts = Counts()

    def begin() -> Training:
        if kind == "ddp":
            return Replicas(rank, world, shared, counts, overlap)
        kinds = {"replicated": kind == "hsdp", "in_step": kind == "lockstep"}
        return Shards(rank, world, shared, counts, **kinds)

    made = 0
    with counting_early_sums(counts):
        while made < steps:
            training = begin()
            with training.mbs:
                for _ in range(min(shared.randint(*STEPS), steps - made)):
                    training.step(made)
                    made += 1
                    counts.steps += rank == 0
    return counts.as_json()
