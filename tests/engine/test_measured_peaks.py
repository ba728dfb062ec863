"""A peak is compared with one measured alike: state, gradients or copies that only one of them had make no later size look too large."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from elastic_mbs import ElasticMBS, MemoryBudget, MemoryOptions, Policy


@pytest.mark.no_oom_injection
def test_a_state_that_an_optimizer_makes_after_the_first_call_does_not_make_the_next_size_look_too_large_for_good() -> None:
    """The slope ran from a size measured without the state to one measured with it: too steep by the whole state.

    The small size was never measured again, so the batch ran in two pieces beside memory for all of it, for ever. Found by the stress tool's
    `sensor_dies`.
    """
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 4096), nn.Tanh(), nn.Linear(4096, 8), nn.Tanh(), nn.Linear(8, 4096), nn.Tanh(), nn.Linear(4096, 4)).double()
    optimizer = torch.optim.AdamW(model.parameters())
    batch = torch.randn(64, 8, dtype=torch.float64), torch.randint(0, 4, (64,))

    def loss_fn(piece: tuple[Tensor, Tensor]) -> Tensor:
        return nn.functional.cross_entropy(model(piece[0]), piece[1])

    policy = Policy(patience=1, jitter=0.0, cooldown=0.0, min_gain=0.0)
    with MemoryBudget(2**40, [model]) as budget:
        for _ in range(2):
            budget.reset_peak()
            loss_fn(batch).backward()
            optimizer.step()
        need = budget.peak
        optimizer.zero_grad()
        optimizer = torch.optim.AdamW(model.parameters())  # its state comes after the first call
        budget.limit = int(1.08 * need)
        with ElasticMBS(model, policy=policy, micro_batch_size=16, memory=MemoryOptions(monitor_interval=0)) as mbs:
            for _ in range(12):
                result = mbs.backward(loss_fn, batch)
                optimizer.step()
                optimizer.zero_grad()
    assert len(result.partition) == 1


@pytest.mark.no_oom_injection
def test_the_first_pieces_peak_does_not_make_the_gradients_look_like_activations() -> None:
    """It has only a part of the gradients, which it makes itself. Beside it the second piece seemed to need all of them for one sample more.

    So a model whose parameters outweigh its activations stayed at micro-batches of 2 for good, whatever room there was.
    """
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64))
    x = torch.randn(16, 64)
    with MemoryBudget("1GiB", track=[model]) as budget:
        for _ in range(2):  # the second time there are gradients to add to
            budget.reset_peak()
            model(x).pow(2).mean().backward()
        budget.limit = int(1.2 * budget.peak)
        model.zero_grad()
        with ElasticMBS(model, policy=Policy(patience=2, min_gain=0.0, cooldown=0.0), memory=MemoryOptions(monitor_interval=0)) as mbs:
            for _ in range(12):
                result = mbs.backward(lambda piece: model(piece).pow(2).mean(), x)
                model.zero_grad()
    assert (result.micro_batch_size, result.ooms) == (16, 0)
