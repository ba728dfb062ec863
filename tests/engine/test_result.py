"""The loss and the outputs of a call: of the whole batch, in its order, without a graph."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from elastic_mbs import Warned
from elastic_mbs.engine import result as module
from elastic_mbs.engine.result import StepResult, StoredOutput
from tests.helpers.steps import elastic


def result(outputs: list[Any], losses: tuple[float, ...] = (), sizes: tuple[int, ...] = (2, 1)) -> StepResult:
    ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
    return StepResult(
        partition=tuple((end - size, end) for size, end in zip(sizes, ends, strict=True)),
        micro_batch_size=2,
        _losses=tuple(torch.tensor(loss, dtype=torch.float64) for loss in losses),
        _outputs=[StoredOutput(value, "cpu") for value in outputs],
    )


def test_the_loss_is_the_weighted_sum_of_the_pieces() -> None:
    found = result([], (0.25, 0.5))
    assert float(found) == 0.75
    assert found.loss.shape == ()
    assert found.loss is found.loss  # summed once
    assert (f"{found:.4f}", f"{found}") == ("0.7500", str(found))
    assert float(result([])) == 0.0
    assert repr(found) == "StepResult(partition=((0, 2), (2, 3)), micro_batch_size=2, ooms=0, replayed_samples=0, skipped=())"  # no tensor
    mixed = StepResult(((0, 1), (1, 2)), 1, _losses=(torch.tensor(0.5, dtype=torch.float32), torch.tensor(0.25, dtype=torch.float64)))
    assert (mixed.loss.dtype, float(mixed)) == (torch.float64, 0.75)


def test_outputs_are_joined_once() -> None:
    found = result([{"y": torch.tensor([1, 2]), "n": 2}, {"y": torch.tensor([3]), "n": 1}])
    assert (found.outputs["y"].tolist(), found.outputs["n"]) == ([1, 2, 3], [2, 1])
    assert found.outputs is found.outputs
    assert result([]).outputs is None


@pytest.mark.parametrize("place", ["cpu", "device"])
def test_stored_outputs_hold_no_graph_and_may_be_sparse(place: Any) -> None:
    w = torch.ones(2, requires_grad=True)
    own = StoredOutput({"y": w * 2, "cache": SimpleNamespace(keys=w * 4), "rest": [torch.eye(3).to_sparse(), "text", None]}, place)
    stored = own.get()
    assert stored["y"].tolist() == [2.0, 2.0]
    assert not stored["y"].requires_grad
    assert not stored["cache"].keys.requires_grad  # pieces of a decoder kept their cache with its graph: no micro-batch was small enough
    assert torch.equal(stored["rest"][0].to_dense(), torch.eye(3))
    assert stored["rest"][1:] == ["text", None]


def test_outputs_that_only_some_pieces_have_can_be_read() -> None:
    model = nn.Linear(3, 1)

    def loss_fn(x: Tensor) -> Any:
        y = model(x)
        return (y.mean(), y) if x[0, 0] > 0 else y.mean()

    with elastic(model, micro_batch_size=2) as mbs:
        outputs = mbs.backward(loss_fn, torch.tensor([1.0, 1.0, -1.0, -1.0, 2.0, 2.0]).view(6, 1).expand(6, 3)).outputs
    assert [output is None for output in outputs] == [False, True, False]


@pytest.mark.parametrize(("much", "told"), [(8 * 8 * 4 - 1, 1), (8 * 8 * 4, 0)])
@pytest.mark.parametrize("place", ["cpu", "device", None])
def test_outputs_that_take_much_memory_are_told_of_once(place: Any, much: int, told: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MUCH", much)
    model, events = nn.Linear(3, 8), list[Any]()
    mbs = elastic(model, outputs=place, micro_batch_size=3, on_event=events.append)

    def step(x: Tensor) -> Any:
        y = model(x)
        return y.sum(), y

    for _ in range(2):
        mbs.backward(step, torch.zeros(8, 3))
    warned = [event.message for event in events if isinstance(event, Warned)]
    assert len(warned) == (told if place else 0)
    assert all("besides the loss takes 256 B for this batch" in text and "outputs=None" in text for text in warned)
