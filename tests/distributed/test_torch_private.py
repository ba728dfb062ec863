"""The contract with what torch keeps to itself: one test for each function of the adapter."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

from elastic_mbs.distributed import torch_private
from elastic_mbs.testing import InjectOOM
from tests.helpers.ddp import net
from tests.helpers.ranks import run_ranks, values


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
