"""A step function may freeze parameters for a while, as steps of two networks do: after a failure in between they are as when the call began."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from elastic_mbs import IncompleteBatchError
from elastic_mbs.testing import InjectOOM
from tests.helpers.steps import elastic, grads, off_by, through
from tests.helpers.strikes import every_operation

pytestmark = pytest.mark.no_oom_injection

DOORS = [1, 3]
ZEROS = torch.zeros(8, 3, dtype=torch.float64)


def two_networks(*, thawed: bool) -> tuple[nn.ModuleList, Callable[[Tensor], Tensor]]:
    """A generator and a judge, and the generator's loss, in which the judge is frozen; `thawed` says whether it is trainable again afterwards."""
    torch.manual_seed(0)
    generator = nn.Linear(3, 6).double()
    judge = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1)).double()

    def loss_fn(noise: Tensor) -> Tensor:
        judge.requires_grad_(False)
        loss = F.softplus(-judge(generator(noise))).mean()
        if thawed:
            judge.requires_grad_(True)
        return loss

    return nn.ModuleList([generator, judge]), loss_fn


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("known", [0, 3], ids=["first call", "known"])
@pytest.mark.parametrize("thawed", [True, False])
def test_wherever_memory_runs_out_the_gradient_is_exact_and_what_was_frozen_for_a_while_is_no_longer(door: int, known: int, thawed: bool) -> None:
    noise = torch.randn(8, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))

    def run(inject: InjectOOM) -> tuple[nn.ModuleList, tuple[tuple[int, int], ...]]:
        networks, loss_fn = two_networks(thawed=thawed)
        mbs = elastic(networks, micro_batch_size=4, min_micro_batch_size=4)
        for _ in range(known):
            through(door, mbs, loss_fn, noise)
            networks.zero_grad()
            networks[1].requires_grad_(True)
        with inject:
            result = through(door, mbs, loss_fn, noise)
        assert all(parameter.requires_grad is thawed for parameter in networks[1].parameters())
        assert all(parameter.grad is None for parameter in networks[1].parameters())
        return networks, result.partition

    clean, pieces = run(InjectOOM())
    for inject in every_operation():
        networks, partition = run(inject)
        assert partition == pieces
        assert off_by(networks, grads(clean)) <= 1e-12
        for ours, wanted in zip(networks.buffers(), clean.buffers(), strict=True):
            torch.testing.assert_close(ours, wanted, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("quantised", [False, True])
@pytest.mark.parametrize("door", DOORS)
def test_an_error_of_the_users_own_passes_and_leaves_nothing_frozen_that_can_be_trained(door: int, quantised: bool) -> None:
    """It came out as torch's refusal of gradients for integers where a parameter had become one."""
    networks, _ = two_networks(thawed=True)

    def loss_fn(noise: Tensor) -> Tensor:
        networks.requires_grad_(False)
        networks[0].weight.data = networks[0].weight.data.to(torch.int8 if quantised else torch.float64)
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        through(door, elastic(networks, micro_batch_size=4), loss_fn, ZEROS)
    assert [parameter.requires_grad for parameter in networks.parameters()] == [not quantised, *[True] * 7]


def test_what_is_frozen_after_a_loop_was_left_early_stays_so() -> None:
    networks, loss_fn = two_networks(thawed=True)
    mbs = elastic(networks, micro_batch_size=4)
    for micro in mbs.micro_batches(ZEROS):
        with micro:
            micro.backward(loss_fn(micro.data))
        break
    networks[0].requires_grad_(False)
    with pytest.raises(IncompleteBatchError):
        mbs.backward(loss_fn, ZEROS)
    assert not networks[0].weight.requires_grad
