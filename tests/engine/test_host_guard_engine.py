"""The host guard limits forward and backward only; failures at its limit are recovered."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from elastic_mbs import Event, MemoryBudget, MicroBatchFloorError, OutOfMemory, Warned
from elastic_mbs.memory import host_guard
from tests.helpers.rlimit import MEBI, Limit, fake_limit, guard_of
from tests.helpers.steps import (
    FailOn,
    cross_entropy,
    elastic,
    failing,
    mlp,
    off_by,
    pairs,
    there,
    through,
    whole_gradient,
)

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="RLIMIT_DATA covers private memory on Linux only"
)

limit = pytest.fixture(fake_limit)


def test_without_the_switch_there_is_no_guard(limit: Limit) -> None:
    for mbs in (
        elastic(mlp()),
        elastic(mlp(), host_guard=False),
        elastic(mlp(), host_guard=True, enabled=False),
    ):
        assert mbs._resources.guard is None
    assert limit.seen == []


def test_the_limit_is_up_in_forward_and_backward_and_down_everywhere_else(
    model: nn.Sequential, limit: Limit, door: int
) -> None:
    softs: dict[str, list[int]] = {"forward": [], "backward": [], "event": []}
    fail = FailOn(1)

    def loss_fn(batch: Any) -> Any:
        softs["forward"].append(limit.soft)
        fail()
        loss = cross_entropy(model)(batch)
        loss.register_hook(lambda _: softs["backward"].append(limit.soft))
        return loss

    def on_event(event: Event) -> None:
        if isinstance(event, OutOfMemory):
            softs["event"].append(limit.soft)

    mbs = elastic(model, micro_batch_size=8, host_guard="10MiB", on_event=on_event)
    batch = pairs()
    wanted = whole_gradient(model, lambda twin: cross_entropy(twin)(batch))
    through(door, mbs, loss_fn, batch)
    assert off_by(model, wanted) <= 1e-12
    assert softs == {"forward": [990 * MEBI] * 3, "backward": [990 * MEBI] * 2, "event": [-1]}
    assert limit.soft == -1


@pytest.mark.parametrize("size", [8, 4])
def test_the_limit_is_up_in_a_loss_over_embeddings_in_one_pass_and_in_two(
    model: nn.Sequential, limit: Limit, size: int
) -> None:
    free, seen = limit.soft, list[int]()

    def loss(embeddings: Any) -> Any:
        seen.append(limit.soft)
        return embeddings.square().mean()

    mbs = elastic(model, micro_batch_size=size, host_guard="10MiB")
    mbs.backward_embeddings(lambda piece: model(piece[0]), loss, pairs(8))
    assert seen
    assert free not in seen
    assert limit.soft == free


def test_evaluation_is_guarded_too_also_inside_a_step(limit: Limit) -> None:
    model, other = mlp(), mlp(seed=5)
    inner = elastic(other, micro_batch_size=8, host_guard="60MiB")
    seen: list[int] = []

    def loss_fn(batch: Any) -> Any:
        inner.evaluate(forward, batch)
        seen.append(limit.soft)
        return cross_entropy(model)(batch)

    def forward(part: Any) -> Any:
        seen.append(limit.soft)
        return other(part[0])

    elastic(model, micro_batch_size=8, host_guard="10MiB").backward(loss_fn, pairs())
    assert seen == [940 * MEBI, 990 * MEBI]
    assert limit.soft == -1


@pytest.mark.parametrize("error", [ValueError("mine"), KeyboardInterrupt(), MemoryError()])
@pytest.mark.parametrize("early", [False, True])
def test_the_limit_comes_back_whatever_ends_the_call(
    model: nn.Sequential,
    limit: Limit,
    monkeypatch: pytest.MonkeyPatch,
    error: BaseException,
    early: bool,
) -> None:
    fail, mbs = FailOn(*range(1, 50), error=lambda: error), elastic(model, host_guard=True)
    guard = there(mbs._resources.guard)
    if early:  # inside the engine, as soon as the limit is up
        real = guard.renew
        monkeypatch.setattr(guard, "renew", lambda: (real(), fail()))  # type: ignore[func-returns-value]
    with pytest.raises((type(error), MicroBatchFloorError)):
        mbs.backward(failing(model, fail), pairs())
    assert limit.soft == -1


def test_closing_the_runtime_restores_the_limit(model: nn.Sequential, limit: Limit) -> None:
    with elastic(model, host_guard=True) as mbs:
        # This block is never left, and hooks for its graph would stay.
        for micro in mbs.micro_batches(pairs(), own_graph=False):
            micro.__enter__()
            assert limit.soft != -1
            break
        mbs.close()
        assert limit.soft == -1


def test_a_budget_with_no_room_for_the_thread_pool_does_not_end_the_step(
    model: nn.Sequential, limit: Limit
) -> None:
    with MemoryBudget(2**40, track=model) as budget:
        guard = guard_of(Path("/"))
        budget.limit = 0
        guard.renew()
        guard.lift()
        budget.limit = 2**40


def onednn() -> RuntimeError:
    return RuntimeError("could not create a primitive")


@pytest.mark.parametrize("filled", [False, True])
def test_each_error_of_onednn_near_the_limit_is_out_of_memory(
    limit: Limit, monkeypatch: pytest.MonkeyPatch, filled: bool
) -> None:
    model, batch, events = mlp(), pairs(), list[Event]()
    wanted = whole_gradient(model, lambda twin: cross_entropy(twin)(batch))
    monkeypatch.setattr(host_guard, "own_memory", lambda: (100 * MEBI, 950 * MEBI))
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter) if filled else None
    mbs = elastic(model, micro_batch_size=8, host_guard=True, on_event=events.append)
    mbs.backward(failing(model, FailOn(1, 2, 3, error=onednn)), batch)
    assert off_by(model, wanted) <= 1e-12
    assert [event.kind for event in events if isinstance(event, OutOfMemory)] == ["host"] * 3
    assert not [event for event in events if isinstance(event, Warned)]


def test_an_error_of_onednn_far_from_the_limit_is_tried_once_more(
    model: nn.Sequential, limit: Limit
) -> None:
    fail = FailOn(*range(1, 100), error=onednn)
    with pytest.raises(RuntimeError, match="could not create a primitive"):
        elastic(model, micro_batch_size=8, host_guard=True).backward(failing(model, fail), pairs())
    assert fail.count == 2
