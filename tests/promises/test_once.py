"""Promise 2: a sample contributes to a leaf once, and nothing after the return is replayed."""

from __future__ import annotations

import functools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from elastic_mbs import MicroBatchFloorError, count_tokens
from elastic_mbs.testing import InjectOOM
from tests.helpers.steps import FailOn, cross_entropy, elastic, mlp, pairs, through

pytestmark = pytest.mark.injectable

DOORS = [1, 3]


class _PerSample(nn.Module):
    """A model with one entry per sample in each parameter: gradients count the contributions."""

    def __init__(self, n: int) -> None:
        super().__init__()
        self.early, self.late = (
            nn.Parameter(torch.zeros(n, dtype=torch.float64)),
            nn.Parameter(torch.ones(n, dtype=torch.float64)),
        )

    def forward(self, ids: Tensor) -> Tensor:
        return (self.early[ids] + 0.0) * 2 + self.late[ids] * 2

    def contributions(self) -> list[list[float]]:
        return [
            (p.grad * len(p) / 2).tolist() for p in (self.early, self.late) if p.grad is not None
        ]


@given(
    n=st.integers(1, 11),
    size=st.integers(1, 12),
    at=st.sets(st.integers(1, 70), max_size=3),
    door=st.sampled_from(DOORS),
    warm=st.booleans(),
    replay=st.sampled_from(["auto", "isolate"]),
)
@settings(max_examples=60)
def test_every_sample_contributes_once_to_every_leaf(
    n: int, size: int, at: set[int], door: int, warm: bool, replay: str
) -> None:
    model, ids = _PerSample(n), torch.arange(n)
    mbs = elastic(model, micro_batch_size=size, replay=replay)
    if warm:
        mbs.backward(lambda b: model(b).mean(), ids)
        model.zero_grad()
    with InjectOOM(at=at) as inject:
        try:
            through(door, mbs, lambda b: model(b).mean(), ids)
        except MicroBatchFloorError:
            assert len(inject.hits) > 1, "one failure can always be recovered from"
            assert model.contributions() == []
            return
    for counts in model.contributions():
        assert counts == pytest.approx([1.0] * n, rel=1e-12)
    assert len(model.contributions()) == 2


@pytest.mark.parametrize("fault", range(0, 60, 3))
def test_callbacks_run_once_per_sample_in_order_for_committed_pieces(
    fault: int,
) -> None:
    model, ids = _PerSample(8), torch.arange(8)
    log: list[int] = []
    attempts: list[list[int]] = []
    mbs = elastic(model, micro_batch_size=4)
    with InjectOOM(at=[fault]) as inject:
        for micro in mbs.micro_batches(ids):
            assert log == [], "callbacks wait until the whole batch is accumulated"
            with micro:
                seen = micro.data.tolist()
                attempts.append(seen)
                micro.on_commit(functools.partial(log.extend, seen))
                micro.backward(model(micro.data).mean())
                micro.on_commit(lambda: log.append(-1))
    assert mbs.last_result is not None
    assert [entry for entry in log if entry >= 0] == list(range(8))
    assert log.count(-1) == len(mbs.last_result.partition)
    if inject.hits and mbs.last_result.ooms:
        assert sum(map(len, attempts)) >= 8


def test_callbacks_do_not_run_when_the_call_ends_by_an_error() -> None:
    model, log = _PerSample(8), []
    fail = FailOn(2, error=lambda: ValueError("no"))
    mbs = elastic(model, micro_batch_size=4)
    with pytest.raises(ValueError, match="no"):
        for micro in mbs.micro_batches(torch.arange(8)):
            with micro:
                micro.on_commit(lambda: log.append(1))
                fail()
                micro.backward(model(micro.data).mean())
    assert log == []


@pytest.mark.parametrize("place", ["cpu", "device"])
@pytest.mark.parametrize("door", DOORS)
def test_outputs_are_those_of_committed_pieces_in_the_batchs_order(door: int, place: str) -> None:
    model = _PerSample(8)
    for fault in range(0, 24, 2):
        attempt = [0]

        def loss_fn(b: Tensor, attempt: list[int] = attempt) -> dict[str, object]:
            attempt[0] += 1
            out = model(b)
            return {
                "loss": out.mean(),
                "ids": b.clone(),
                "attempt": torch.full((len(b),), attempt[0]),
                "names": [f"s{i}" for i in b.tolist()],
            }

        mbs = elastic(model, micro_batch_size=4, outputs=place)
        with InjectOOM(at=[fault]):
            result = through(door, mbs, loss_fn, torch.arange(8))
        assert result.outputs["ids"].tolist() == list(range(8))
        assert result.outputs["names"] == [f"s{i}" for i in range(8)]
        kept = result.outputs["attempt"]
        assert [len(set(kept[start:stop].tolist())) for start, stop in result.partition] == [
            1
        ] * len(result.partition)
        assert len(set(kept.tolist())) == len(result.partition)
        assert not result.outputs["loss"][0].requires_grad


def test_outputs_are_those_of_every_sample_and_are_dropped_on_request() -> None:
    model, (x, y) = mlp(), pairs(6)
    y[2:4] = -100

    def loss_fn(b: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return nn.functional.cross_entropy(model(b[0]), b[1], ignore_index=-100), b[0]

    result = elastic(model, micro_batch_size=2, count=count_tokens(1)).backward(loss_fn, (x, y))
    assert torch.equal(result.outputs, x)
    assert (
        elastic(model, micro_batch_size=2, count=count_tokens(1), outputs=None)
        .backward(loss_fn, (x, y))
        .outputs
        is None
    )


@pytest.mark.no_oom_injection
@pytest.mark.parametrize("door", DOORS)
def test_samples_replayed_are_counted(door: int) -> None:
    model, fail, ran = _PerSample(8), FailOn(2), []

    def loss_fn(b: Tensor) -> Tensor:
        ran.append(len(b))
        fail()
        loss: Tensor = model(b).mean()
        return loss

    mbs = elastic(model, micro_batch_size=4)
    result = through(door, mbs, loss_fn, torch.arange(8))
    assert ran == [4, 4, 2, 2]
    assert result.partition == ((0, 4), (4, 6), (6, 8))
    assert (result.ooms, result.replayed_samples, result.micro_batch_size) == (1, 4, 2)
    assert (mbs.stats.ooms, mbs.stats.replayed_samples, mbs.stats.samples, mbs.stats.pieces) == (
        1,
        4,
        8,
        3,
    )


@pytest.mark.no_oom_injection
@pytest.mark.parametrize("door", DOORS)
def test_nothing_after_the_return_is_replayed(door: int) -> None:
    # The step of the optimizer is outside the call. Its failure is for the caller.
    model, batch, ran = mlp(), pairs(8), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=False)

    def loss_fn(b: tuple[Tensor, Tensor]) -> Tensor:
        ran.append(len(b[0]))
        loss: Tensor = cross_entropy(model)(b)
        return loss

    mbs = elastic(model, micro_batch_size=4)
    with mbs:
        through(door, mbs, loss_fn, batch)
        gradients = [p.grad for p in model.parameters()]
        with InjectOOM(at=[2]), pytest.raises(torch.OutOfMemoryError, match="injected"):
            optimizer.step()
        assert ran == [4, 4]
        assert all(
            p.grad is gradient for p, gradient in zip(model.parameters(), gradients, strict=True)
        )
        assert mbs.stats.ooms == 0
        optimizer.step()
