"""Three doors, one engine: what they share, switched on and off."""

import copy
import json
import pickle
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from elastic_mbs import ElasticMBS, Event, OutOfMemory, UsageError
from elastic_mbs.testing import InjectOOM
from tests.helpers.steps import FailOn, Pair, cross_entropy, elastic, failing, grads, mlp, off_by, once, pairs, through, whole_gradient

pytestmark = pytest.mark.injectable

DOORS = [1, 2, 3]


@pytest.mark.parametrize("fault", [0, 3, 9, 13, 17, 21, 27, 33])
def test_all_doors_give_the_same_gradients_losses_and_partitions(fault: int) -> None:
    batch, seen = pairs(), []
    for door in DOORS:
        model = mlp()
        with InjectOOM(at=[fault]):
            result = once(door, model, cross_entropy(model), batch, micro_batch_size=4)
        seen.append((grads(model), float(result), result.partition, result.ooms, result.replayed_samples, result.micro_batch_size))
        assert off_by(model, whole_gradient(model, lambda net: cross_entropy(net)(batch))) <= 1e-12
    assert seen[0][1:] == seen[1][1:] == seen[2][1:]
    for others in seen[1:]:
        assert all(torch.equal(a, b) for a, b in zip(seen[0][0], others[0], strict=True) if a is not None and b is not None)


@pytest.mark.parametrize("door", [1, 3])
def test_works_without_a_with_block_and_after_it(door: int) -> None:
    model, batch = mlp(), pairs()
    mbs = elastic(model, micro_batch_size=4)
    wanted = whole_gradient(model, lambda net: cross_entropy(net)(batch))

    def step() -> None:
        model.zero_grad()
        with InjectOOM(at=[17]):
            through(door, mbs, cross_entropy(model), batch)
        assert off_by(model, wanted) <= 1e-12

    for _ in range(2):
        step()
        with mbs:
            step()


@pytest.mark.no_oom_injection
def test_what_was_learned_survives_a_round_trip_through_json() -> None:
    model, batch = mlp(), pairs()
    mbs = elastic(model, micro_batch_size=8)
    with InjectOOM(at=[3]):
        assert mbs.backward(cross_entropy(model), batch).micro_batch_size == 4
    state = json.loads(json.dumps(mbs.state_dict()))
    fresh = elastic(model, micro_batch_size=8)
    fresh.load_state_dict(state)
    assert _without_clock(fresh.state_dict()) == _without_clock(mbs.state_dict()) == _without_clock(state)
    result = fresh.backward(cross_entropy(model), batch)
    assert (result.micro_batch_size, result.ooms) == (4, 0)


def _without_clock(state: dict[str, Any]) -> list[dict[str, Any]]:
    return [{key: value for key, value in track.items() if key != "cooldown_left"} for track in state["controller"]["tracks"]]


@pytest.mark.no_oom_injection
@pytest.mark.parametrize("take", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_runtime_is_not_copied_and_says_so(take: Callable[[Any], object]) -> None:
    """A shallow copy would have shared everything, and a deep one failed at "cannot pickle '_thread.lock' object"."""
    with elastic(mlp()) as mbs, pytest.raises(UsageError, match=r"neither copied nor pickled.*state_dict\(\)"):
        take(mbs)


@pytest.mark.no_oom_injection
def test_statistics_and_the_last_result_tell_what_happened() -> None:
    model, batch = mlp(), pairs()
    loss_fn, mbs = failing(model, FailOn(3)), elastic(model, micro_batch_size=4)
    assert mbs.last_result is None
    for door in (1, 3):
        assert through(door, mbs, loss_fn, batch) is mbs.last_result
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
    assert [event.name for event in events if isinstance(event, OutOfMemory)] == ["generator", "critic"]


@pytest.mark.parametrize("door", DOORS)
def test_disabled_runs_the_batch_whole_and_catches_nothing(door: int) -> None:
    model, batch = mlp(), pairs()
    result = once(door, model, cross_entropy(model), batch, micro_batch_size=2, enabled=False)
    assert result.partition == ((0, 8),)
    assert off_by(model, whole_gradient(model, lambda net: cross_entropy(net)(batch))) == 0
    assert float(result) == cross_entropy(model)(batch).item()
    oom = torch.OutOfMemoryError("CUDA out of memory.")
    with pytest.raises(torch.OutOfMemoryError) as caught:
        once(door, model, failing(model, FailOn(1, error=lambda: oom)), batch, enabled=False)
    assert caught.value is oom
    assert getattr(oom, "__notes__", []) == []


def test_disabled_starts_no_thread_and_watches_nothing() -> None:
    model, threads = mlp(), threading.active_count()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def loss_fn(b: Pair) -> Tensor:
        optimizer.step()
        cross_entropy(model)(b).backward()
        return cross_entropy(model)(b)

    with ElasticMBS(model, enabled=False) as mbs:
        assert threading.active_count() == threads
        mbs.backward(loss_fn, pairs())


def test_disabled_gives_outputs_totals_and_callbacks_and_uses_scaler_and_backward() -> None:
    model, batch, log = mlp(), pairs(), list[Any]()
    mbs = elastic(model, enabled=False, scaler=torch.amp.GradScaler("cpu", init_scale=4.0), reduction="sum")
    for micro in mbs.micro_batches(batch):
        with micro:
            micro.on_commit(lambda: log.append("committed"))
            assert (micro.total, micro.start, micro.stop, len(micro)) == (8, 0, 8, 8)
            assert micro.data is batch
            micro.backward((cross_entropy(model)(micro.data), batch[0]))
    assert log == ["committed"]
    assert mbs.last_result is not None
    assert torch.equal(mbs.last_result.outputs, batch[0])
    assert off_by(model, whole_gradient(model, lambda net: cross_entropy(net)(batch) * 4)) <= 1e-12
    elastic(model, enabled=False, backward=log.append).backward(cross_entropy(model), batch)
    assert len(log) == 2
    assert torch.equal(elastic(model, enabled=False).eval(model, batch[0]), model(batch[0]).detach())


def test_a_backward_of_ones_own_is_called_even_if_it_counts_as_false() -> None:
    class Backward(list[float]):  # an empty list
        def __call__(self, loss: Tensor) -> None:
            loss.sum().backward(torch.tensor(2.0))

    model, batch = mlp(), pairs()
    elastic(model, micro_batch_size=4, backward=Backward()).backward(cross_entropy(model), batch)
    assert off_by(model, whole_gradient(model, lambda net: 2 * cross_entropy(net)(batch))) <= 1e-12


def test_disabled_knows_the_total_and_takes_batches_that_could_not_be_cut() -> None:
    """A `loss_fn` that normalises by itself has to work with the switch off too; with nothing to cut there is nothing to refuse."""
    model, batch = mlp(), pairs()
    mbs = elastic(model, enabled=False, reduction="sum")
    mbs.backward(lambda b: 8 * cross_entropy(model)(b) / mbs.total, batch)
    elastic(model, enabled=False).backward(lambda b: cross_entropy(model)(b()), lambda: batch)
    assert off_by(model, whole_gradient(model, lambda net: 2 * cross_entropy(net)(batch))) <= 1e-12


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("door", [*DOORS, "eval"])
def test_the_batch_is_brought_to_the_model_either_way(door: Any, enabled: bool) -> None:
    """Switched off, a loader on the host no longer went with a model on a device."""
    model, batch, seen = nn.Linear(6, 4, device="meta"), torch.zeros(4, 6), list[str]()

    def loss_fn(x: Tensor) -> Tensor:
        seen.append(x.device.type)
        loss: Tensor = model(x).sum()
        return loss

    if door == "eval":
        elastic(model, micro_batch_size=4, enabled=enabled).eval(loss_fn, batch)
    else:
        once(door, model, loss_fn, batch, micro_batch_size=4, enabled=enabled)
    assert set(seen) == {"meta"}
