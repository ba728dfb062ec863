"""Running statistics that a step treats as its own: replaced, given other memory, or trained by a step that switches modes."""

import copy

import pytest
import torch
from torch import nn

from elastic_mbs import ReplayUnsafeError
from elastic_mbs.testing import InjectOOM
from tests.helpers.steps import Pair, assert_as_by_hand, cross_entropy, elastic, pairs

pytestmark = pytest.mark.no_oom_injection


class Replacing(nn.Module):
    """Puts a new tensor in the place of a BatchNorm's running mean in each forward, or new memory under the same one."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.net = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.net(x)
        norm = self.net[1]
        assert isinstance(norm, nn.BatchNorm1d)
        assert norm.running_mean is not None
        if self.way == "tensor":
            norm.running_mean = norm.running_mean + 1
        elif self.way == "memory":
            norm.running_mean.data = norm.running_mean + 1
        return out


@pytest.mark.parametrize("early", [True, False])
@pytest.mark.parametrize("way", ["tensor", "memory"])
def test_running_statistics_that_a_forward_replaces_are_put_back(way: str, early: bool) -> None:
    batch = pairs(16)
    for at in range(3, 100, 6):
        torch.manual_seed(0)
        model = Replacing(way if early else "not yet").double()
        mbs = elastic(model, micro_batch_size=4, min_micro_batch_size=2)
        loss_fn = cross_entropy(model)
        for _ in range(2):
            mbs.backward(loss_fn, batch)
        model.way = way
        for _ in range(2):
            model.zero_grad()
            twin = copy.deepcopy(model)
            with InjectOOM(at=[at]):
                result = mbs.backward(loss_fn, batch)
            assert_as_by_hand(model, twin, result, batch[0])


def test_a_step_that_begins_to_train_batch_norm_itself_has_its_statistics_put_back_with_their_count() -> None:
    """Its calls begin in eval mode, and a forward of BatchNorm moves the version of the count alone."""
    batch, recovered = pairs(12), 0
    for at in range(1, 50, 3):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 4)).double().eval()
        mbs = elastic(model, micro_batch_size=4, min_micro_batch_size=2)
        begun = [False]

        def loss_fn(piece: Pair, model: nn.Module = model, begun: list[bool] = begun) -> torch.Tensor:
            model.train(begun[0])
            return cross_entropy(model)(piece)

        for _ in range(3):
            mbs.backward(loss_fn, batch)
        model.zero_grad()
        begun[0], twin = True, copy.deepcopy(model)
        try:
            with InjectOOM(at=[at]):
                result = mbs.backward(loss_fn, batch)
        except ReplayUnsafeError:
            continue
        recovered += result.ooms
        assert_as_by_hand(model, twin.train(), result, batch[0])
    assert recovered
