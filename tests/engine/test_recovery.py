"""A failure gets its replay, has state put back, and keeps nothing alive."""

import gc
import random
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from elastic_mbs import OutOfMemory
from elastic_mbs.engine.shared.peers import Alone
from elastic_mbs.events import Event
from tests.helpers.steps import (
    FailOn,
    Pair,
    cross_entropy,
    elastic,
    mlp,
    off_by,
    pairs,
    settled,
    there,
    through,
    whole_gradient,
)
from tests.helpers.strikes import every_operation


@pytest.mark.parametrize(
    "draw",
    [torch.rand, lambda n: torch.tensor([random.random() for _ in range(n)])],
    ids=["torch", "python"],
)
def test_a_step_that_begins_to_draw_as_it_fails_is_replayed_exactly(
    door: int, draw: Callable[[int], Tensor]
) -> None:
    """Random streams are read once in a call until the step has been seen to draw.

    If the step begins to draw in a call that fails, the batch starts over from the call's start.
    """
    events, batch = list[Event](), pairs()
    for inject in every_operation(stride=5):
        model, twin = mlp(), mlp()

        def loss_fn(b: Pair, net: nn.Module = model) -> Tensor:
            each = nn.functional.cross_entropy(net(b[0]), b[1], reduction="none")
            return (each * draw(len(each))).mean() if drawing else each.mean()  # noqa: B023  # called within this turn

        drawing = False
        mbs = settled(door, model, loss_fn, batch, on_event=events.append)
        drawing = True
        random.seed(3)
        torch.manual_seed(3)
        with inject:
            result = through(door, mbs, loss_fn, batch)
        after = random.getstate(), torch.get_rng_state()
        random.seed(3)
        torch.manual_seed(3)
        for start, stop in result.partition:
            (
                loss_fn((batch[0][start:stop], batch[1][start:stop]), twin) * ((stop - start) / 8)
            ).backward()
        assert off_by(model, [p.grad for p in twin.parameters()]) <= 1e-12
        assert after[0] == random.getstate()
        assert torch.equal(after[1], torch.get_rng_state())
    assert {event.mode for event in events if isinstance(event, OutOfMemory)} == {"piece", "step"}


def test_gradients_dropped_by_a_replay_are_not_kept_alive() -> None:
    model, batch, events = mlp(), pairs(), list[Event]()
    held: list[weakref.ref[Tensor]] = []
    alive: list[bool] = []

    def loss_fn(piece: Pair) -> Tensor:
        if held:
            gc.collect()
            alive.append(held[0]() is not None)
        elif (grad := next(model.parameters()).grad) is not None:
            held.append(weakref.ref(grad))
            raise RuntimeError("CUDA error: out of memory")  # perhaps an earlier piece's
        return cross_entropy(model)(piece)

    elastic(model, micro_batch_size=4, on_event=events.append).backward(loss_fn, batch)
    assert [event.mode for event in events if isinstance(event, OutOfMemory)] == ["step"]
    assert alive[0] is False
    assert off_by(model, whole_gradient(model, lambda twin: cross_entropy(twin)(batch))) <= 1e-12


def test_a_scaler_with_one_of_its_two_tensors_makes_both_again() -> None:
    """A scaler with its scale but without a growth tracker looks ready.

    The step of the optimizer would end in an AssertionError of torch's.
    """
    struck = 0
    for inject in every_operation():
        model, batch, scaler = mlp(), pairs(4), torch.amp.GradScaler("cpu", init_scale=4.0)
        mbs = elastic(model, micro_batch_size=4, scaler=scaler)
        with inject:
            mbs.backward(cross_entropy(model), batch)
        struck += inject.hits == ["aten::full"]
        scaler.step(torch.optim.SGD(model.parameters(), lr=0.1))
        scaler.update()
    assert struck >= 2


@pytest.mark.parametrize("fails", [1, 2, 3])
def test_a_first_piece_that_fails_again_is_replayed_beside_gradients(door: int, fails: int) -> None:
    """Nothing has committed, so its streams are those of the call's start: no restart is needed."""
    model, twin, batch = mlp(), mlp(), pairs(8)
    fail = FailOn(*range(1, fails + 1))

    def loss_fn(b: Pair, net: nn.Module = model) -> Tensor:
        return cross_entropy(net)(b) * random.random()

    def failing_fn(b: Pair) -> Tensor:
        loss = loss_fn(b)
        fail()
        return loss

    for net in (model, twin):
        cross_entropy(net)(batch).backward()
    random.seed(3)
    result = through(door, elastic(model), failing_fn, batch)
    after = random.getstate()
    random.seed(3)
    for start, stop in result.partition:
        piece = (batch[0][start:stop], batch[1][start:stop])
        (loss_fn(piece, twin) * ((stop - start) / 8)).backward()
    assert result.ooms == fails
    assert after == random.getstate()
    assert all(
        torch.allclose(there(a.grad), there(b.grad), rtol=0, atol=1e-15)
        for a, b in zip(model.parameters(), twin.parameters(), strict=True)
    )


def test_a_batch_that_starts_over_and_fails_before_its_first_piece_begins_where_it_began(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # As a gather of parameters of `fully_shard` can fail before a piece.
    model, drawn, gather = mlp(), list[tuple[int, float]](), FailOn()
    monkeypatch.setattr(Alone, "before_piece", lambda self: gather())
    mbs = elastic(model, micro_batch_size=4)

    def draws(batch: Pair) -> Tensor:
        drawn.append((len(batch[0]), float(torch.rand(()))))
        random.random()  # from a stream that is not read before the second piece
        if len(drawn) == 2:
            gather.calls = frozenset({gather.count + 1})
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 MiB")
        out: Tensor = model(batch[0])
        return out

    torch.manual_seed(3)
    first = float(torch.rand(()))
    torch.manual_seed(3)
    mbs.evaluate(draws, pairs(8))
    assert drawn[0] == (4, first)
    assert drawn[2][1] == first


def test_unscaling_is_tried_again_after_a_memory_error_of_python() -> None:
    """A MemoryError is no RuntimeError, and has to be recovered from as well."""
    model, fail = mlp(), FailOn(1, error=MemoryError)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    class Scaler(torch.amp.GradScaler):
        def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
            fail()
            super().unscale_(optimizer)

    mbs = elastic(model, scaler=Scaler("cpu", init_scale=4.0))
    mbs.backward(cross_entropy(model), pairs(4))
    before = [p.detach().clone() for p in model.parameters()]
    mbs.optimizer_step(optimizer)
    assert fail.count == 2
    assert not any(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
