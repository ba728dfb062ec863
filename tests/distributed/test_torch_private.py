"""The contract with what torch keeps to itself: one test for each function of the adapter."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import PrefixStore
from torch.distributed.fsdp import (
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.nn.parallel import DistributedDataParallel as DDP

from elastic_mbs.distributed import torch_private
from elastic_mbs.testing import InjectOOM
from stress.ranks.job import run_ranks, values
from tests.helpers.ddp import net


class Asks(nn.Module):
    """A module that notes the wrapper that is called around it."""

    seen: object = None

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        Asks.seen = torch_private.wrapper_in_forward()
        out: Tensor = self.inner(x)
        return out


def plain(rank: int, world: int) -> None:
    """A wrapper without any option is refused for nothing."""
    ddp = DDP(net())
    assert torch_private.comm_hook(ddp) == ""
    assert not torch_private.has_buffer_hook(ddp)
    assert not torch_private.is_joining(ddp)
    assert not torch_private.is_mixed(ddp)
    assert not torch_private.delays_parameters(ddp)
    assert torch_private.ignored(ddp) == set()
    assert not torch_private.has_comm_hooks(ddp)
    assert not torch_private.has_own_forward(ddp)
    assert not torch_private.sums_in_python(ddp)
    assert list(map(id, torch_private.parameters_of(ddp))) == list(map(id, ddp.parameters()))
    assert torch_private.sends_buffers(ddp)
    assert torch_private.sharded(ddp.module) is None
    with ddp.join():
        assert torch_private.is_joining(ddp)
    left = net()
    DDP._set_params_and_buffers_to_ignore_for_model(left, ["0.bias"])
    assert torch_private.ignored(DDP(left)) == {"0.bias"}
    assert not torch_private.sends_buffers(DDP(net(), broadcast_buffers=False))


def test_a_plain_wrapper_shows_nothing_that_is_refused() -> None:
    values(run_ranks(plain, world=1))


def communicating(rank: int, world: int) -> list[bool]:
    ddp, other = DDP(net()), DDP(nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 2)))
    found = [torch_private.communicates(ddp)]
    with ddp.no_sync():
        found.append(torch_private.communicates(ddp))
    with torch.no_grad():
        found += [torch_private.communicates(ddp), torch_private.communicates(other)]
    return found


def test_a_wrapper_communicates_for_gradients_and_for_buffers() -> None:
    assert values(run_ranks(communicating, world=1)) == [[True, False, False, True]]


def in_forward(rank: int, world: int) -> list[bool]:
    ddp = DDP(Asks())
    x = torch.zeros(1, 2)
    seen = []
    ddp(x)
    seen.append(Asks.seen is ddp)
    torch_private.silence(ddp)
    ddp(x)
    seen.append(Asks.seen is None)
    torch_private.unsilence(ddp)
    torch_private.unsilence(ddp)
    ddp(x)
    seen.append(Asks.seen is ddp)
    return seen


def test_a_wrapper_is_known_in_its_forward_and_can_be_silenced() -> None:
    assert values(run_ranks(in_forward, world=1)) == [[True, True, True]]


def wait(rank: int, world: int) -> list[bool]:
    group = dist.group.WORLD
    assert group is not None
    torch_private.store_of(group).set("a", "b")
    if rank:
        time.sleep(1.5)
    work = dist.all_reduce(torch.ones(1), async_op=True)
    assert work is not None
    seen = [torch_private.is_over(work, 0.3)]
    while not torch_private.is_over(work, 0.3):  # waiting again is allowed
        pass
    with InjectOOM(always_from=1) as fault, torch_private.unseen():
        torch.zeros(3)
    return [*seen, bool(fault.count)]


def test_a_wait_can_be_repeated_and_no_mode_sees_what_is_unseen() -> None:
    first, second = values(run_ranks(wait))
    assert first == [False, False]
    assert second == [True, False]


def collectives(rank: int, world: int) -> list[list[float]]:
    group = dist.group.WORLD
    assert group is not None
    store = PrefixStore("own", torch_private.store_of(group))
    found = []
    for each in (group, torch_private.gloo_group(store, rank, world, 20.0)):
        sums, sent = torch.tensor([rank + 1.0]), torch.tensor([rank + 5.0])
        for work in (torch_private.all_reduce(each, sums), torch_private.broadcast(each, sent)):
            work.wait()
        found.append([sums.item(), sent.item()])
    return found


def test_sums_and_values_of_the_first_rank_go_through_both_kinds_of_group() -> None:
    for found in values(run_ranks(collectives)):
        assert found == [[3.0, 5.0]] * 2


# ---------------------------------------------------------------------- fully_shard


class Half(nn.Module):
    """A module with another method that computes."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x)
        return out

    def generate(self, x: Tensor) -> Tensor:
        out: Tensor = self(x)
        return out


def units(rank: int, world: int) -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    plain = Half()
    grouped: list[nn.Module] = [Half(), Half()]
    unit = fully_shard(plain, mp_policy=policy)
    fully_shard(grouped)
    assert torch_private.precision_of(unit) is policy
    assert torch_private.sums_of_its_own(unit) == ""
    unit.set_all_reduce_hook(lambda sums: None)
    assert torch_private.sums_of_its_own(unit) == "set_all_reduce_hook"
    factor = fully_shard(Half())
    factor.set_gradient_divide_factor(2.0)
    assert torch_private.sums_of_its_own(factor) == "set_gradient_divide_factor"
    own = plain.register_forward_hook(lambda *args: None)
    for module in (plain, *grouped):
        before, after = module._forward_pre_hooks, module._forward_hooks
        found = [torch_private.is_of_fsdp(hook) for hook in (*before.values(), *after.values())]
        assert sum(found) == 2
        assert len(found) == (3 if module is plain else 2)
    own.remove()
    assert torch_private.forward_methods(unit) == []
    register_fsdp_forward_method(plain, "generate")
    assert torch_private.forward_methods(unit) == ["generate"]
    method = plain.generate
    torch_private.silence_methods(unit, lambda module, *given: given, lambda *given: "silent")
    assert method(torch.zeros(1, 2)) == "silent"
    for _ in range(2):
        torch_private.unsilence_methods(unit)
    assert method(torch.zeros(1, 2)).shape == (1, 2)
    assert not torch_private.gathers_by_itself(torch.zeros(2))


def test_units_show_what_fully_shard_was_told() -> None:
    values(run_ranks(units, world=1))


def exchange(rank: int, world: int) -> tuple[list[float], list[float]]:
    """Gather parts, and scatter sums, without a warning of torch's."""
    group = dist.group.WORLD
    assert group is not None
    whole, part = torch.zeros(2 * world), torch.full((2,), float(rank))
    torch_private.begin_gather(whole, part, group).wait()
    gathered = whole.tolist()
    torch_private.begin_scatter(part, whole, group).wait()
    return gathered, part.tolist()


def test_parts_are_gathered_in_order_and_sums_scattered() -> None:
    for rank, (gathered, sums) in enumerate(values(run_ranks(exchange))):
        assert gathered == [0.0, 0.0, 1.0, 1.0]
        assert sums == [2.0 * rank] * 2


def taken_back(rank: int, world: int) -> list[object]:
    """Gather a unit, sum gradients into it, and leave one whole gradient behind."""
    unit = fully_shard(Half())
    before = torch_private.shards_and_wholes(unit)
    torch_private.make_ready(unit)
    kinds = [kind.__name__ for kind in torch_private.collectives_of(unit)]
    unused = torch_private.sums_unused(unit)
    unit.set_reduce_scatter_unused_params(True)
    changed = torch_private.sums_unused(unit)
    unit.unshard()
    unit.reshard()
    pairs = torch_private.shards_and_wholes(unit)
    torch_private.add_no_gradient(unit)
    wholes = [whole for _, whole in pairs if whole is not None]
    sums = [shard.grad for shard, _ in pairs]
    for whole in wholes:
        whole.grad = torch.zeros(whole.shape)
    unit.reset_iter_state()
    torch_private.drop_whole_gradients(unit)
    left = [whole.grad is None for whole in wholes]
    return [
        *([whole for _, whole in before] == [None] * 2, len(wholes), kinds, unused, changed),
        *([grad is not None and not grad.any() for grad in sums], left),
    ]


@pytest.mark.skipif(not hasattr(FSDPModule, "reset_iter_state"), reason="torch is older")
def test_a_unit_shows_what_lock_step_takes_back() -> None:
    for found in values(run_ranks(taken_back)):
        kinds = ["DefaultAllGather", "DefaultReduceScatter"]
        assert found == [True, 2, kinds, False, True, [True] * 2, [True] * 2]
