"""Promise 3: after a recovered failure, state is as if the failed attempt had not been made."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from elastic_mbs import MicroBatchFloorError
from elastic_mbs.testing import InjectOOM
from tests.helpers.steps import FailOn, Pair, cross_entropy, elastic, mlp, pairs, through

DOORS = [1, 3]


# ---------------------------------------------------------------------- buffers, streams, scaler


class _Counting(nn.Module):
    """A model whose buffers change in place, by a new tensor, and as running statistics."""

    calls: Tensor
    last: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(6)
        self.head = nn.Linear(6, 4)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("last", torch.zeros(6))
        self.register_buffer("table", torch.arange(4.0))

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        self.calls += 1
        self.last = x.detach().mean(0)
        out: Tensor = self.head(x)
        return out


@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize("door", DOORS)
def test_buffers_are_as_if_the_failed_attempt_had_not_been_made(door: int, warm: bool) -> None:
    batch = pairs(8)
    for n in range(1, 60, 3):
        torch.manual_seed(0)
        model = _Counting().double()
        mbs = elastic(model, micro_batch_size=4)
        if warm:
            mbs.backward(cross_entropy(model), batch)
            model.zero_grad()
        start = {name: buffer.clone() for name, buffer in model.named_buffers()}
        with InjectOOM(at=[n]) as inject:
            result = through(door, mbs, cross_entropy(model), batch)
        mbs.close()
        # the labels are read before any attempt; a copy of a buffer can go to the host
        assert result.ooms == len(inject.hits) or inject.hits[0] in ("aten::eq", "aten::empty_like")
        got = {name: buffer.clone() for name, buffer in model.named_buffers()}
        with torch.no_grad():
            model.last = start["last"].clone()
            for name, buffer in model.named_buffers():
                buffer.copy_(start[name])
        for first, stop in result.partition:
            model(batch[0][first:stop])
        assert int(got["calls"]) - int(start["calls"]) == len(result.partition)
        for name, buffer in model.named_buffers():
            assert torch.allclose(buffer.double(), got[name].double(), rtol=1e-12), (n, name)


@dataclass
class _Sources:
    """The random streams that a step may draw from."""

    torch_own: torch.Generator
    python_own: random.Random
    numpy_new: np.random.Generator
    numpy_old: np.random.RandomState

    @classmethod
    def seeded(cls) -> _Sources:
        torch.manual_seed(3)
        random.seed(3)
        np.random.seed(3)  # NumPy's legacy stream is rolled back
        return cls(
            torch.Generator().manual_seed(3),
            random.Random(3),
            np.random.default_rng(3),
            np.random.RandomState(3),
        )

    def draw(self) -> tuple[float, ...]:
        return (
            torch.rand(()).item(),
            random.random(),
            float(np.random.rand()),  # the legacy stream
            torch.rand((), generator=self.torch_own).item(),
            self.python_own.random(),
            self.numpy_new.random(),
            float(self.numpy_old.rand()),
        )


@pytest.mark.no_oom_injection
@pytest.mark.parametrize("fails", [(1,), (2,), (1, 2), (1, 3), (2, 4)])
@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize("door", DOORS)
def test_random_streams_are_as_if_the_failed_attempt_had_not_been_made(
    door: int, warm: bool, fails: tuple[int, ...]
) -> None:
    model, batch = mlp(), pairs(8)
    sources = _Sources.seeded()
    fail, drawn = FailOn(*(call + 2 * warm for call in fails)), []

    def loss_fn(b: Pair) -> tuple[Tensor, Any]:
        numbers = sources.draw()
        loss = cross_entropy(model)(b) * numbers[0]
        fail()
        return loss, torch.tensor([numbers] * len(b[0]), dtype=torch.float64)

    mbs = elastic(
        model,
        micro_batch_size=4,
        generators=[sources.torch_own, sources.python_own, sources.numpy_new, sources.numpy_old],
    )
    if warm:
        mbs.backward(loss_fn, batch)
    if door == 1:
        result = mbs.backward(loss_fn, batch)
    else:
        for micro in mbs.micro_batches(batch):
            with micro:
                micro.backward(loss_fn(micro.data))
        assert mbs.last_result is not None
        result = mbs.last_result
    after = sources.draw()
    assert result.ooms == len(fails)
    sources = _Sources.seeded()
    drawn = [sources.draw() for _ in range(len(result.partition) + 2 * warm)][2 * warm :]
    kept = [tuple(result.outputs[start].tolist()) for start, _ in result.partition]
    assert kept == drawn
    assert sources.draw() == after


@pytest.mark.parametrize("door", DOORS)
def test_the_scaler_is_as_if_the_failed_attempt_had_not_been_made(door: int) -> None:
    model, batch = mlp(), pairs(8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train(faults: list[int]) -> tuple[dict[str, Any], dict[str, Any]]:
        scaler = torch.amp.GradScaler("cpu", init_scale=512.0, growth_interval=2)
        mbs = elastic(model, micro_batch_size=4, scaler=scaler)
        for _ in range(3):
            with InjectOOM(at=faults):
                through(door, mbs, cross_entropy(model), batch)
            before_step = dict(scaler.state_dict())
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        mbs.close()
        return before_step, scaler.state_dict()

    clean = train([])
    for n in (3, 12, 16, 22, 30):
        assert train([n]) == clean


@pytest.mark.parametrize("door", DOORS)
def test_a_call_that_gives_up_leaves_the_scaler_as_it_was(door: int) -> None:
    model = mlp()
    scaler = torch.amp.GradScaler("cpu", init_scale=512.0)
    before = scaler.state_dict()
    with InjectOOM(always_from=20), pytest.raises(MicroBatchFloorError):
        through(
            door, elastic(model, micro_batch_size=4, scaler=scaler), cross_entropy(model), pairs(8)
        )
    assert scaler.state_dict() == before
