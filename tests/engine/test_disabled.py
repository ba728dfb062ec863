"""`enabled=False` runs the batch whole, catches and watches nothing, and leaves the rest of the interface as it is."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from elastic_mbs import ElasticMBS, MemoryOptions, elastic_step
from tests.helpers.doors import DOORS
from tests.helpers.doors import through as _through
from tests.helpers.steps import Pair, cross_entropy, elastic, loop, mlp, off_by, pairs, whole_gradient

pytestmark = pytest.mark.injectable


@pytest.mark.parametrize("door", DOORS)
def test_disabled_runs_the_batch_whole_and_catches_nothing(door: int) -> None:
    model, batch = mlp(), pairs()
    oom = torch.OutOfMemoryError("CUDA out of memory.")
    result = _through(door, model, batch, micro_batch_size=2, enabled=False)
    assert result.partition == ((0, 8),)
    assert off_by(model, whole_gradient(model, lambda net: cross_entropy(net)(batch))) == 0
    assert float(result) == cross_entropy(model)(batch).item()
    with pytest.raises(torch.OutOfMemoryError) as caught:
        _through(door, _Raising(oom), batch, enabled=False)
    assert caught.value is oom
    assert getattr(oom, "__notes__", []) == []


class _Raising(nn.Module):
    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3))
        self.error = error

    def forward(self, x: Tensor) -> Tensor:
        raise self.error


def test_disabled_leaves_no_hooks_no_thread_and_no_guard() -> None:
    import threading

    model, batch = mlp(), pairs()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    threads = threading.active_count()
    with ElasticMBS(model, enabled=False) as mbs:
        assert threading.active_count() == threads

        def loss_fn(b: Pair) -> Tensor:
            optimizer.step()
            cross_entropy(model)(b).backward()
            loss: Tensor = cross_entropy(model)(b)
            return loss

        mbs.backward(loss_fn, batch)
        assert not [hook for p in model.parameters() for hook in (p._post_accumulate_grad_hooks or {}).values()]


def test_disabled_still_gives_outputs_totals_callbacks_and_uses_scaler_and_backward() -> None:
    model, batch, log = mlp(), pairs(), []
    mbs = elastic(model, enabled=False, scaler=torch.amp.GradScaler("cpu", init_scale=4.0), reduction="sum")
    for micro in mbs.micro_batches(batch):
        with micro:
            micro.on_commit(lambda: log.append("committed"))
            assert micro.total == 8
            assert (micro.start, micro.stop, len(micro)) == (0, 8, 8)
            assert micro.data is batch
            micro.backward((cross_entropy(model)(micro.data), batch[0]))
    assert log == ["committed"]
    assert mbs.last_result is not None
    assert torch.equal(mbs.last_result.outputs, batch[0])
    wanted = whole_gradient(model, lambda net: cross_entropy(net)(batch) * 4)
    assert off_by(model, wanted) <= 1e-12
    model.zero_grad()
    calls: list[Tensor] = []
    elastic(model, enabled=False, backward=calls.append).backward(cross_entropy(model), batch)
    assert len(calls) == 1
    assert torch.equal(elastic(model, enabled=False).eval(model, batch[0]), model(batch[0]).detach())


def test_disabled_knows_the_total_inside_the_step_function() -> None:
    """A `loss_fn` that normalises by itself has to work with the switch off too."""
    model, batch = mlp(), pairs()
    mbs = elastic(model, enabled=False, reduction="sum")
    mbs.backward(lambda b: functional.cross_entropy(model(b[0]), b[1], reduction="sum") / mbs.total, batch)
    assert off_by(model, whole_gradient(model, lambda net: cross_entropy(net)(batch))) <= 1e-12


class _Unknown:
    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y = x, y


def test_disabled_takes_batches_that_could_not_be_cut() -> None:
    """With nothing to cut there is nothing to refuse."""
    model, batch = mlp(), pairs()
    elastic(model, enabled=False).backward(lambda b: cross_entropy(model)((b.x, b.y)), _Unknown(*batch))
    assert off_by(model, whole_gradient(model, lambda net: cross_entropy(net)(batch))) <= 1e-12


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("door", [*DOORS, "eval"])
def test_the_batch_is_brought_to_the_model_either_way(door: int | str, enabled: bool) -> None:
    """Switched off, a loader on the host no longer went with a model on a device."""
    model, seen = nn.Linear(6, 4, device="meta"), list[str]()

    def loss_fn(x: Tensor) -> Tensor:
        seen.append(x.device.type)
        loss: Tensor = model(x).sum()
        return loss

    mbs = elastic(model, micro_batch_size=4, enabled=enabled)
    if door == 1:
        mbs.backward(loss_fn, torch.zeros(4, 6))
    elif door == 2:
        elastic_step(model, micro_batch_size=4, enabled=enabled, memory=MemoryOptions(monitor_interval=0))(loss_fn)(torch.zeros(4, 6))
    elif door == 3:
        loop(mbs, loss_fn, torch.zeros(4, 6))
    else:
        mbs.eval(loss_fn, torch.zeros(4, 6))
    assert seen == ["meta"]
