"""What would not be trained right under DDP is refused by name, before anybody waits."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch._C._distributed_c10d import BuiltinCommHookType
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel as DDP

from elastic_mbs import DistributedOptions, ElasticMBS, GradientOptions, Policy, UsageError
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


def ignoring() -> DDP:
    model = net()
    DDP._set_params_and_buffers_to_ignore_for_model(model, ["0.bias"])
    return DDP(model)


def completed_later() -> DDP:
    ddp = DDP(net())
    ddp.module.add_module("late", nn.Linear(2, 2))
    return ddp


def patched() -> DDP:
    ddp = DDP(net())
    vars(ddp)["forward"] = ddp.module
    return ddp


class Doubling(DDP):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return None


def summing_in_python() -> DDP:
    with torch._dynamo.config.patch(optimize_ddp="python_reducer"):
        return DDP(net())


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "a communication hook": (hooked, "communication hook (fp16_compress_hook)"),
    "one of torch's own": (hooked_inside, "ALLREDUCE"),
    "a buffer hook": (buffer_hooked, "a hook for its buffers"),
    "SyncBatchNorm": (synchronised, "norm is a SyncBatchNorm"),
    "mixed precision": (mixed, "mixed_precision"),
    "delayed parameters": (delayed, "delay_all_reduce_named_params"),
    "sparse gradients": (sparse, "sparse gradients"),
    "a parameter that DDP ignores": (ignoring, "DDP was told to ignore parameter 'module.0.bias'"),
    "a module put in later": (completed_later, "was put into the module after DDP had wrapped it"),
    "a forward of its own": (patched, "a forward of its own"),
    "a subclass": (lambda: Doubling(net()), "a forward of its own"),
    "sums in Python": (summing_in_python, "python_reducer"),
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

    options, checked = GradientOptions(noise_scale=10), GradientOptions(verify="error")
    found = [
        caught(lambda: mbs.backward_embeddings(ddp, loss_fn, data(rank, 0))),
        caught(lambda: ElasticMBS(ddp, gradients=options)),
        caught(lambda: ElasticMBS(ddp, gradients=checked)),
        caught(lambda: mbs.backward(loss_fn, data(rank, 0))),
        caught(joining),
    ]
    other = DDP(net())
    runtime = ElasticMBS(other)
    vars(other)["forward"] = other.module
    found.append(caught(lambda: runtime.backward(loss_fn, data(rank, 0))))
    del vars(other)["forward"]
    other.register_comm_hook(None, default_hooks.fp16_compress_hook)
    found.append(caught(lambda: runtime.backward(loss_fn, data(rank, 0))))
    return found


def test_modes_and_options_are_refused_by_name() -> None:
    embeddings, noise, checked, after, joining, patched, hooked = values(run_ranks(use, world=1))[0]
    assert checked.startswith("UnsupportedError: verify='error' would raise on one rank")
    assert patched.startswith("UnsupportedError: the DDP model has a forward of its own")
    assert hooked.startswith("UnsupportedError: the DDP model got a communication hook after")
    assert joining.startswith("UnsupportedError: `with ddp.join():` waits for collectives")
    assert embeddings.startswith("UnsupportedError: backward_embeddings compares the samples")
    assert noise.startswith("UnsupportedError: noise_scale= compares pieces")
    assert after == "no error"


class Hidden:
    """An object in whose slots nothing is looked for."""

    __slots__ = ("wrapper",)

    def __init__(self, wrapper: DDP) -> None:
        self.wrapper = wrapper


def unwrap(rank: int, world: int) -> list[str]:
    """Give the runtime the module inside, and call the wrapper, which can be out of its reach."""
    ddp = DDP(net())
    mbs = ElasticMBS(ddp.module)
    batch, hidden = data(0, 0), Hidden(ddp)
    wrong = caught(lambda: mbs.backward(lambda x: hidden.wrapper(x).pow(2).mean(), batch))
    seen = caught(lambda: mbs.backward(lambda x: ddp(x).pow(2).mean(), batch))
    empty = all(parameter.grad is None for parameter in ddp.parameters())
    right = caught(lambda: mbs.backward(lambda x: ddp.module(x).pow(2).mean(), batch))
    return [seen, wrong, str(empty), right]


def test_a_wrapper_around_the_runtimes_module_is_noticed() -> None:
    seen, wrong, empty, right = values(run_ranks(unwrap, world=1))[0]
    assert "runs a DistributedDataParallel that the runtime was not given" in seen
    assert wrong.startswith("UsageError: loss_fn calls Sequential through DistributedDataParallel")
    assert wrong.endswith("give it the wrapper, ElasticMBS(ddp)")
    assert (empty, right) == ("True", "no error")


def other_wrapper(rank: int, world: int) -> list[str]:
    """Call a wrapper in the step that the runtime was not given; ranks have unequal pieces."""
    ddp, other = DDP(net()), DDP(nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 4)).double())
    mbs = ElasticMBS(
        ddp,
        policy=Policy(max_micro_batch_size=2 + rank),
        distributed=DistributedOptions(timeout=20),
    )
    ways: list[Callable[[torch.Tensor], Any]] = [other, other.module]

    def step(way: Callable[[torch.Tensor], Any]) -> None:
        mbs.backward(lambda x: ddp(way(x).detach()).pow(2).mean(), data(rank, 0))
        ddp.zero_grad()

    def without_gradients(x: torch.Tensor) -> Any:
        with torch.no_grad():
            return other(x)

    found = [caught(partial(step, way)) for way in (*ways, without_gradients)]
    given = ElasticMBS([ddp, other], distributed=DistributedOptions(timeout=20))
    batch = data(rank, 0)
    return [
        *found,
        caught(lambda: given.backward(lambda x: ddp(other(x).detach()).pow(2).mean(), batch)),
    ]


def test_a_wrapper_that_was_not_given_is_refused_where_it_would_communicate() -> None:
    for called, inside, without, given in values(run_ranks(other_wrapper)):
        for refused in (called, without):
            assert "runs a DistributedDataParallel that the runtime was not given" in refused
        assert (inside, given) == ("no error", "no error")


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
