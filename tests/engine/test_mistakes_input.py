"""Impossible losses, settings, batches and counts are refused by name."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from elastic_mbs import BatchError, CountError, ElasticMBS, LossError, UsageError, elastic_step
from elastic_mbs.engine.shared.running import running_call
from tests.helpers.steps import Pair, cross_entropy, elastic, pairs, still_works, through

pytestmark = pytest.mark.injectable


# The place, the value, the error and its words; tests/batch has more of each kind.
WRONG: dict[str, tuple[str, Any, type[Exception], str]] = {
    "no loss": ("loss", lambda m, b: None, LossError, "None"),
    "a vector": (
        "loss",
        lambda m, b: nn.functional.cross_entropy(m(b[0]), b[1], reduction="none"),
        LossError,
        r"shape \(4,\)",
    ),
    "no graph": ("loss", lambda m, b: cross_entropy(m)(b).detach(), LossError, "no graph"),
    "losses by name": (
        "loss",
        lambda m, b: {"a": cross_entropy(m)(b)},
        LossError,
        "without 'loss'",
    ),
    "an empty batch": ("batch", (torch.zeros(0, 6), torch.zeros(0)), BatchError, "empty"),
    "parts that disagree": (
        "batch",
        {"x": torch.zeros(8, 6), "y": torch.zeros(7)},
        BatchError,
        r"x.*\n?.*8.*\n?.*y.*7",
    ),
    "an unknown part": ("batch", {"x": torch.zeros(8, 6), "meta": object()}, BatchError, "object"),
    "a negative count": (
        "count",
        lambda b: torch.tensor([1, 2, -1, 1, 1, 1, 1, 1]),
        CountError,
        "-1",
    ),
    "a count that is a total": (
        "count",
        lambda b: torch.tensor(8),
        CountError,
        "one count per sample",
    ),
}


@pytest.mark.no_oom_injection
@pytest.mark.parametrize(("where", "wrong", "error", "says"), WRONG.values(), ids=WRONG)
@pytest.mark.parametrize("door", [1, 3, "evaluate"])
def test_a_loss_a_batch_or_a_count_that_makes_no_sense(
    model: nn.Module, door: Any, where: str, wrong: Any, error: type[Exception], says: str
) -> None:
    if door == "evaluate" and where != "batch":
        return
    broken = True
    mbs = elastic(
        model,
        micro_batch_size=4,
        count=lambda b: wrong(b) if where == "count" and broken else torch.ones(8),
    )
    loss_fn, batch = (
        (lambda b: wrong(model, b)) if where == "loss" else cross_entropy(model),
        wrong if where == "batch" else pairs(),
    )
    with pytest.raises(error, match=says):
        mbs.evaluate(model, batch) if door == "evaluate" else through(door, mbs, loss_fn, batch)
    broken = False
    assert still_works(mbs, model)


def test_a_model_without_anything_to_train(model: nn.Module, mbs: ElasticMBS) -> None:
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    with pytest.raises(LossError, match="frozen"):
        mbs.backward(cross_entropy(model), pairs())
    for parameter in model.parameters():
        parameter.requires_grad_(True)


def test_total_outside_of_a_call_and_verify_of_too_few_samples(model: nn.Module) -> None:
    mbs = elastic(model, micro_batch_size=4)
    with pytest.raises(UsageError, match="inside loss_fn"):
        _ = mbs.total
    assert still_works(mbs, model)
    with pytest.raises(UsageError, match="inside loss_fn"):
        _ = mbs.total
    with pytest.raises(UsageError, match="at least 2"):
        mbs.verify(cross_entropy(model), pairs(1))


@pytest.mark.no_oom_injection
@pytest.mark.parametrize(
    "state",
    [
        {},
        {"version": 2, "controller": {}},
        {"version": 1},
        {"version": 1, "controller": 3},
        None,
        [],
        {"version": 1, "controller": {"tracks": 5}},
    ],
)
def test_a_state_that_is_none_changes_nothing(
    model: nn.Module, mbs: ElasticMBS, state: Any
) -> None:
    mbs.evaluate(model, pairs()[0])
    before = mbs.state_dict()
    with pytest.raises(UsageError):
        mbs.load_state_dict(state)
    assert mbs.state_dict() == before


def test_a_batch_that_carries_a_graph(model: nn.Module, door: int) -> None:
    x, y = pairs(4)
    encoder = nn.Linear(x.shape[1], x.shape[1], dtype=x.dtype)
    with pytest.raises(
        BatchError,
        match=r"the tensor '0' carries a graph \(AddmmBackward0\).*model=\[\.\.\.\], or detach it",
    ):
        through(door, elastic(model), cross_entropy(model), (encoder(x), y))
    assert encoder.weight.grad is None
    assert running_call() is None


@pytest.mark.parametrize("door", ["backward", "evaluate", "verify"])
def test_a_loss_or_a_batch_in_the_place_of_the_function(model: nn.Module, door: str) -> None:
    mbs, batch = elastic(model), pairs(4)
    for wrong in (cross_entropy(model)(batch), batch):
        with pytest.raises(
            UsageError,
            match=rf"mbs\.{door}\(.*the function comes first and is called on pieces of the "
            rf"batch; got a (Tensor|tuple)",
        ):
            getattr(mbs, door)(wrong, batch)


def test_the_decorator_without_its_model_or_with_a_class_in_its_place() -> None:
    def train_step(batch: Pair) -> Tensor:
        raise AssertionError("never called")

    decorate: Any = elastic_step
    says = r" was decorated without its model: write @elastic_step\(model\) above it"
    with pytest.raises(UsageError, match=f"train_step{says}"):
        decorate(train_step)(pairs(4))
    with pytest.raises(UsageError, match=f"the step function{says}"):
        decorate()(train_step)
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters())
    with pytest.raises(UsageError, match=r"got an optimizer \(SGD\): give the model$"):
        decorate(optimizer)(train_step)
    with pytest.raises(UsageError, match="class"):
        decorate(nn.Linear)
