"""`mbs.evaluate` joins the outputs of pieces, survives out-of-memory, and makes no gradients."""

import random
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from elastic_mbs import Event, MemoryBudget, MicroBatchFloorError, OutOfMemory, UsageError
from elastic_mbs.testing import InjectOOM
from tests.helpers.steps import FailOn, Pair, cross_entropy, elastic, grads, mlp, off_by, pairs

pytestmark = pytest.mark.injectable


@pytest.mark.parametrize("fault", [0, 1, 2, 4, 5])
def test_outputs_are_joined_without_gradients_across_out_of_memory(
    model: nn.Sequential, batch: Pair, fault: int
) -> None:
    with torch.no_grad():
        wanted = model(batch[0])
    modes: list[bool] = []

    def fn(b: Pair, factor: float = 2.0, *, shift: float) -> dict[str, Any]:
        modes.append(torch.is_grad_enabled())
        return {"logits": model(b[0]) * factor + shift, "size": len(b[0]), "none": None}

    mbs = elastic(model, micro_batch_size=4)
    with InjectOOM(at=[fault]) as inject:
        outputs = mbs.evaluate(partial(fn, shift=1.0), batch)
    assert mbs.stats.ooms == len(inject.hits) == (fault > 0)
    assert torch.allclose(outputs["logits"], wanted * 2 + 1, rtol=1e-12)
    assert not outputs["logits"].requires_grad
    assert set(modes) == {False}
    assert torch.is_grad_enabled()
    assert sum(outputs["size"]) == 8
    assert mbs.evaluate(lambda b: None, batch) is None
    assert all(p.grad is None for p in model.parameters())
    assert mbs.last_result is None


@pytest.mark.no_oom_injection
def test_outputs_per_piece_are_told_from_outputs_per_sample() -> None:
    """A 4 × 4 confusion matrix of a piece of four samples looks like one row per sample.

    Pieces of another length in the same call or in an earlier one show that it is not.
    """
    model, batch = mlp(), pairs(16)

    def confusion(b: Pair) -> Tensor:
        return torch.bincount(4 * b[1] + model(b[0]).argmax(1), minlength=16).view(4, 4)

    mbs = elastic(model, micro_batch_size=8)
    found = [mbs.evaluate(confusion, batch)]
    with InjectOOM(at=[1]):
        found.append(mbs.evaluate(confusion, batch))
    assert [matrices.lengths for matrices in found] == [(8, 8), (4, 4, 4, 4)]
    assert all(torch.equal(matrices.sum(), confusion(batch)) for matrices in found)


@pytest.mark.no_oom_injection
def test_outputs_that_would_fill_the_device_fit_on_the_host() -> None:
    model, batch = mlp(), torch.ones(64, 6, dtype=torch.float64)

    def fn(b: Tensor) -> Any:
        return model(b).repeat(1, 256)  # 8 KiB for a sample, 512 KiB in all

    with MemoryBudget("1MiB", track=(model, batch)) as budget:
        mbs = elastic(model, micro_batch_size=4, grow=False)
        budget.limit = budget.live + 160 * 2**10
        outputs = mbs.evaluate(fn, batch)
        assert outputs.shape == (64, 1024)
        assert mbs.stats.ooms == 0
        with pytest.raises(MicroBatchFloorError):
            mbs.evaluate(fn, batch, outputs="device")
        # All pieces fit, but the tensor that they are joined to does not.
        budget.limit = budget.live + 700 * 2**10
        with pytest.raises(
            MicroBatchFloorError,
            match=r"no room to join the outputs on the device "
            r'\(outputs="cpu" keeps them on the host\)',
        ):
            mbs.evaluate(fn, batch, outputs="device")
    for bad in (None, "gpu"):
        with pytest.raises(UsageError, match="cpu"):
            mbs.evaluate(fn, batch, outputs=bad)  # type: ignore[arg-type]  # on purpose


@pytest.mark.no_oom_injection
def test_an_evaluation_that_starts_over_leaves_gradients_alone() -> None:
    """A restart drops the gradients of a call, and an evaluation has none."""
    model, batch, fail = mlp(), pairs(8), FailOn(6)  # the second piece of the third call
    events, draws = list[Event](), False

    def scores(b: Pair) -> Any:
        factor = random.random() if draws else 1.0
        fail()
        return model(b[0]) * factor

    mbs = elastic(model, micro_batch_size=4, on_event=events.append)
    for _ in range(2):
        mbs.evaluate(scores, batch)
    mbs.backward(cross_entropy(model), batch)
    before = grads(model)
    draws = True
    mbs.evaluate(scores, batch)
    assert [event.mode for event in events if isinstance(event, OutOfMemory)] == ["step"]
    assert off_by(model, before) == 0
