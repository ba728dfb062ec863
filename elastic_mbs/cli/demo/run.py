"""Two training loops: `train` uses the library, and `train_plainly` is the one it was made from."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from torch import nn

from elastic_mbs import (
    ElasticMBS,
    Event,
    MemoryOptions,
    Policy,
    RecoveryOptions,
    StepResult,
    count_tokens,
)
from elastic_mbs.cli.demo.gpt import token_loss
from elastic_mbs.cli.demo.text import Batch

# less patient than the default (4 calls, 100 times, 0.5 % of time): the whole demo takes a minute,
# and growth is to be seen in it
POLICY = Policy(patience=2, cooldown=2.0, min_gain=0.0)


def train(
    model: nn.Module,
    batches: Iterable[Batch],
    on_event: Callable[[Event], None],
    on_result: Callable[[StepResult], None],
    log: Path | None = None,
    recovery: RecoveryOptions | None = None,
) -> None:
    """Train with elastic_mbs: each batch as large as is wanted, in whatever memory there is."""
    optimizer = make_optimizer(model)
    with ElasticMBS(
        model,
        count=count_tokens("labels"),
        policy=POLICY,
        on_event=on_event,
        log=log,
        memory=MemoryOptions(monitor_interval=0.02),
        recovery=recovery,
    ) as mbs:
        for batch in batches:
            # was: loss = token_loss(batch, model); loss.backward()
            result = mbs.backward(token_loss, batch, model)
            optimizer.step()
            optimizer.zero_grad()
            on_result(result)


def train_plainly(
    model: nn.Module, batches: Iterable[Batch], on_loss: Callable[[float], None]
) -> None:
    """Train in plain PyTorch: the whole batch at once, in as much memory as it takes."""
    optimizer = make_optimizer(model)
    for batch in batches:
        loss = token_loss(batch, model)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        on_loss(loss.item())


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """Return AdamW, fused, so that a step takes no memory of its own."""
    return torch.optim.AdamW(model.parameters(), lr=3e-3, fused=True)
