"""A step function may freeze parameters for a while, as steps of two networks do: after a failure in between they are as when the call began."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from elastic_mbs import IncompleteBatchError
from elastic_mbs.testing import InjectOOM
from tests.helpers.steps import elastic, through

pytestmark = pytest.mark.no_oom_injection

DOORS = [1, 3]


def two_networks(*, thawed: bool) -> tuple[nn.Module, nn.Module, Callable[[Tensor], Tensor]]:
    """A generator, a judge, and the generator's loss, in which the judge is frozen; `thawed` says whether it is trainable again afterwards."""
    torch.manual_seed(0)
    generator = nn.Linear(3, 6).double()
    judge = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1)).double()

    def loss_fn(noise: Tensor) -> Tensor:
        judge.requires_grad_(False)
        loss = F.softplus(-judge(generator(noise))).mean()
        if thawed:
            judge.requires_grad_(True)
        return loss

    return generator, judge, loss_fn


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("known", [0, 3], ids=["first call", "known"])
@pytest.mark.parametrize("thawed", [True, False])
def test_wherever_memory_runs_out_the_gradient_is_exact_and_what_was_frozen_for_a_while_is_no_longer(door: int, known: int, thawed: bool) -> None:
    noise = torch.randn(8, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))

    def run(at: int | None) -> tuple[int, list[Tensor], list[Tensor], tuple[tuple[int, int], ...]]:
        generator, judge, loss_fn = two_networks(thawed=thawed)
        mbs = elastic(nn.ModuleList([generator, judge]), micro_batch_size=4, min_micro_batch_size=4, grow=False, wait_for_memory=0)
        for _ in range(known):
            through(door, mbs, loss_fn, noise)
            generator.zero_grad()
            judge.requires_grad_(True)
        with InjectOOM(at=[] if at is None else [at]):
            result = through(door, mbs, loss_fn, noise)
        assert all(parameter.requires_grad is thawed for parameter in judge.parameters())
        assert all(parameter.grad is None for parameter in judge.parameters())
        return result.ooms, [p.grad for p in generator.parameters() if p.grad is not None], list(judge.buffers()), result.partition

    _, gradients, buffers, partition = run(None)
    assert len(gradients) == 2
    for at in range(1, 200):
        ooms, found, moved, split = run(at)
        if not ooms:
            assert at > 20, "the operations of two pieces"
            break
        assert split == partition
        for ours, wanted in zip([*found, *moved], [*gradients, *buffers], strict=True):
            torch.testing.assert_close(ours, wanted, rtol=1e-12, atol=1e-14)
    else:
        pytest.fail("there was no clean run")


@pytest.mark.parametrize("door", DOORS)
def test_an_error_of_the_users_own_leaves_nothing_frozen(door: int) -> None:
    generator, judge, _ = two_networks(thawed=True)
    mbs = elastic(nn.ModuleList([generator, judge]), micro_batch_size=4)

    def loss_fn(noise: Tensor) -> Tensor:
        judge.requires_grad_(False)
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        through(door, mbs, loss_fn, torch.zeros(8, 3, dtype=torch.float64))
    assert all(parameter.requires_grad for parameter in judge.parameters())


def test_an_error_of_a_step_that_has_quantised_a_parameter_passes_through() -> None:
    """It came out as torch's refusal of gradients for integers."""
    net = nn.Linear(3, 1)

    def loss_fn(x: Tensor) -> Tensor:
        net.weight.requires_grad_(False)
        net.weight.data = net.weight.data.to(torch.int8)
        raise ValueError("of the user's own")

    with pytest.raises(ValueError, match="of the user's own"):
        elastic(net, micro_batch_size=2).backward(loss_fn, torch.zeros(4, 3))
    assert not net.weight.requires_grad
    assert net.bias.requires_grad


def test_what_is_frozen_after_a_loop_was_left_early_stays_so() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)).double()
    mbs = elastic(model, micro_batch_size=4)
    for micro in mbs.micro_batches(torch.zeros(8, 3, dtype=torch.float64)):
        with micro:
            micro.backward(model(micro.data).square().mean())
        break
    model[0].requires_grad_(False)
    with pytest.raises(IncompleteBatchError):
        mbs.backward(lambda piece: model(piece).square().mean(), torch.zeros(8, 3, dtype=torch.float64))
    assert not model[0].weight.requires_grad
