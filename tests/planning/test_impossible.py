"""A step that cannot be traced has a report that says why, and trains without a plan."""

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from elastic_mbs import LossError, MisuseError, UsageError
from tests.helpers.steps import cross_entropy, elastic, mlp, pairs, there


@torch.library.custom_op("elastic_mbs_tests::doubled", mutates_args=())
def doubled(x: Tensor) -> Tensor:
    return 2 * x


doubled.register_autograd(lambda ctx, grad: 2 * grad)

sparse, ROWS = nn.Embedding(8, 2, sparse=True), torch.arange(4)
LOSSES: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "item": (lambda out: out.mean() * out.max().item(), "reads the value"),
    "branch": (lambda out: out.mean() if out.mean() > 0 else -out.mean(), "reads the value"),
    "mask": (lambda out: out[out > 0].mean(), "depends on values"),
    "operation": (lambda out: doubled(out).mean(), "register_fake"),
    "sparse": (lambda out: out.mean() + sparse(ROWS).mean(), "a sparse embedding"),
    "numpy": (lambda out: out.mean() * float(out.detach().numpy().max()), "to numpy"),
    "array": (lambda out: out.mean() * float(np.asarray(out.detach()).max()), "to numpy"),
}


@pytest.mark.parametrize("case", LOSSES)
def test_a_loss_that_needs_values_has_no_plan_and_trains_all_the_same(case: str) -> None:
    model = mlp()
    of, why = LOSSES[case]
    mbs = elastic(model, micro_batch_size=8)
    report = mbs.plan(lambda b: of(model(b[0])), pairs())
    assert why in there(report.reason)
    assert "no plan: " in str(report)
    assert "Training needs none" in str(report)
    assert (report.sizes, report.largest, report.model) == ((), None, None)
    assert mbs.backward(lambda b: of(model(b[0])), pairs()).partition == ((0, 8),)


INSTEAD: dict[str, Callable[[Tensor], Tensor]] = {
    "item": lambda out: out.mean() * 1.0,
    "branch": lambda out: out.mean(),
    "mask": lambda out: out.flatten()[torch.arange(len(out) * 2)].mean(),
    "numpy": lambda out: out.mean() * 1.0,
}


@pytest.mark.parametrize("case", INSTEAD)
def test_a_loss_with_a_constant_in_place_of_the_value_is_planned_as_the_reason_says(
    case: str,
) -> None:
    model = mlp()
    mbs = elastic(model, micro_batch_size=8)
    reason = there(mbs.plan(lambda b: LOSSES[case][0](model(b[0])), pairs()).reason)
    assert re.search(r"plan with a loss_fn that has (a|indices) .*in its place", reason)
    assert mbs.plan(lambda b: INSTEAD[case](model(b[0])), pairs()).reason is None


def test_an_embedding_is_planned_with_sparse_false_as_the_reason_says() -> None:
    table = nn.Embedding(8, 2, sparse=True)
    mbs, batch = elastic(table), torch.arange(4)
    assert "sparse=False" in there(mbs.plan(lambda b: table(b).mean(), batch).reason)
    table.sparse = False
    assert mbs.plan(lambda b: table(b).mean(), batch).reason is None


class ReadsValues(torch.optim.SGD):
    """An optimizer that may do anything with the values of gradients."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["lr"] = 0.1 / float(group["params"][0].grad.norm())
        return super().step()


@pytest.mark.parametrize("kind", [torch.optim.LBFGS, ReadsValues])
def test_an_optimizer_whose_step_cannot_be_traced_is_named(
    kind: Callable[..., torch.optim.Optimizer],
) -> None:
    model = mlp()
    mbs = elastic(model)
    report = mbs.plan(cross_entropy(model), pairs(), optimizer=kind(model.parameters()))
    assert "without optimizer=" in there(report.reason)
    assert mbs.plan(cross_entropy(model), pairs()).reason is None


def test_a_loop_too_long_to_trace_is_traced_in_part(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = nn.Linear(6, 2)
    monkeypatch.setattr("elastic_mbs.planning.timeline.MOST_OPERATIONS", 400)

    def loss_fn(batch: Tensor) -> Tensor:
        return torch.stack([model(row).square().mean() for row in batch]).mean()

    report = elastic(model).plan(loss_fn, torch.randn(512, 6))
    assert report.reason is None
    assert there(report.model).predict(16 * 6) is not None
    assert report.sizes[0].peak is None  # the whole batch was not traced
    assert "?" in str(report)
    monkeypatch.setattr("elastic_mbs.planning.timeline.MOST_OPERATIONS", 10)
    assert "10 operations" in there(elastic(model).plan(loss_fn, torch.randn(512, 6)).reason)


def counts_labels(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    rows, labels = batch
    places = (labels.view(-1) >= 0).nonzero().view(-1)
    loss: Tensor = model(rows)[places].square().sum() / int((labels >= 0).sum())
    return loss


def edits_labels(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    rows, labels = batch[0], batch[1].clone()
    labels.view(-1)[0] = -100
    return counts_labels(model, (rows, labels))


def test_values_of_labels_are_known_until_a_step_edits_them() -> None:
    model, labels = nn.Linear(6, 2), torch.tensor([0, -100, 1, 1, -100, 0, 0, 1])
    batch = torch.randn(8, 6), labels
    mbs = elastic(model, count=lambda b: (b[1] >= 0).long())
    report = mbs.plan(lambda b: counts_labels(model, b), batch)
    assert report.reason is None
    assert float(mbs.backward(lambda b: counts_labels(model, b), batch)) > 0
    assert "depends on values" in there(mbs.plan(lambda b: edits_labels(model, b), batch).reason)


def test_a_model_on_several_devices_has_no_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(2, 2)
    mbs = elastic(model)
    monkeypatch.setattr(mbs._resources, "follow_model", lambda: None)  # back to the one there is
    mbs._resources.devices = [torch.device("cuda", 0), torch.device("cuda", 1)]
    assert "2 devices" in there(mbs.plan(lambda b: model(b).mean(), torch.randn(4, 2)).reason)


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch without oneDNN")
def test_the_workspace_of_onednns_lstm_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    rnn = nn.LSTM(4, 8)

    def loss_fn(batch: Tensor) -> Tensor:
        loss: Tensor = rnn(batch)[0].square().mean()
        return loss

    report = elastic(rnn).plan(loss_fn, torch.randn(6, 3, 4))
    assert "mkldnn.enabled = False makes it plain operations" in there(report.reason)
    monkeypatch.setattr("torch.backends.mkldnn.enabled", False)
    assert elastic(rnn).plan(loss_fn, torch.randn(6, 3, 4)).reason is None


def test_mistakes_are_raised_as_in_training() -> None:
    model = mlp()
    mbs = elastic(model)
    with pytest.raises(LossError):
        mbs.plan(lambda b: None, pairs())
    with pytest.raises(UsageError, match="1 XB"):
        mbs.plan(cross_entropy(model), pairs(), budget="1 XB")
    with pytest.raises(MisuseError, match="plan"):
        mbs.backward(lambda b: mbs.plan(cross_entropy(model), b), pairs())
    with pytest.raises(UsageError, match="plan"):
        mbs.plan(pairs(), pairs())  # type: ignore[arg-type]
