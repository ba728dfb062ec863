"""What would not be trained right under DDP is refused by name, before anybody waits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._C._distributed_c10d import BuiltinCommHookType
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel as DDP

from elastic_mbs import DistributedOptions, ElasticMBS, GradientOptions, UsageError
from stress.ranks.job import run_ranks, values
from stress.ranks.losses import data
from tests.helpers.ddp import caught, net


def hooked() -> DDP:
    ddp = DDP(net())
    ddp.register_comm_hook(None, default_hooks.fp16_compress_hook)
    return ddp


def hooked_inside() -> DDP:
    ddp = DDP(net())
    ddp._register_builtin_comm_hook(BuiltinCommHookType.ALLREDUCE)
    return ddp


def buffer_hooked() -> DDP:
    ddp = DDP(nn.BatchNorm1d(2))
    ddp._register_buffer_comm_hook(None, lambda state, buffers: None)
    return ddp


def synchronised() -> DDP:
    ddp = DDP(net())
    ddp.module.add_module("norm", nn.SyncBatchNorm(2))
    return ddp


def mixed() -> DDP:
    ddp = DDP(net())
    ddp.mixed_precision = object()  # type: ignore[assignment]
    return ddp


def delayed() -> DDP:
    ddp = DDP(net())
    ddp._delay_all_reduce_params = [next(ddp.module.parameters())]
    return ddp


def sparse() -> DDP:
    return DDP(nn.Embedding(4, 2, sparse=True))


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "a communication hook": (hooked, "communication hook (fp16_compress_hook)"),
    "one of torch's own": (hooked_inside, "ALLREDUCE"),
    "a buffer hook": (buffer_hooked, "a hook for its buffers"),
    "SyncBatchNorm": (synchronised, "norm is a SyncBatchNorm"),
    "mixed precision": (mixed, "mixed_precision"),
    "delayed parameters": (delayed, "delay_all_reduce_named_params"),
    "sparse gradients": (sparse, "sparse gradients"),
    "a module without a wrapper": (lambda: [DDP(net()), nn.Linear(2, 2)], "in no DDP wrapper"),
}


def make(rank: int, world: int) -> dict[str, str]:
    return {name: caught(lambda m=model: ElasticMBS(m())) for name, (model, _) in REFUSED.items()}  # type: ignore[misc]


def test_models_are_refused_by_name() -> None:
    (found,) = values(run_ranks(make, world=1))
    for name, (_, words) in REFUSED.items():
        assert found[name].startswith("UnsupportedError: "), found[name]
        assert words in found[name]


def use(rank: int, world: int) -> list[str]:
    ddp = DDP(net())
    mbs = ElasticMBS(ddp)

    def loss_fn(x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = ddp(x).pow(2).mean()
        return out

    def joining() -> None:
        with ddp.join():
            mbs.backward(loss_fn, data(rank, 0))

    options = GradientOptions(noise_scale=10)
    return [
        caught(lambda: mbs.backward_embeddings(ddp, loss_fn, data(rank, 0))),
        caught(lambda: ElasticMBS(ddp, gradients=options)),
        caught(lambda: mbs.backward(loss_fn, data(rank, 0))),
        caught(joining),
    ]


def test_modes_and_options_are_refused_by_name() -> None:
    (embeddings, noise, after, joining) = values(run_ranks(use, world=1))[0]
    assert joining.startswith("UnsupportedError: `with ddp.join():` waits for collectives")
    assert embeddings.startswith("UnsupportedError: backward_embeddings compares the samples")
    assert noise.startswith("UnsupportedError: noise_scale= compares pieces")
    assert after == "no error"


def unwrap(rank: int, world: int) -> list[str]:
    """Give the runtime the module inside, and call the wrapper."""
    ddp = DDP(net())
    mbs = ElasticMBS(ddp.module)
    batch = data(0, 0)
    wrong = caught(lambda: mbs.backward(lambda x: ddp(x).pow(2).mean(), batch))
    empty = all(parameter.grad is None for parameter in ddp.parameters())
    right = caught(lambda: mbs.backward(lambda x: ddp.module(x).pow(2).mean(), batch))
    return [wrong, str(empty), right]


def test_a_wrapper_around_the_runtimes_module_is_noticed() -> None:
    wrong, empty, right = values(run_ranks(unwrap, world=1))[0]
    assert wrong.startswith("UsageError: loss_fn calls Sequential through DistributedDataParallel")
    assert wrong.endswith("give it the wrapper, ElasticMBS(ddp)")
    assert (empty, right) == ("True", "no error")


def test_a_wrapper_that_is_not_enabled_stays_ddp() -> None:
    assert max(values(run_ranks(disabled))) == 0.0


def disabled(rank: int, world: int) -> float:
    ddp, other = DDP(net()), DDP(net())
    ElasticMBS(ddp, enabled=False).backward(lambda x: ddp(x).pow(2).mean(), data(rank, 0))
    other(data(rank, 0)).pow(2).mean().backward()
    pairs = zip(ddp.parameters(), other.parameters(), strict=True)
    differences = [a.grad - b.grad for a, b in pairs if a.grad is not None and b.grad is not None]
    assert differences
    return max(float(each.abs().max()) for each in differences)


@pytest.mark.parametrize("timeout", [0, -1, float("inf"), float("nan"), True, "10"])
def test_a_time_out_is_a_number_of_seconds(timeout: Any) -> None:
    with pytest.raises(UsageError, match="finite number of seconds above 0"):
        DistributedOptions(timeout=timeout)
