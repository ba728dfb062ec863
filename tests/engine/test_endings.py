"""A call lets go of its batch and gradients however it ends, and tells what it could not undo."""

import contextlib
import gc
import time
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from elastic_mbs import (
    CallDone,
    ElasticMBS,
    Event,
    GradientOptions,
    Headroom,
    IncompleteBatchError,
    MicroBatchFloorError,
    MisuseError,
    UsageError,
)
from elastic_mbs.errors import BackwardInsideError, GradientsChangedError
from tests.helpers.steps import (
    FailOn,
    cross_entropy,
    elastic,
    failing,
    mlp,
    off_by,
    pairs,
    quiet,
    settled,
    through,
    whole_gradient,
)

OOM = "CUDA out of memory. Tried to allocate 2.00 MiB"


def out_of_memory() -> torch.OutOfMemoryError:
    return torch.OutOfMemoryError(OOM)


@pytest.mark.parametrize(
    ("error", "raised"),
    [(ValueError, ValueError), (KeyboardInterrupt, KeyboardInterrupt)],
    ids=["error", "interrupt"],
)
def test_a_batch_dies_with_the_call_that_an_error_ends(
    door: int, error: type[BaseException], raised: type[BaseException]
) -> None:
    model = mlp()
    mbs = elastic(model, micro_batch_size=4)
    gc.disable()  # no cycle may hold it
    try:
        batch = pairs()
        alive = weakref.ref(batch[0])
        with pytest.raises(raised) as caught:
            through(door, mbs, failing(model, FailOn(2, error=error)), batch)
        del caught, batch
        assert alive() is None
    finally:
        gc.enable()


def test_a_batch_dies_with_the_call_that_does_not_fit() -> None:
    model = mlp()
    mbs = elastic(model, micro_batch_size=1)
    gc.disable()
    try:
        batch = pairs(2)
        alive = weakref.ref(batch[0])
        with pytest.raises(MicroBatchFloorError) as caught:
            mbs.backward(failing(model, FailOn(*range(1, 50), error=out_of_memory)), batch)
        del caught, batch
        assert alive() is None
    finally:
        gc.enable()


def test_a_batch_dies_with_a_loop_that_is_left_early() -> None:
    model = mlp()
    mbs = elastic(model, micro_batch_size=4)
    gc.disable()
    try:
        batch = pairs()
        alive = weakref.ref(batch[0])
        for micro in mbs.micro_batches(batch):
            with micro:
                micro.backward(cross_entropy(model)(micro.data))
            break
        del batch, micro
        with pytest.raises(IncompleteBatchError) as caught:
            mbs.backward(cross_entropy(model), pairs())
        del caught
        assert alive() is None
    finally:
        gc.enable()


def test_gradients_die_with_the_call_that_ends_after_a_backward() -> None:
    model = mlp()
    mbs = elastic(model, micro_batch_size=4)
    alive: list[weakref.ref[Tensor]] = []
    with pytest.raises(ValueError, match="mine"):
        for micro in mbs.micro_batches(pairs()):
            with micro:
                micro.backward(cross_entropy(model)(micro.data))
                alive += [weakref.ref(p.grad) for p in model.parameters() if p.grad is not None]
                raise ValueError("mine")
    gc.collect()
    assert [each() for each in alive] == [None] * 4


def test_an_interrupt_while_embeddings_gradients_are_added_loses_no_leaf(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, scale = mlp(), torch.ones((), dtype=torch.float64, requires_grad=True)
    scale.grad = torch.full_like(scale, 7.0)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    mbs = elastic(model, micro_batch_size=4)

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("elastic_mbs.rollback.isolation.Isolation.fold", interrupted)
    with pytest.raises(KeyboardInterrupt) as caught:
        mbs.backward_embeddings(
            lambda piece: model(piece[0]) * scale, lambda found: found.square().mean(), pairs()
        )
    assert any("zero_grad()" in note for note in caught.value.__notes__)
    assert scale.grad is not None
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_an_interrupt_inside_the_last_copy_of_a_sum_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = nn.Linear(4, 1, bias=False).bfloat16()
    model.weight.grad = torch.ones_like(model.weight)
    kept, copy = model.weight.grad, Tensor.copy_

    def struck(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        done = copy(self, *args, **kwargs)
        if self is kept:
            raise KeyboardInterrupt  # a signal that comes while the kernel runs
        return done

    options = GradientOptions(accumulate_dtype=torch.float32)
    mbs = ElasticMBS(model, **quiet(micro_batch_size=4, gradients=options))
    monkeypatch.setattr(Tensor, "copy_", struck)
    with pytest.raises(KeyboardInterrupt) as caught:
        mbs.backward(lambda x: model(x).float().mean(), torch.randn(8, 4).bfloat16())
    assert any("zero_grad()" in note for note in caught.value.__notes__)


@pytest.mark.parametrize("evaluates", [False, True])
def test_memory_that_runs_out_after_a_close_inside_the_block_ends_as_it_is(
    evaluates: bool,
) -> None:
    model = mlp()
    mbs = elastic(model, micro_batch_size=4)

    def step(piece: Any) -> Tensor:
        mbs.close()
        raise out_of_memory()

    with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate"):
        if evaluates:
            mbs.evaluate(step, pairs())
        else:
            mbs.backward(step, pairs())
    assert all(parameter.grad is None for parameter in model.parameters())


class Plenty:
    """A sensor that sees all memory free at every look."""

    def read(self) -> Headroom:
        return Headroom(2**40, 2**40, 0, "test", time.monotonic())


def closing(mbs: list[ElasticMBS], kind: str) -> Any:
    """Return a function for `on_event` that closes the runtime at an event of a kind."""
    return lambda event: mbs[0].close() if type(event).__name__ == kind else None


@pytest.mark.parametrize("kind", ["OutOfMemory", "Escalated", "Resized", "Warned"])
def test_a_sink_that_closes_the_runtime_ends_the_batch_and_leaves_no_gradient(kind: str) -> None:
    model, batch, made = mlp(), pairs(8), list[ElasticMBS]()
    fails = {"OutOfMemory": [1], "Escalated": [1, 2, 3, 4, 5, 6]}.get(kind, [])
    made.append(
        elastic(
            model,
            micro_batch_size=2,
            sensor=Plenty(),
            grow=True,
            patience=1,
            escalate=("checkpoint",),
            on_event=closing(made, kind),
        )
    )
    if kind == "Warned":
        next(model.parameters()).register_hook(lambda grad: grad)
    ended = 0
    for _ in range(20):
        model.zero_grad()
        try:
            made[0].backward(failing(model, FailOn(*fails)), batch)
        except IncompleteBatchError as error:
            assert "closed inside its own call" in str(error)
            assert all(parameter.grad is None for parameter in model.parameters())
            ended += 1
            break
        assert all(parameter.grad is not None for parameter in model.parameters())
    assert ended
    fresh = elastic(model)
    fresh.backward(cross_entropy(model), batch)
    assert off_by(model, whole_gradient(model, lambda net: cross_entropy(net)(batch))) <= 1e-12


def test_a_loss_over_embeddings_that_closes_the_runtime_ends_its_batch() -> None:
    model = mlp()
    mbs = elastic(model, micro_batch_size=4)

    def loss(embeddings: Tensor) -> Tensor:
        mbs.close()
        return embeddings.square().mean()

    with pytest.raises(IncompleteBatchError, match="closed inside its own call"):
        mbs.backward_embeddings(lambda piece: model(piece[0]), loss, pairs(8))
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_step_that_closes_the_runtime_and_returns_is_told_so() -> None:
    model = mlp()
    mbs = elastic(model, micro_batch_size=4)

    def step(piece: Any) -> Tensor:
        mbs.close()
        return cross_entropy(model)(piece)

    with pytest.raises(IncompleteBatchError, match="closed inside its own call"):
        mbs.backward(step, pairs(8))


@pytest.mark.parametrize("when", ["before", "after"])
def test_what_a_step_does_after_it_has_closed_the_runtime_is_put_back_and_told(
    when: str, door: int
) -> None:
    model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Dropout(0.5)).double()
    mbs = elastic(model, micro_batch_size=4)
    through(door, mbs, cross_entropy(model), pairs(8))  # from now on it is known what moves
    buffers = [buffer.clone() for buffer in model.buffers()]
    streams, pieces = torch.get_rng_state(), list[Any]()

    def step(piece: Any) -> Tensor:
        pieces.append(piece)
        if len(pieces) == 2 and when == "before":
            mbs.close()
        loss = cross_entropy(model)(piece)
        if len(pieces) == 2 and when == "after":
            mbs.close()
        return loss

    with pytest.raises(IncompleteBatchError, match="closed inside its own call") as caught:
        through(door, mbs, step, pairs(8))
    # the gradients of the first call were there when the second began
    assert any("zero_grad()" in note for note in caught.value.__notes__)
    assert torch.equal(streams, torch.get_rng_state())
    assert all(map(torch.equal, buffers, model.buffers()))


@pytest.mark.parametrize("ends", ["error", "close"])
def test_a_loop_that_goes_on_after_its_batch_has_ended_is_told_so(ends: str) -> None:
    model = mlp()
    mbs = elastic(model, micro_batch_size=4)
    with pytest.raises(IncompleteBatchError, match="leave the loop"):
        for micro in mbs.micro_batches(pairs(8)):
            with contextlib.suppress(ValueError), micro:
                micro.backward(cross_entropy(model)(micro.data))
                if ends == "error":
                    raise ValueError("mine")
            if ends == "close":
                mbs.close()
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_loop_that_is_interrupted_as_it_closes_counts_no_batch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, events = mlp(), list[Event]()
    mbs = elastic(model, micro_batch_size=4, on_event=events.append)
    monkeypatch.setattr(
        "elastic_mbs.engine.progress.Progress.drop_committed",
        FailOn(1, error=KeyboardInterrupt),
    )
    with pytest.raises(KeyboardInterrupt):
        for micro in mbs.micro_batches(pairs(8)):
            with micro:
                micro.backward(cross_entropy(model)(micro.data))
    gc.collect()
    assert all(parameter.grad is None for parameter in model.parameters())
    assert (mbs.stats.calls, mbs.last_result) == (0, None)
    assert not any(isinstance(event, CallDone) for event in events)


def test_a_gradient_that_a_step_has_added_to_is_told_where_one_was_there(door: int) -> None:
    model = mlp()
    mbs = elastic(model, micro_batch_size=4)
    through(door, mbs, cross_entropy(model), pairs(8))

    def step(piece: Any) -> Tensor:
        cross_entropy(model)(piece).backward()
        return cross_entropy(model)(piece)

    with pytest.raises(GradientsChangedError) as caught:
        through(door, mbs, step, pairs(8))
    assert any("zero_grad()" in note for note in caught.value.__notes__)


def test_a_state_is_not_loaded_into_a_batch_that_runs() -> None:
    model = mlp()
    mbs = elastic(model, micro_batch_size=4)

    def step(piece: Any) -> Tensor:
        mbs.load_state_dict(mbs.state_dict())
        return cross_entropy(model)(piece)

    with pytest.raises(MisuseError, match="between two batches"):
        mbs.backward(step, pairs(8))
    mbs.load_state_dict(mbs.state_dict())
    mbs.backward(cross_entropy(model), pairs(8))


@pytest.mark.parametrize("place", ["step", "end"])
def test_modes_and_rates_go_back_wherever_the_call_fails(place: str) -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    mbs = elastic(model, micro_batch_size=4, outputs="device")
    mbs.backward(cross_entropy(model), pairs(8))
    optimizer.step()  # from here on the runtime knows the optimizer
    optimizer.zero_grad()
    memory, runs = torch.zeros(4, 1, dtype=torch.float64), list[int]()

    def fail() -> None:
        raise ValueError("mine")

    def step(piece: Any) -> Any:
        runs.append(len(piece[0]))
        model.eval()
        optimizer.param_groups[0]["lr"] = 0.5
        if place == "step" and len(runs) == 2:
            fail()
        loss = cross_entropy(model)(piece)
        return (loss, memory.fill_(len(runs))) if place == "end" else loss  # one memory for all

    with pytest.raises((ValueError, UsageError)):
        for micro in mbs.micro_batches(pairs(8)):
            with micro:
                micro.backward(step(micro.data))
    assert model.training
    assert optimizer.param_groups[0]["lr"] == 1.0
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_sink_that_raises_after_the_batch_is_told_that_the_gradient_is_whole(
    door: int, error: type[BaseException]
) -> None:
    model, batch = mlp(), pairs()

    def listen(event: Event) -> None:
        if isinstance(event, CallDone):
            raise error("mine")

    mbs = elastic(model, micro_batch_size=4, on_event=listen)
    with pytest.raises(error, match="mine") as caught:
        through(door, mbs, cross_entropy(model), batch)
    assert any("its gradient is whole" in note for note in caught.value.__notes__)
    assert off_by(model, whole_gradient(model, lambda net: cross_entropy(net)(batch))) <= 1e-12


def test_a_backward_inside_the_forward_that_runs_out_leaves_nothing_alive() -> None:
    # A gradient penalty fails, and autograd's queue keeps the branch that was ready.
    model = mlp()
    mbs = elastic(model, micro_batch_size=8)
    alive: list[weakref.ref[Tensor]] = []
    left = list[bool]()

    def penalised(piece: tuple[Tensor, Tensor]) -> Tensor:
        x = piece[0].clone().requires_grad_()
        if alive:
            left.append(any(each() is not None for each in alive))
            out: Tensor = model(x)
            return out.square().mean()
        hidden = torch.tanh(x * 2)
        alive.append(weakref.ref(hidden))
        one, other = hidden.exp(), hidden.sin()

        def fail(_: Tensor) -> None:
            raise out_of_memory()

        one.register_hook(fail)
        torch.autograd.grad((one.sum() + other.sum()), x, create_graph=True)
        raise AssertionError("the hook has failed")

    mbs.backward(penalised, pairs())
    assert left
    assert not any(left)


def test_a_refusal_after_memory_ran_out_keeps_no_tensor_of_the_step() -> None:
    model, alive = mlp(), list[weakref.ref[Tensor]]()

    def step(piece: tuple[Tensor, Tensor]) -> Tensor:
        held = torch.zeros(1000)
        alive.append(weakref.ref(held))
        cross_entropy(model)(piece).backward()
        raise out_of_memory()

    with pytest.raises(BackwardInsideError) as caught:
        elastic(model).backward(step, pairs())
    assert isinstance(caught.value.__context__, torch.OutOfMemoryError)
    assert alive[0]() is None


def test_a_generator_that_a_callback_has_made_hides_no_error() -> None:
    model = mlp()
    mbs = elastic(model, micro_batch_size=4)

    class Noisy:
        def __init__(self) -> None:
            self.generator = torch.Generator()

        def __call__(self, piece: Any) -> Tensor:
            out: Tensor = model(piece[0]) + torch.rand((), generator=self.generator)
            return out

    def evaluate() -> None:
        mbs.evaluate(Noisy(), pairs())
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine") as caught:
        for micro in mbs.micro_batches(pairs()):
            with micro:
                micro.backward(cross_entropy(model)(micro.data))
                micro.on_commit(evaluate)
    assert [note for note in caught.value.__notes__ if "put back" in note] == []


def test_a_known_step_that_begins_to_edit_its_batch_is_recovered_from(door: int) -> None:
    # The edit of the piece before was taken for one of the piece that failed.
    model, runs = mlp(), list[int]()
    nothing = torch.zeros((), dtype=torch.float64)

    def loss_fn(piece: tuple[Tensor, Tensor]) -> Tensor:
        if runs:
            runs.append(1)
            if len(runs) == 3:
                raise out_of_memory()
            piece[0].add_(nothing)
        return cross_entropy(model)(piece)

    mbs = settled(door, model, loss_fn, pairs(), micro_batch_size=4)
    runs.append(1)
    through(door, mbs, loss_fn, pairs())
    assert off_by(model, whole_gradient(model, lambda twin: cross_entropy(twin)(pairs()))) <= 1e-12
