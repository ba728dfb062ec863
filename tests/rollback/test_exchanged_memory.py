"""Promise 3 for buffers whose memory a step exchanges: what it came from is not written to."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tests.helpers.steps import elastic
from tests.helpers.strikes import every_operation

pytestmark = pytest.mark.no_oom_injection


class Previous(nn.Module):
    """A layer that keeps the piece before by taking over its memory."""

    prev: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 1).double()
        self.register_buffer("prev", torch.zeros(4, 4, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x) + self.prev.mean() * 0.1
        self.prev.data = x.detach()
        return out


@pytest.mark.parametrize("calls", [0, 1, 2])
def test_a_buffer_with_the_memory_of_the_batch_leaves_the_batch_alone(calls: int) -> None:
    for inject in every_operation(stride=1, least=8):
        torch.manual_seed(0)
        model, twin, batch = Previous(), Previous(), torch.randn(8, 4, dtype=torch.float64)
        twin.load_state_dict(model.state_dict())
        before = batch.clone()
        mbs = elastic(model, micro_batch_size=4, min_micro_batch_size=2)

        def loss_fn(b: Tensor, model: nn.Module = model) -> Tensor:
            loss: Tensor = model(b).square().mean()
            return loss

        parts = [mbs.backward(loss_fn, batch).partition for _ in range(calls)]
        with inject:
            parts.append(mbs.backward(loss_fn, batch).partition)
        assert torch.equal(batch, before), inject.hits
        for start, stop in (each for part in parts for each in part):
            (twin(batch[start:stop]).square().mean() * ((stop - start) / 8)).backward()
        assert torch.allclose(model.prev, twin.prev)
        for ours, wanted in zip(model.parameters(), twin.parameters(), strict=True):
            assert ours.grad is not None
            assert wanted.grad is not None
            assert torch.allclose(ours.grad, wanted.grad, rtol=1e-12, atol=1e-14), inject.hits
