"""Three doors, one engine: what they share."""

from __future__ import annotations

import copy
import json
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

import elastic_mbs
from elastic_mbs import ElasticMBS, Event, MemoryBudget, MemoryOptions, UsageError
from elastic_mbs.testing import InjectOOM
from tests.helpers.doors import DOORS
from tests.helpers.doors import through as _through
from tests.helpers.steps import FailOn, Pair, cross_entropy, elastic, grads, loop, mlp, off_by, pairs, whole_gradient

pytestmark = pytest.mark.injectable

# ---------------------------------------------------------------------- the same through all of them


@pytest.mark.parametrize("fault", [0, 3, 9, 13, 17, 21, 27, 33])
def test_all_doors_give_the_same_gradients_losses_and_partitions(fault: int) -> None:
    batch, seen = pairs(), []
    for door in DOORS:
        model = mlp()
        with InjectOOM(at=[fault]):
            result = _through(door, model, batch, micro_batch_size=4)
        seen.append((grads(model), float(result), result.partition, result.ooms, result.replayed_samples, result.micro_batch_size))
        assert off_by(model, whole_gradient(model, lambda net: cross_entropy(net)(batch))) <= 1e-12
    assert seen[0][1:] == seen[1][1:] == seen[2][1:]
    for others in seen[1:]:
        assert all(torch.equal(a, b) for a, b in zip(seen[0][0], others[0], strict=True) if a is not None and b is not None)


@pytest.mark.parametrize("returns", ["loss", "tuple", "triple", "object", "dict"])
@pytest.mark.parametrize("door", [1, 3])
def test_losses_and_outputs_are_told_apart(door: int, returns: str) -> None:
    model, batch = mlp(), pairs()

    @dataclass
    class Output:
        loss: Tensor
        logits: Tensor

    def loss_fn(b: Pair) -> Any:
        logits = model(b[0])
        loss = functional.cross_entropy(logits, b[1])
        kinds = {
            "loss": loss,
            "tuple": (loss, logits),
            "triple": (loss, logits, b[1]),
            "object": Output(loss, logits),
            "dict": {"loss": loss, "logits": logits},
        }
        return kinds[returns]

    mbs = elastic(model, micro_batch_size=2)
    outputs = (mbs.backward(loss_fn, batch) if door == 1 else loop(mbs, loss_fn, batch)).outputs
    with torch.no_grad():
        wanted = model(batch[0])
    got = {
        "loss": lambda: wanted,
        "tuple": lambda: outputs,
        "triple": lambda: outputs[0],
        "object": lambda: outputs.logits,
        "dict": lambda: outputs["logits"],
    }[returns]()
    assert torch.allclose(got, wanted, rtol=1e-12)
    assert (outputs is None) == (returns == "loss")
    if returns == "triple":
        assert torch.equal(outputs[1], batch[1])


# ---------------------------------------------------------------------- lifetime, state, statistics


@pytest.mark.parametrize("door", [1, 3])
def test_works_without_a_with_block_and_after_it(door: int) -> None:
    model, batch = mlp(), pairs()
    mbs = elastic(model, micro_batch_size=4)
    wanted = whole_gradient(model, lambda net: cross_entropy(net)(batch))
    for use in ("without", "inside", "after", "inside again"):
        model.zero_grad()
        with InjectOOM(at=[17]):
            if use.startswith("inside"):
                with mbs:
                    loop(mbs, cross_entropy(model), batch) if door == 3 else mbs.backward(cross_entropy(model), batch)
            else:
                loop(mbs, cross_entropy(model), batch) if door == 3 else mbs.backward(cross_entropy(model), batch)
        assert off_by(model, wanted) <= 1e-12
    with mbs:
        pass
    assert not [hook for p in model.parameters() for hook in (p._post_accumulate_grad_hooks or {}).values()]


@pytest.mark.no_oom_injection
def test_what_was_learned_survives_a_round_trip_through_json() -> None:
    model, batch = mlp(), pairs()
    mbs = elastic(model, micro_batch_size=8)
    fail = FailOn(1)

    def loss_fn(b: Pair) -> Tensor:
        fail()
        loss: Tensor = cross_entropy(model)(b)
        return loss

    assert mbs.backward(loss_fn, batch).micro_batch_size == 4
    state = json.loads(json.dumps(mbs.state_dict()))
    fresh = elastic(model, micro_batch_size=8)
    fresh.load_state_dict(state)
    assert _without_clock(fresh.state_dict()) == _without_clock(mbs.state_dict()) == _without_clock(state)
    result = fresh.backward(loss_fn, batch)
    assert (result.micro_batch_size, result.ooms) == (4, 0)


def _without_clock(state: dict[str, Any]) -> list[dict[str, Any]]:
    return [{key: value for key, value in track.items() if key != "cooldown_left"} for track in state["controller"]["tracks"]]


@pytest.mark.no_oom_injection
@pytest.mark.parametrize("take", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_runtime_is_not_copied_and_says_so(take: Callable[[Any], object]) -> None:
    """A shallow copy would have shared everything, and a deep one failed at "cannot pickle '_thread.lock' object"."""
    model = mlp()
    with ElasticMBS(model) as mbs, pytest.raises(UsageError, match=r"neither copied nor pickled.*state_dict\(\)"):
        take(mbs)


@pytest.mark.no_oom_injection
def test_statistics_and_the_last_result_tell_what_happened() -> None:
    model, batch = mlp(), pairs()
    mbs = elastic(model, micro_batch_size=4)
    assert mbs.last_result is None
    fail = FailOn(3)

    def loss_fn(b: Pair) -> Tensor:
        fail()
        loss: Tensor = cross_entropy(model)(b)
        return loss

    first = mbs.backward(loss_fn, batch)
    assert mbs.last_result is first
    second = loop(mbs, loss_fn, batch)
    assert mbs.last_result is second
    stats = mbs.stats
    assert (stats.calls, stats.samples, stats.pieces, stats.ooms, stats.replayed_samples) == (2, 16, 2 + 4, 1, 4)
    assert stats.sizes == {4: 1, 2: 1}
    stats.sizes.clear()
    assert mbs.stats.sizes == {4: 1, 2: 1}, "a copy"


def test_events_of_two_runtimes_are_told_apart_by_name() -> None:
    events = list[Event]()
    for name in ("generator", "critic"):
        model = mlp()
        with InjectOOM(at=[12]):
            elastic(model, micro_batch_size=4, name=name, on_event=events.append).backward(cross_entropy(model), pairs())
    assert [event.name for event in events if type(event).__name__ == "OutOfMemory"] == ["generator", "critic"]


@pytest.mark.no_oom_injection
def test_the_budget_around_a_runtime_is_found_by_itself() -> None:
    model, batch = mlp(width=64), pairs(64)
    wanted = whole_gradient(model, lambda net: cross_entropy(net)(batch))
    with MemoryBudget("1GiB", track=(model, batch)) as budget:
        budget.limit = budget.live + 60_000
        with ElasticMBS(model, memory=MemoryOptions(wait_for_memory=0)) as mbs:
            result = mbs.backward(cross_entropy(model), batch)
            assert isinstance(mbs._context.monitor.read_now(), elastic_mbs.Headroom)
    assert budget.ooms == result.ooms
    assert off_by(model, wanted) <= 1e-12
    assert result.micro_batch_size < 64
