"""Options that were made for one process keep the gradient exact on several ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

from elastic_mbs import (
    DistributedOptions,
    ElasticMBS,
    Escalated,
    Event,
    GradientOptions,
    MemoryOptions,
    Policy,
    RecoveryOptions,
    count_tokens,
)
from stress.ranks.job import run_ranks, values
from tests.helpers.shards import Block, sharded, worst

WORDS, LENGTH, STEPS = 300, 12, 4
TIMEOUT = DistributedOptions(timeout=20)
OVERLAP = DistributedOptions(timeout=20, overlap=True)
TOKENS = {"pieces": "by_length", "length": "attention_mask", "policy": Policy(max_tokens=24)}
ISOLATED = {"recovery": RecoveryOptions(replay="isolate"), "micro_batch_size": 2}
OPTIONS: dict[str, dict[str, Any]] = {
    "accumulate_dtype": {
        "gradients": GradientOptions(accumulate_dtype=torch.float64),
        "micro_batch_size": 2,
    },
    "draws": {"gradients": GradientOptions(draws="sample"), "micro_batch_size": 2},
    "max_tokens": TOKENS,
    "max_tokens, overlap": {**TOKENS, "distributed": OVERLAP},
    "isolate": ISOLATED,
    "isolate, overlap": {**ISOLATED, "distributed": OVERLAP},
    "rungs": {"recovery": RecoveryOptions(escalate="auto")},
    "rungs, overlap": {"recovery": RecoveryOptions(escalate="auto"), "distributed": OVERLAP},
}


class LanguageModel(nn.Module):
    def __init__(self, width: int = 8, blocks: int = 4) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(WORDS, width)
        self.blocks = nn.ModuleList([Block(width) for _ in range(blocks)])
        self.head = nn.Linear(width, WORDS, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(x)
        return out


def texts(rank: int, step: int) -> dict[str, Tensor]:
    """Return texts of unequal lengths, padded; ranks have unequal numbers of them."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    lengths = torch.randint(2, LENGTH, (4 + rank, 1), generator=generator)
    mask = (torch.arange(LENGTH) < lengths).long()
    words = torch.randint(1, WORDS, mask.shape, generator=generator) * mask
    return {
        "input_ids": words,
        "attention_mask": mask,
        "labels": torch.where(mask > 0, words, -100),
    }


def loss_of(model: nn.Module) -> Callable[[Mapping[str, Tensor]], Tensor]:
    return lambda batch: F.cross_entropy(
        model(batch["input_ids"]).flatten(0, 1), batch["labels"].flatten()
    )


def train(rank: int, world: int, kind: Literal["ddp", "fsdp2"], name: str) -> tuple[float, str]:
    """Train with an option; in each step one rank runs out, so often that it needs a rung.

    Returns:
        The largest difference to one process with the batches of all, and the rungs climbed.
    """
    model, reference = LanguageModel().double(), LanguageModel().double()
    given: nn.Module = DDP(model) if kind == "ddp" else sharded(model)
    plain, loss_alone = loss_of(given), loss_of(reference)
    found, left = 0.0, 0
    rungs: list[str] = []

    def loss_fn(batch: Mapping[str, Tensor]) -> Tensor:
        nonlocal left
        if left:
            left -= 1
            raise torch.OutOfMemoryError("injected: out of memory in forward")
        return plain(batch)

    def note(event: Event) -> None:
        if isinstance(event, Escalated):
            rungs.append(event.line())

    options = {"distributed": TIMEOUT, **OPTIONS[name]}
    options["memory"] = MemoryOptions(wait_for_memory=0)
    right = torch.optim.SGD(reference.parameters(), lr=0.1)
    with ElasticMBS(given, count=count_tokens("labels"), on_event=note, **options) as mbs:
        optimizer = torch.optim.SGD(given.parameters(), lr=0.1)
        for step in range(STEPS):
            left = (6 if "rungs" in name else 1) * (step % world == rank)
            batches = [texts(each, step) for each in range(world)]
            result = mbs.backward(loss_fn, batches[rank])
            assert result.ooms >= (step % world == rank)
            loss = loss_alone({key: torch.cat([b[key] for b in batches]) for key in batches[0]})
            loss.backward()
            found = max(found, worst(model, reference), abs(result.loss.item() - loss.item()))
            mbs.optimizer_step(optimizer)
            right.step()
            optimizer.zero_grad()
            right.zero_grad()
    return found, " ".join(rungs)


@pytest.mark.parametrize("name", OPTIONS)
def test_replicas_have_the_gradient_of_all_batches(name: str) -> None:
    for error, rungs in values(run_ranks(train, "ddp", name)):
        assert error <= 1e-12
        assert bool(rungs) == ("rungs" in name)


@pytest.mark.parametrize("name", [name for name in OPTIONS if "rungs" not in name])
def test_shards_have_the_gradient_of_all_batches(name: str) -> None:
    for error, _ in values(run_ranks(train, "fsdp2", name)):
        assert error <= 1e-12
