"""A rehearsal puts parameters back that the loss edits in place."""

from __future__ import annotations

import copy
import logging

import pytest
import torch
from torch import Tensor, nn

from elastic_mbs import GradientOptions
from elastic_mbs.errors import ReplayUnsafeError
from tests.helpers.steps import elastic, off_by, whole_gradient


class Edits(nn.Module):
    """A student whose weights are clipped, with a frozen teacher that follows it."""

    def __init__(self, *, teaches: bool) -> None:
        super().__init__()
        self.student = nn.Linear(4, 1).double()
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)
        self.teaches = teaches

    def forward(self, x: Tensor) -> Tensor:
        """Return the loss over x."""
        with torch.no_grad():
            self.student.weight.clamp_(-0.1, 0.1)
            for slow, fast in zip(
                self.teacher.parameters(), self.student.parameters(), strict=True
            ):
                slow.mul_(0.9).add_(fast, alpha=0.1)
        found: Tensor = self.student(x)
        return (found - self.teacher(x) if self.teaches else found).square().mean()

    def values(self) -> list[Tensor]:
        """Return copies of all parameters."""
        return [each.detach().clone() for each in self.parameters()]


X = torch.randn(8, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("given", [True, False])
@pytest.mark.parametrize("teaches", [True, False])
def test_verify_leaves_parameters_as_they_are(teaches: bool, given: bool) -> None:
    model = Edits(teaches=teaches)
    before = model.values()
    mbs = elastic(model if given else model.student, micro_batch_size=4)
    for _ in range(2):
        report = mbs.verify(model, X)
        assert report.ok is not teaches, report
        assert all(map(torch.equal, model.values(), before))
    assert all(each.grad is None for each in model.parameters())


@pytest.mark.parametrize("given", [True, False])
def test_the_check_after_the_first_split_leaves_parameters_as_the_call_left_them(
    given: bool, caplog: pytest.LogCaptureFixture
) -> None:
    checked, bare = Edits(teaches=False), Edits(teaches=False)
    bare.load_state_dict(checked.state_dict())
    wanted = whole_gradient(copy.deepcopy(checked), lambda model: model(X))
    options = GradientOptions(verify="warn"), GradientOptions(verify="off")
    with caplog.at_level(logging.WARNING):
        for model, gradients in zip((checked, bare), options, strict=True):
            mbs = elastic(
                model if given else model.student, micro_batch_size=4, gradients=gradients
            )
            mbs.backward(model, X)
    assert all(map(torch.equal, checked.values(), bare.values()))
    assert off_by(checked, wanted) <= 1e-12
    assert "could not be compared" not in caplog.text


def test_a_parameter_that_no_rehearsal_can_keep_is_named() -> None:
    model = nn.Linear(4, 1).double()
    sparse = torch.eye(4, dtype=torch.float64).to_sparse()
    table = nn.Parameter(sparse, requires_grad=False)
    model.register_parameter("table", table)

    def loss_fn(x: Tensor) -> Tensor:
        with torch.no_grad():
            table.mul_(0.9)
        out: Tensor = model(x)
        return out.square().mean()

    with pytest.raises(ReplayUnsafeError, match=r"parameter Linear\.table.*rehearsal") as caught:
        elastic(model).verify(loss_fn, X)
    assert "checkpoint" not in str(caught.value)
    assert all(each.grad is None for each in model.parameters())
