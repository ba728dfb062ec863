"""Changes to a sharded model after its runtime was made are refused by name, before any sum."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard

from elastic_mbs import DistributedOptions, ElasticMBS
from stress.ranks.job import run_ranks, values
from stress.ranks.losses import data
from tests.helpers.ddp import caught
from tests.helpers.shards import Net, sharded

IN_STEP = pytest.mark.skipif(
    not hasattr(FSDPModule, "reset_iter_state"), reason="torch is older than lock-step"
)
Mode = Literal["local", "lockstep"]


def loss_of(model: nn.Module) -> Callable[[Tensor], Tensor]:
    def loss_fn(x: Tensor) -> Tensor:
        out: Tensor = model(x).pow(2).mean()
        return out

    return loss_fn


def with_factor(model: Any) -> None:
    model.set_gradient_divide_factor(1.0)


def with_hook(model: Any) -> None:
    model.set_all_reduce_hook(lambda tensor: None)


def without_sums(model: Any) -> None:
    model.set_requires_gradient_sync(False)


def with_hook_after(model: nn.Module) -> None:
    next(model.parameters()).register_post_accumulate_grad_hook(lambda leaf: None)


def in_half(model: nn.Module) -> None:
    model.to(torch.bfloat16)


def change(rank: int, world: int, mode: Mode, by: Callable[[Any], None]) -> tuple[str, bool]:
    """Change the model on one rank, after a first call."""
    model = sharded(Net().double())
    mbs = ElasticMBS(model, distributed=DistributedOptions(timeout=20, mode=mode))
    mbs.backward(loss_of(model), data(rank, 0))
    model.zero_grad()
    by(model)
    found = caught(lambda: mbs.backward(loss_of(model), data(rank, 1)))
    return found, all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize(
    ("mode", "by", "words"),
    [
        ("local", with_factor, "set_gradient_divide_factor"),
        ("local", with_hook, "set_all_reduce_hook"),
        ("local", with_hook_after, "a hook of register_post_accumulate_grad_hook"),
        ("local", in_half, "and is torch.bfloat16 by now"),
        pytest.param("lockstep", with_factor, "set_gradient_divide_factor", marks=IN_STEP),
        pytest.param("lockstep", with_hook, "set_all_reduce_hook", marks=IN_STEP),
        pytest.param("lockstep", without_sums, "set_requires_gradient_sync(False)", marks=IN_STEP),
    ],
)
def test_what_changes_the_sums_is_refused_in_the_next_call(
    mode: Mode, by: Callable[[Any], None], words: str
) -> None:
    for found, empty in values(run_ranks(change, mode, by)):
        assert found.startswith("UnsupportedError: "), found
        assert words in found
        assert empty


def shard_later(rank: int, world: int) -> tuple[str, str]:
    """Make the runtime before the model is sharded, and after."""
    model = Net().double()
    early = ElasticMBS(model, micro_batch_size=2, distributed=DistributedOptions(timeout=20))
    for layer in model.blocks:
        fully_shard(layer)
    fully_shard(model)
    refused = caught(lambda: early.backward(loss_of(model), data(rank, 0)))
    early.close()
    late = ElasticMBS(model, micro_batch_size=2, distributed=DistributedOptions(timeout=20))
    return refused, caught(lambda: late.backward(loss_of(model), data(rank, 0)))


def test_a_model_that_is_sharded_after_its_runtime_was_made_is_refused() -> None:
    for refused, late in values(run_ranks(shard_later)):
        assert "make the ElasticMBS after fully_shard" in refused
        assert late == "no error"
