"""The three doors: one call through any of them."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from elastic_mbs import ElasticMBS, StepResult, elastic_step
from elastic_mbs.memory import NoSensor
from stress.flat_options import grouped
from tests.helpers.steps import Pair, cross_entropy, loop

DOORS = [1, 2, 3]
QUIET: dict[str, Any] = {"sensor": NoSensor("no"), "monitor_interval": 0, "wait_for_memory": 0, "seed": 0}


def through(door: int, model: nn.Module, batch: Pair, **options: Any) -> StepResult:
    """One call through a door of a new runtime: 1 is `backward`, 2 the decorator, 3 the loop."""
    if door == 2:

        @elastic_step(model, **grouped({**QUIET, **options}))
        def step(b: Pair) -> Tensor:
            loss: Tensor = cross_entropy(model)(b)
            return loss

        return step(batch)
    mbs = ElasticMBS(model, **grouped({**QUIET, **options}))
    return mbs.backward(cross_entropy(model), batch) if door == 1 else loop(mbs, cross_entropy(model), batch)
