"""Lock-step mode: `fully_shard` gathers each layer itself, and no failure hangs it or is wrong."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method

from elastic_mbs import DistributedOptions, ElasticMBS, GradientOptions, MemoryOptions
from stress.ranks.job import run_ranks, values
from stress.ranks.losses import counted, data
from stress.ranks.shards import states
from stress.ranks.training import same
from tests.distributed.test_shards import STEPS, train
from tests.helpers.ddp import FailingBackward, caught, failing, joined
from tests.helpers.shards import Block, Net, sharded, worst

pytestmark = [
    pytest.mark.no_oom_injection,
    pytest.mark.skipif(not hasattr(FSDPModule, "reset_iter_state"), reason="torch is older"),
]
IN_STEP = DistributedOptions(timeout=20, mode="lockstep")
SHORT = MemoryOptions(wait_for_memory=0)


def square(out: Tensor) -> Tensor:
    return out.pow(2).mean()


@pytest.mark.parametrize("way", ["backward", "loop", "decorator"])
def test_each_way_in_gives_the_gradient_and_the_loss_of_the_global_batch(way: str) -> None:
    for errors in values(run_ranks(train, way, "plain", "lockstep", world=3)):
        assert len(errors) == 3 * STEPS
        assert max(errors) < 1e-12


CASES = ["checkpoint", "compiled blocks", "grouped", "root alone", "columns", "offload", "kept"]


@pytest.mark.parametrize("case", [*CASES, "tied", "clip"])
def test_no_option_of_fully_shard_changes_the_gradient(case: str) -> None:
    for errors in values(run_ranks(train, "backward", case, "lockstep")):
        assert max(errors) < 1e-12


def counts(rank: int, world: int) -> list[float]:
    """Train on tokens, in pieces of unequal numbers, some of which have none."""
    model, reference = Net().double(), Net().double()
    sharded(model)
    found = []

    def loss_of(module: Any, x: Tensor) -> Tensor:
        terms = module(x).pow(2).mean(1) * counted(x)
        out: Tensor = terms.sum() / counted(x).sum().clamp(min=1)
        return out

    with ElasticMBS(
        model, distributed=IN_STEP, count=counted, micro_batch_size=2 if rank else 3
    ) as mbs:
        for step in range(2):
            batches = [data(each, step) for each in range(world)]
            batches[1][2:6, 0] = -1.0  # no tokens in its second and third piece
            result = mbs.backward(lambda x: loss_of(model, x), batches[rank])
            loss = loss_of(reference, joined(batches))
            loss.backward()
            found += [worst(model, reference), abs(float(result.loss) - float(loss))]
            mine = mbs.evaluate(model, batches[rank])
            found.append(float((mine - reference(batches[rank])).abs().max()))
    return found  # `.grad` of the first step stays, and the second adds to it


def test_pieces_of_unequal_number_and_without_tokens_weigh_as_in_the_global_batch() -> None:
    for errors in values(run_ranks(counts, world=3)):
        assert max(errors) < 1e-12


def spoiled(rank: int, world: int) -> list[Any]:
    """Let a loss function raise on rank 1, and go on after it."""
    model, reference = Net().double(), Net().double()
    sharded(model)
    found: list[Any] = []

    def right(step: int) -> None:
        square(reference(joined([data(each, step) for each in range(world)]))).backward()

    def spoil(x: Tensor) -> Tensor:
        out = model(x)
        if rank == 1:
            raise ZeroDivisionError("mine")
        return square(out)

    with ElasticMBS(model, distributed=IN_STEP, memory=SHORT, micro_batch_size=4) as mbs:
        mbs.backward(lambda x: square(model(x)), data(rank, 0))
        right(0)
        before = states(model)
        found += [caught(lambda: mbs.backward(spoil, data(rank, 1))), same(before, states(model))]
        FailingBackward.left = 99 if rank == 0 else 0
        small = caught(lambda: mbs.backward(lambda x: square(failing(model(x))), data(rank, 1)))
        FailingBackward.left = 0
        found += [small, same(before, states(model))]
        mbs.backward(lambda x: square(model(x)), data(rank, 2))
        right(2)
        found.append(worst(model, reference))
    model.zero_grad()
    reference.zero_grad()
    square(model(data(0, 3))).backward()  # by `fully_shard` alone
    square(reference(data(0, 3))).backward()
    return [*found, worst(model, reference)]


def test_an_error_on_one_rank_ends_the_call_on_all_and_they_go_on() -> None:
    first, second = values(run_ranks(spoiled))
    raised, first_same, own, own_same, *errors = first
    assert raised.startswith("PeerError: another rank could not finish")
    assert "ZeroDivisionError: mine" in raised
    assert own.startswith("MicroBatchFloorError")
    assert second[0] == "ZeroDivisionError: mine"
    assert second[2].startswith("PeerError")
    assert [first_same, own_same, second[1], second[3]] == [True] * 4
    assert max(errors) < 1e-12
    assert max(second[4:]) < 1e-12


class Choosing(nn.Module):
    """A model that runs the layer it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(4), Block(4)])

    def forward(self, x: Tensor, chosen: int) -> Tensor:
        out: Tensor = self.blocks[chosen](x)
        return out


def differing(rank: int, world: int) -> tuple[str, str]:
    """Run another layer on each rank, and then the same."""
    model = sharded(Choosing().double())
    with ElasticMBS(model, distributed=IN_STEP) as mbs:

        def call(chosen: int) -> str:
            return caught(lambda: mbs.backward(lambda x: square(model(x, chosen)), data(rank, 0)))

        return call(rank), call(0)


def test_ranks_that_run_different_layers_are_refused_on_all() -> None:
    for refused, after in values(run_ranks(differing)):
        assert "the ranks do not make the same collectives in a piece" in refused, refused
        assert after == "no error"


def refused(rank: int, world: int) -> list[str]:
    def made(**options: Any) -> str:
        return caught(lambda: ElasticMBS(sharded(Net()), **{"distributed": IN_STEP, **options}))

    mesh = init_device_mesh("cpu", (1, world), mesh_dim_names=("r", "s"))
    replicated = sharded(Net(), mesh=mesh)
    custom = Net()
    fully_shard(custom)
    custom.set_custom_all_gather(object())  # type: ignore[operator]
    gathers = sharded(Net())
    vars(gathers)["generate"] = gathers.forward
    register_fsdp_forward_method(gathers, "generate")
    model = Net().double()
    mbs = ElasticMBS(sharded(model), distributed=IN_STEP)
    found = [
        made(scaler=torch.amp.GradScaler("cpu")),
        made(gradients=GradientOptions(accumulate_dtype=torch.float64)),
        caught(lambda: ElasticMBS(replicated, distributed=IN_STEP)),
        caught(lambda: ElasticMBS(custom, distributed=IN_STEP)),
        caught(lambda: ElasticMBS(gathers, distributed=IN_STEP)),
        caught(lambda: mbs.verify(lambda x: square(model(x)), data(rank, 0))),
    ]
    del FSDPModule.reset_iter_state  # as before torch 2.13
    return [*found, made()]


def test_what_lock_step_does_not_do_is_refused_by_name() -> None:
    for found in values(run_ranks(refused)):
        *options, replicas, own, method, verify, older = found
        names = "scaler=", "GradientOptions(accumulate_dtype=)"
        for error, name in zip(options, names, strict=True):
            assert (
                error
                == f"UnsupportedError: {name} is not supported with mode='lockstep': leave it out"
            )
        assert "mode='lockstep' is for one mesh of one dimension" in replicas
        assert "has collectives of its own (object)" in own
        assert "generate of FSDPNet is registered by register_fsdp_forward_method" in method
        assert verify.startswith("UnsupportedError: verify() runs on one rank")
        assert older.startswith("UnsupportedError: mode='lockstep' needs torch 2.13")
