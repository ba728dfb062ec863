"""A sharded model that would not be trained right is refused by name, before anybody waits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel as DDP

from elastic_mbs import (
    DistributedOptions,
    ElasticMBS,
    GradientOptions,
    UsageError,
)
from stress.ranks.job import run_ranks, values
from stress.ranks.losses import data
from tests.helpers.ddp import caught, joined
from tests.helpers.shards import Net, sharded, worst

TIMEOUT = DistributedOptions(timeout=20)


def small() -> nn.Module:
    return sharded(Net().double())


def with_hook() -> nn.Module:
    model = Net()
    fully_shard(model).set_all_reduce_hook(lambda sums: None)
    return model


def with_factor() -> nn.Module:
    model = Net()
    fully_shard(model).set_gradient_divide_factor(2.0)
    return model


def synchronised() -> nn.Module:
    model = nn.Sequential(nn.Linear(2, 2), nn.SyncBatchNorm(2))
    fully_shard(model)
    return model


def in_part() -> nn.Module:
    model = Net()
    fully_shard(model.blocks[0])
    return model


def parallel() -> nn.Module:
    """Shard a layer by tensor parallelism, and the rest by `fully_shard`."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("data", "tensor"))
    for name, parameter in list(model[0].named_parameters()):
        placed = distribute_tensor(parameter, mesh["tensor"], [Shard(0)])
        setattr(model[0], name, nn.Parameter(placed))
    fully_shard(model, mesh=mesh["data"])
    return model


def on_meta() -> nn.Module:
    model = Net()
    model.last.to("meta")
    fully_shard(model.last)
    fully_shard(model)
    return model


def in_ddp() -> nn.Module:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    ddp = DDP(model)
    fully_shard(model[0])
    return ddp


def over_two_meshes() -> nn.Module:
    model = Net()
    fully_shard(model.blocks[0], mesh=init_device_mesh("cpu", (1, 1), mesh_dim_names=("r", "s")))
    fully_shard(model)
    return model


class Gathers(Tensor):
    """A parameter that decides itself what is gathered, as those of float8 do."""

    def fsdp_pre_all_gather(self, mesh: object) -> tuple[tuple[Tensor, ...], None]:
        return (self,), None


def extended() -> nn.Module:
    model = nn.Sequential(nn.Linear(2, 2))
    fully_shard(model)
    weight: Any = model[0].weight
    weight._local_tensor = weight._local_tensor.as_subclass(Gathers)
    return model


def plain_beside() -> Any:
    return [small(), nn.Linear(2, 2)]


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "a hook on sums": (with_hook, "set_all_reduce_hook of FSDPNet"),
    "a factor of sums": (with_factor, "set_gradient_divide_factor of FSDPNet"),
    "SyncBatchNorm": (synchronised, "1 is a SyncBatchNorm"),
    "a part that is not sharded": (in_part, "'first.weight' is trained and not sharded"),
    "a module beside it": (plain_beside, "'weight' is trained and not sharded"),
    "two meshes": (over_two_meshes, "are sharded over different meshes"),
    "parameters of float8": (extended, "'0.weight' is a Gathers, which decides itself how it is"),
    "tensor parallelism": (parallel, "without tensor parallelism"),
    "a model without values": (on_meta, "'last.weight' is on 'meta'"),
    "a wrapper around it": (in_ddp, "give fully_shard a mesh of two dimensions (HSDP)"),
}


def make(rank: int, world: int) -> dict[str, str]:
    return {name: caught(lambda m=model: ElasticMBS(m())) for name, (model, _) in REFUSED.items()}  # type: ignore[misc]


def test_models_are_refused_by_name() -> None:
    (found,) = values(run_ranks(make, world=1))
    for name, (_, words) in REFUSED.items():
        assert found[name].startswith(("UnsupportedError: ", "UsageError: ")), found[name]
        assert words in found[name]


def half_a_job(rank: int, world: int) -> str:
    """Make replicas of shards on two of three ranks."""
    mesh = init_device_mesh("cpu", (3, 1, 1), mesh_dim_names=("other", "replicas", "shards"))
    model = Net()
    fully_shard(model, mesh=mesh["replicas", "shards"])
    return caught(lambda: ElasticMBS(model))


def test_replicas_of_shards_on_a_part_of_a_job_are_refused() -> None:
    for found in values(run_ranks(half_a_job, world=3)):
        assert found.startswith("UnsupportedError: the mesh of 'first.weight' has 1 of 3 ranks")


def use(rank: int, world: int) -> list[str]:
    model = small()
    mbs = ElasticMBS(model)

    def loss_fn(x: Tensor) -> Tensor:
        out: Tensor = model(x).pow(2).mean()
        return out

    noise = GradientOptions(noise_scale=10)
    checked = GradientOptions(verify="error")
    scaler = torch.amp.GradScaler("cpu")
    return [
        caught(lambda: mbs.backward_embeddings(model, loss_fn, data(rank, 0))),
        caught(lambda: ElasticMBS(model, gradients=noise)),
        caught(lambda: ElasticMBS(model, gradients=checked)),
        caught(lambda: ElasticMBS(model, scaler=scaler)),
        caught(lambda: mbs.backward(loss_fn, data(rank, 0))),
    ]


def test_options_and_losses_over_embeddings_are_refused_by_name() -> None:
    embeddings, noise, checked, scaler, after = values(run_ranks(use, world=1))[0]
    assert embeddings.startswith("UnsupportedError: backward_embeddings compares the samples")
    assert noise.startswith("UnsupportedError: noise_scale= compares pieces")
    assert checked.startswith("UnsupportedError: verify='error' would raise on one rank")
    assert scaler.startswith("UnsupportedError: scaler= with fully_shard makes collectives")
    assert after == "no error"


def test_a_mode_that_is_not_known_is_refused() -> None:
    with pytest.raises(UsageError, match="mode='global'"):
        DistributedOptions(mode="global")  # type: ignore[arg-type]


def teach(rank: int, world: int) -> tuple[str, str, bool, float]:
    """Learn from a sharded teacher, which the runtime is not given at first."""
    model, teacher = small(), small()
    reference, right = Net().double(), Net().double()
    with torch.no_grad():
        for each in (teacher, right):
            each.requires_grad_(False)
            for parameter in each.parameters():
                parameter.mul_(1.5)

    def loss_fn(x: Tensor) -> Tensor:
        out: Tensor = (model(x) - teacher(x)).pow(2).mean()
        return out

    alone = ElasticMBS(model, distributed=TIMEOUT)
    refused = caught(lambda: alone.backward(loss_fn, data(rank, 0)))
    alone.close()
    empty = all(parameter.grad is None for parameter in model.parameters())
    mbs = ElasticMBS([model, teacher], micro_batch_size=3, distributed=TIMEOUT)
    given = caught(lambda: mbs.backward(loss_fn, data(rank, 0)))
    x = joined([data(each, 0) for each in range(world)])
    (reference(x) - right(x)).pow(2).mean().backward()
    return refused, given, empty, worst(model, reference)


def test_a_sharded_teacher_has_to_be_given_and_then_works() -> None:
    for refused, given, empty, error in values(run_ranks(teach)):
        assert "UnsupportedError: the step runs a FSDPNet of fully_shard" in refused
        assert given == "no error"
        assert empty
        assert error < 1e-12


def teach_later(rank: int, world: int) -> list[str]:
    """Learn from a sharded teacher from the second call on."""
    model, teacher = small(), small()
    late: list[bool] = []

    def loss_fn(x: Tensor) -> Tensor:
        out: Tensor = (model(x) - (teacher(x) if late else 0.0)).pow(2).mean()
        return out

    mbs = ElasticMBS(model, distributed=TIMEOUT)
    found = [caught(lambda: mbs.backward(loss_fn, data(rank, 0)))]
    late.append(True)
    return [*found, caught(lambda: mbs.backward(loss_fn, data(rank, 1)))]


def test_a_sharded_teacher_of_later_calls_is_refused_too() -> None:
    for first, later in values(run_ranks(teach_later)):
        assert first == "no error"
        assert "UnsupportedError: the step runs a FSDPNet of fully_shard" in later


def teach_replicas(rank: int, world: int, wrapped: bool) -> list[str]:
    """Learn from a sharded teacher without shards of one's own."""
    teacher, model = small(), Net().double()
    called = DDP(model) if wrapped else model

    def loss_fn(x: Tensor) -> Tensor:
        out: Tensor = (called(x) - teacher(x)).pow(2).mean()
        return out

    def after(pair: tuple[Tensor, Tensor]) -> Tensor:
        assert teacher is not None  # it may be reached, where it does not run
        out: Tensor = (called(pair[0]) - pair[1]).pow(2).mean()
        return out

    mbs = ElasticMBS(called, distributed=TIMEOUT)
    x = data(rank, 0)
    refused = caught(lambda: mbs.backward(loss_fn, x))
    with torch.no_grad():
        y = teacher(x)
    return [refused, caught(lambda: mbs.backward(after, (x, y)))]


@pytest.mark.parametrize("wrapped", [True, False])
def test_a_sharded_teacher_of_replicas_runs_before_the_call(wrapped: bool) -> None:
    for refused, then in values(run_ranks(teach_replicas, wrapped)):
        assert "UnsupportedError: the step runs a FSDPNet of fully_shard" in refused
        assert "run it over the whole batch before the call" in refused
        assert then == "no error"


def plain(rank: int, world: int) -> float:
    """Take the runtime out of force: each call is a plain pass of `fully_shard`."""
    model, other = small(), small()
    mbs = ElasticMBS(model, enabled=False)
    mbs.backward(lambda x: model(x).pow(2).mean(), data(rank, 0, 6))
    other(data(rank, 0, 6)).pow(2).mean().backward()
    pairs = zip(model.parameters(), other.parameters(), strict=True)
    grads = [(a.grad, b.grad) for a, b in pairs]
    return max(
        float((a - b).abs().max().full_tensor())  # type: ignore[attr-defined]
        for a, b in grads
        if a is not None and b is not None
    )


def test_a_model_that_is_not_enabled_stays_fully_sharded() -> None:
    assert values(run_ranks(plain)) == [0.0, 0.0]
