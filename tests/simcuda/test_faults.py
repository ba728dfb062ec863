"""Errors of runtime, driver and libraries at every operation: recovered from, or refused typed."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from elastic_mbs import Event, OutOfMemory, StepResult
from elastic_mbs.errors import MicroBatchFloorError
from stress.limits.simcuda import Simulation, control
from tests.helpers.room import by_hand, wide
from tests.helpers.steps import (
    Pair,
    cross_entropy,
    elastic,
    grads,
    mlp,
    off_by,
    pairs,
    through,
    whole_gradient,
)

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda", 0)


class Scaled(nn.Module):
    """With a buffer that stays as it is, which the first call has to find out."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp()
        self.register_buffer("scale", torch.full((6,), 0.5, dtype=torch.float64))

    def forward(self, x: Tensor) -> Any:
        return self.inner(x * self.scale)


def stateful(*, normalised: bool) -> nn.Module:
    """Return a model with a convolution, products, dropout and, perhaps, running statistics."""
    torch.manual_seed(0)
    norm = nn.BatchNorm1d(4) if normalised else nn.Identity()
    return nn.Sequential(
        nn.Unflatten(1, (1, 6)),
        nn.Conv1d(1, 4, 3),
        norm,
        nn.Dropout(0.3),
        nn.Flatten(),
        nn.Linear(16, 4),
    ).double()


def on_device(model: nn.Module) -> tuple[nn.Module, Pair]:
    x, y = pairs()
    return model.to(DEVICE), (x.to(DEVICE), y.to(DEVICE))


def as_by_hand(
    model: nn.Module, twin: nn.Module, batch: Pair, result: StepResult, stream: Tensor
) -> bool:
    """Return whether gradients, buffers and the device's stream are those of `twin` by hand."""
    mine = torch.cuda.get_rng_state()
    torch.cuda.set_rng_state(stream)
    for start, stop in result.partition:
        loss = cross_entropy(twin)((batch[0][start:stop], batch[1][start:stop]))
        (loss * ((stop - start) / len(batch[1]))).backward()
    buffers = all(map(torch.equal, model.buffers(), twin.buffers()))
    return (
        off_by(model, grads(twin)) <= 1e-12
        and buffers
        and torch.equal(mine, torch.cuda.get_rng_state())
    )


@pytest.mark.parametrize("known", [False, True], ids=["first-call", "later-call"])
@pytest.mark.parametrize("door", [1, 3])
@pytest.mark.parametrize(
    ("error", "late", "normalised"),
    [
        pytest.param(control.OUT_OF_MEMORY, 0, True, id="driver"),
        # without running statistics: the operation that fails late can be the copy that puts them
        # back
        pytest.param(control.OUT_OF_MEMORY, 2, False, id="driver-late"),
        pytest.param(control.CUBLAS_ALLOC_FAILED, 0, True, id="cublas"),
        pytest.param(control.CUDNN_ALLOC_FAILED, 0, True, id="cudnn"),
    ],
)
def test_an_error_below_the_allocator_is_recovered_from_exactly(
    simulation: Simulation, error: int, late: int, normalised: bool, door: int, known: bool
) -> None:
    recovered = 0
    for after in range(200):
        model, batch = on_device(stateful(normalised=normalised))
        with elastic(model, micro_batch_size=4 if known else 8) as mbs:
            for _ in range(2 if known else 0):
                mbs.backward(cross_entropy(model), batch)
            model.zero_grad()
            twin, stream = copy.deepcopy(model), torch.cuda.get_rng_state()
            simulation.fail_operation(error, after=after, late=late)
            result = through(door, mbs, cross_entropy(model), batch)
            try:
                torch.cuda.synchronize()
            except torch.AcceleratorError:
                # of the last operations: it comes to light after the call, and to the user
                assert late
                continue
            simulation.fail_operation(0)
            assert as_by_hand(model, twin, batch, result, stream), after
        recovered += result.ooms
        if not result.ooms:
            break
    else:
        pytest.fail("no run was clean")
    assert recovered >= (3 if error != control.CUDNN_ALLOC_FAILED else 2)


@pytest.mark.parametrize("late", [1, 3])
@pytest.mark.parametrize("replay", ["auto", "isolate"])
def test_an_error_that_bookkeeping_meets_late_is_not_swallowed_by_it(
    simulation: Simulation, late: int, replay: str
) -> None:
    # The operation that has failed can be one of the backward before, so doing the bookkeeping
    # again would hide a wrong gradient.
    refused = 0
    for after in range(100):
        model, batch = on_device(Scaled())
        reference = whole_gradient(model, lambda twin, batch=batch: cross_entropy(twin)(batch))  # type: ignore[misc]
        with elastic(model, micro_batch_size=4, replay=replay) as mbs:
            simulation.fail_operation(control.OUT_OF_MEMORY, after=after, late=late)
            try:
                result = mbs.backward(cross_entropy(model), batch)
                torch.cuda.synchronize()
            except MicroBatchFloorError as refusal:
                assert "CUDA error: out of memory" in str(refusal)
                assert all(parameter.grad is None for parameter in model.parameters())
                refused += 1
                continue
            except torch.AcceleratorError:  # after the call
                continue
            simulation.fail_operation(0)
            assert off_by(model, reference) <= 1e-12, after
        if not result.ooms:
            break
    assert refused >= late


@pytest.mark.parametrize("times", [1, 2, 5, 12])
def test_a_burst_of_refusals_by_the_device_is_survived_with_the_exact_gradient(
    simulation: Simulation, times: int
) -> None:
    model = wide(DEVICE)
    generator = torch.Generator().manual_seed(1)
    batch = (
        torch.randn(64, 8, dtype=torch.float64, generator=generator).to(DEVICE),
        torch.randint(0, 4, (64,), generator=generator).to(DEVICE),
    )
    reference = by_hand(model, batch, ((0, 64),))
    torch.cuda.empty_cache()
    simulation.refuse_memory(times)
    with elastic(model, micro_batch_size=64) as mbs:
        result = mbs.backward(cross_entropy(model), batch)
    assert off_by(model, reference) <= 1e-12
    assert result.ooms >= times // 4


@pytest.mark.parametrize("place", ["forward", "backward"])
def test_a_device_that_falls_off_the_bus_passes_through_and_is_not_replayed(
    simulation: Simulation, place: str
) -> None:
    model, batch = on_device(mlp())
    calls: list[int] = []

    def loss_fn(piece: Pair) -> Tensor:
        calls.append(len(piece[1]))
        if len(calls) == 2 and place == "forward":
            simulation.set("lost", 1)
        loss = cross_entropy(model)(piece)
        if len(calls) == 2:
            loss.register_hook(lambda grad: simulation.set("lost", 1))
        return loss

    with elastic(model, micro_batch_size=4) as mbs:
        with pytest.raises(torch.AcceleratorError, match="ECC"):
            mbs.backward(loss_fn, batch)
        assert calls == [4, 4]
        assert all(parameter.grad is None for parameter in model.parameters())
        simulation.set("lost", 0)
        reference = whole_gradient(model, lambda twin: cross_entropy(twin)(batch))
        mbs.backward(cross_entropy(model), batch)
        assert off_by(model, reference) <= 1e-12


def ruin(line: Callable[[object], None], late: int) -> None:
    """Make an illegal access in backward, and a call on the ruined context after it."""
    model, batch = on_device(stateful(normalised=True))
    events: list[Event] = []
    calls: list[int] = []

    def loss_fn(piece: Pair) -> Tensor:
        calls.append(len(piece[1]))
        return cross_entropy(model)(piece)

    with elastic(model, micro_batch_size=4, on_event=events.append) as mbs:
        mbs.backward(loss_fn, batch)
        model.zero_grad()
        calls.clear()
        Simulation().fail_operation(control.ILLEGAL_ADDRESS, after=12, late=late)
        notes: list[str] = []
        for _ in range(2):  # the second call finds the context ruined
            with pytest.raises(torch.AcceleratorError, match="illegal memory access") as caught:
                mbs.backward(loss_fn, batch)
            notes += getattr(caught.value, "__notes__", [])
            assert calls == [4]
            assert all(parameter.grad is None for parameter in model.parameters())
        assert any("buffers could not be restored" in note for note in notes)
    assert not any(isinstance(event, OutOfMemory) for event in events)


@pytest.mark.parametrize("late", [0, 3])
def test_an_illegal_access_passes_through_and_nothing_is_replayed(
    apart: Callable[..., None], late: int
) -> None:
    apart(ruin, late=late)
