"""Runtimes whose loss function is known."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from elastic_mbs import ElasticMBS
from tests.helpers.steps import elastic, through


def settled(model: nn.Module, loss_fn: Callable[..., Any], batch: Any, door: int, **options: Any) -> ElasticMBS:
    """A runtime that has seen two clean calls."""
    mbs = elastic(model, grow=False, **{"micro_batch_size": 3, **options})
    for _ in range(2):
        through(door, mbs, loss_fn, batch)
    model.zero_grad()
    return mbs
