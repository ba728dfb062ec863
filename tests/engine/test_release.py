"""Between two phases memory goes back, and the first call after it fits what is left."""

import gc
import weakref
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from elastic_mbs import ElasticMBS, MemoryBudget, MemoryOptions, Policy, StepResult
from elastic_mbs.errors import IncompleteBatchError, MisuseError
from tests.helpers.room import Pair, Room, Wide, batch_on, by_hand, loss_of, wide
from tests.helpers.steps import cross_entropy, elastic, mlp, off_by, pairs, there

CPU = torch.device("cpu")


def storages(tensors: Any) -> list[weakref.ref[torch.UntypedStorage]]:
    return [weakref.ref(each.untyped_storage()) for each in tensors]


def alive(found: list[weakref.ref[torch.UntypedStorage]]) -> int:
    gc.collect()
    return sum(each() is not None for each in found)


def normalised() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 64), nn.BatchNorm1d(64), nn.Linear(64, 4)).double()


def test_copies_of_buffers_and_kept_outputs_go_and_are_counted() -> None:
    model, batch = normalised(), pairs(16)
    mbs = elastic(model, micro_batch_size=4, outputs="device")

    def loss_fn(piece: Any) -> Any:
        return cross_entropy(model)(piece), model[0](piece[0])  # type: ignore[index]

    mbs.backward(loss_fn, batch)
    mbs.backward(loss_fn, batch)
    result = mbs.last_result
    copies = [copy for copy in mbs._resources.buffers.held() if copy is not None]
    held = storages(copies)
    copied = sum(copy.untyped_storage().nbytes() for copy in copies)
    assert copied >= 2 * 64 * 8  # mean and variance
    outputs = there(result).outputs
    del copies
    assert mbs.release() == copied  # the caller still has the outputs
    assert alive(held) == 0
    assert there(mbs.last_result).outputs is None
    assert there(mbs.last_result).loss == there(result).loss
    assert outputs.shape == (16, 64)
    mbs.backward(loss_fn, batch)
    result = outputs = None
    assert mbs.release() >= copied + 16 * 64 * 8  # now nobody has


@pytest.mark.parametrize("enabled", [True, False])
def test_gradients_go_where_they_are_asked_for(enabled: bool) -> None:
    model, batch = mlp(), pairs()
    mbs = elastic(model, enabled=enabled)
    mbs.backward(cross_entropy(model), batch)
    grads = storages(leaf.grad for leaf in model.parameters())
    size = sum(leaf.nbytes for leaf in model.parameters())
    assert mbs.release() == 0
    assert alive(grads) == len(grads)
    assert mbs.release(gradients=True) == size
    assert alive(grads) == 0
    assert all(leaf.grad is None for leaf in model.parameters())


@pytest.mark.parametrize("enabled", [True, False])
def test_the_gradient_after_a_release_is_exact(enabled: bool) -> None:
    model, batch = mlp(), pairs()
    with elastic(model, micro_batch_size=3, enabled=enabled) as mbs:
        mbs.backward(cross_entropy(model), batch)
        wanted = [leaf.grad for leaf in model.parameters()]
        mbs.release(gradients=True)
        mbs.backward(cross_entropy(model), batch)
        assert off_by(model, wanted) <= 1e-12
        mbs.release()  # keeps what was accumulated
        mbs.backward(cross_entropy(model), batch)
    assert off_by(model, [2 * there(grad) for grad in wanted]) <= 1e-12


def test_release_inside_a_step_is_refused_and_a_loop_left_early_is_named() -> None:
    model, batch = mlp(), pairs()
    mbs = elastic(model, micro_batch_size=4)

    def loss_fn(piece: Any) -> Tensor:
        mbs.release()
        return cross_entropy(model)(piece)

    with pytest.raises(MisuseError, match="release between two calls"):
        mbs.backward(loss_fn, batch)
    for micro in mbs.micro_batches(batch):
        with micro:
            micro.backward(cross_entropy(model)(micro.data))
        break
    with pytest.raises(IncompleteBatchError, match="left early"):
        mbs.release()
    assert all(leaf.grad is None for leaf in model.parameters())
    mbs.release()


def step(mbs: ElasticMBS, model: nn.Module, batch: Pair) -> StepResult:
    return mbs.backward(partial(loss_of, model), batch)


def learned(model: nn.Module, whole: int) -> ElasticMBS:
    """Return a runtime that has learned three sizes with all the memory, and stays at the batch."""
    mbs = ElasticMBS(
        model,
        micro_batch_size=8,
        policy=Policy(patience=1, jitter=0, cooldown=0, min_gain=0),
        memory=MemoryOptions(monitor_interval=0),
    )
    for _ in range(12):
        step(mbs, model, batch_on(CPU, whole))
        model.zero_grad()
    assert there(mbs.last_result).micro_batch_size == whole
    return mbs


@pytest.mark.no_oom_injection
@pytest.mark.parametrize("inside", [False, True])
def test_the_first_call_after_it_fits_what_the_other_phase_has_left(inside: bool) -> None:
    model, whole = wide(CPU), 64
    batch = batch_on(CPU, whole)
    exact = by_hand(model, batch, ((0, whole),))
    with Room(CPU, model) as room:
        need = room.need(lambda: loss_of(model, batch).backward())
        model.zero_grad()
        room.allow(3 * need)
        with learned(model, whole) as mbs:
            mbs.release()
            kept = None
            if inside:  # the other phase is in this process, and keeps its own tensors
                kept = torch.empty(int(2.5 * need), dtype=torch.uint8)
            else:
                room.allow(need // 2)
            result = step(mbs, model, batch)
            assert result.ooms == 0
            assert result.micro_batch_size < whole
            assert off_by(model, exact) <= 1e-12
            model.zero_grad()
            del kept
            mbs.release()
            room.allow(3 * need)
            sizes = [step(mbs, model, batch).micro_batch_size for _ in range(3)]
    assert sizes[-1] == whole  # back with the memory, after a clean call
    assert mbs.stats.ooms == 0


@pytest.mark.no_oom_injection
def test_without_a_release_the_same_call_fails_first() -> None:
    model, whole = wide(CPU), 64
    batch = batch_on(CPU, whole)
    with Room(CPU, model) as room:
        need = room.need(lambda: loss_of(model, batch).backward())
        model.zero_grad()
        room.allow(3 * need)
        with learned(model, whole) as mbs:
            room.allow(need // 2)
            assert step(mbs, model, batch).ooms == 1


def test_a_size_that_may_not_grow_is_not_lowered_either() -> None:
    model = Wide(64).double()
    with MemoryBudget("1GiB", [model]) as budget, elastic(model, micro_batch_size=8) as mbs:
        step(mbs, model, batch_on(CPU, 16))
        mbs.release()
        budget.limit = 2**20
        result = step(mbs, model, batch_on(CPU, 16))
    assert (result.micro_batch_size, result.ooms) == (8, 0)
