"""Loops over a runtime, as a user writes them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from elastic_mbs import ElasticMBS, StepResult


def by_loop(mbs: ElasticMBS, loss_fn: Callable[[Any], Any], batch: Any) -> StepResult:
    """Run one batch through the third door, the loop written out."""
    for micro in mbs.micro_batches(batch):
        with micro:
            micro.backward(loss_fn(micro.data))
    assert mbs.last_result is not None
    return mbs.last_result
