"""Promise 4: only out-of-memory is caught; whatever ends a call, state goes back to its start."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from elastic_mbs import (
    ElasticMBS,
    ElasticMBSError,
    Event,
    MemoryOptions,
    MicroBatchFloorError,
    OutOfMemory,
    PoisonedDeviceError,
    Policy,
    RecoveryError,
    Warned,
)
from elastic_mbs.memory import MemoryBudget
from tests.helpers.steps import (
    FailOn,
    Pair,
    calls_of,
    cross_entropy,
    elastic,
    failing,
    grads,
    mlp,
    off_by,
    pairs,
    still_works,
    through,
)

pytestmark = pytest.mark.injectable

DOORS = [1, 3]


class _CustomError(Exception):
    pass


class _CustomExit(BaseException):
    pass


ERRORS: list[Callable[[], BaseException]] = [
    lambda: ValueError("out of memory"),
    lambda: RuntimeError("the cache is out of memory slots"),
    lambda: RuntimeError("CUDA error: an illegal memory access was encountered"),
    lambda: _CustomError("CUDA out of memory. Tried to allocate 2.00 MiB."),
    lambda: KeyError("CUDA out of memory"),
    lambda: OSError(2, "no such file"),
    KeyboardInterrupt,
    lambda: SystemExit(3),
    _CustomExit,
    StopIteration,
    GeneratorExit,
]


class _Noisy(nn.Module):
    """A model that changes buffers and draws random numbers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.first, self.second = nn.BatchNorm1d(6), nn.Linear(6, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.second(
            nn.functional.dropout(self.first(self.norm(x)), 0.5) * random.random()
        )
        return out


def _state(model: nn.Module) -> tuple[list[Tensor], Tensor, Any]:
    return [buffer.clone() for buffer in model.buffers()], torch.get_rng_state(), random.getstate()


def _same(a: tuple[list[Tensor], Tensor, Any], b: tuple[list[Tensor], Tensor, Any]) -> bool:
    return (
        all(torch.equal(x, y) for x, y in zip(a[0], b[0], strict=True))
        and torch.equal(a[1], b[1])
        and a[2] == b[2]
    )


class _InBackward(torch.autograd.Function):
    """A function that raises in backward, when the second layer has committed."""

    fail: FailOn | None = None

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        assert _InBackward.fail is not None
        _InBackward.fail()
        return grad


def _step(model: _Noisy, fail: FailOn, where: str) -> Callable[[Pair], Tensor]:
    _InBackward.fail = fail

    def loss_fn(b: Pair) -> Tensor:
        x = model.norm(b[0])
        hidden = model.first(x)
        if where == "backward":
            # torch leaves it untyped
            hidden = _InBackward.apply(hidden)  # type: ignore[no-untyped-call]
        loss = nn.functional.cross_entropy(
            model.second(nn.functional.dropout(hidden, 0.5) * random.random()), b[1]
        )
        if where == "forward":
            fail()
        return loss

    return loss_fn


def _prefill(model: nn.Module) -> list[Tensor]:
    before = [torch.ones_like(p) for p in model.parameters()]
    for parameter, gradient in zip(model.parameters(), before, strict=True):
        parameter.grad = gradient.clone()
    return before


@pytest.mark.no_oom_injection
@pytest.mark.parametrize("make", ERRORS)
@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("door", DOORS)
def test_an_error_passes_through_as_the_same_object_and_state_goes_back(
    door: int, where: str, make: Callable[[], BaseException]
) -> None:
    model, batch, raised = _Noisy().double(), pairs(8), make()
    for warm, prefilled in ((False, False), (False, True), (True, False), (True, True)):
        mbs = elastic(model, micro_batch_size=4)
        if warm:
            mbs.backward(_step(model, FailOn(), where), batch)
        model.zero_grad()
        before = _prefill(model) if prefilled else []
        state = _state(model)
        with pytest.raises(type(raised)) as caught:
            through(door, mbs, _step(model, FailOn(2, error=lambda: raised), where), batch)
        assert caught.value is raised
        assert _same(_state(model), state)
        notes = "".join(getattr(raised, "__notes__", []))
        if prefilled:
            # no None among them, and lists are invariant
            assert "zero_grad()" in notes or off_by(model, before) == 0  # type: ignore[arg-type]
        else:
            assert all(p.grad is None for p in model.parameters())
            assert "zero_grad()" not in notes
        raised.__notes__ = []
        raised.__traceback__ = raised.__context__ = raised.__cause__ = None
        call = calls_of(mbs).current
        assert call is None or call.finished
        model.zero_grad()
        clean = mbs.backward(_step(model, FailOn(), where), batch)
        assert clean.ooms == 0
        mbs.close()


@pytest.mark.no_oom_injection
@pytest.mark.parametrize("make", [ValueError, KeyboardInterrupt, _CustomExit])
def test_an_error_between_two_blocks_of_the_loop_puts_state_back(
    make: Callable[[], BaseException],
) -> None:
    # The engine does not see an error outside `with micro:`. It has to notice the open call at the
    # next use of the runtime at the latest.
    model, batch = _Noisy().double(), pairs(8)
    raised = make()
    mbs = elastic(model, micro_batch_size=4)
    state = _state(model)

    def train() -> None:
        for i, micro in enumerate(mbs.micro_batches(batch)):
            if i == 1:
                raise raised
            with micro:
                micro.backward(_step(model, FailOn(), "forward")(micro.data))

    with pytest.raises(type(raised)) as caught:
        train()
    assert caught.value is raised
    mbs.close()
    assert _same(_state(model), state)
    assert all(p.grad is None for p in model.parameters())
    assert mbs.backward(_step(model, FailOn(), "forward"), batch).partition == ((0, 4), (4, 8))


@pytest.mark.no_oom_injection
def test_an_error_in_a_commit_callback_passes_and_the_batch_is_done() -> None:
    model, batch = _Noisy().double(), pairs(8)
    raised = ValueError("logging broke")

    def broken() -> None:
        raise raised

    mbs = elastic(model, micro_batch_size=4)
    before = torch.get_rng_state(), random.getstate()
    with pytest.raises(ValueError, match="logging broke") as caught:
        for micro in mbs.micro_batches(batch):
            with micro:
                micro.backward(_step(model, FailOn(), "forward")(micro.data))
                micro.on_commit(broken)
    assert caught.value is raised
    assert any("its gradient is whole" in note for note in raised.__notes__)
    assert mbs.stats.calls == 1
    same = _Noisy().double()
    torch.set_rng_state(before[0])
    random.setstate(before[1])
    for rows in (slice(0, 4), slice(4, 8)):
        (_step(same, FailOn(), "forward")((batch[0][rows], batch[1][rows])) / 2).backward()
    assert off_by(model, grads(same)) <= 1e-12
    assert _same(_state(model), _state(same))
    model.zero_grad()
    assert mbs.backward(_step(model, FailOn(), "forward"), batch).ooms == 0


@pytest.mark.parametrize("door", DOORS)
def test_an_error_in_an_event_sink_passes_through_and_state_goes_back(door: int) -> None:
    model, batch = _Noisy().double(), pairs(8)
    raised = ConnectionError("the dashboard is down")

    def sink(event: Event) -> None:
        if isinstance(event, OutOfMemory):
            raise raised

    mbs = elastic(model, micro_batch_size=4, on_event=sink)
    state = _state(model)
    with pytest.raises(ConnectionError) as caught:
        through(door, mbs, _step(model, FailOn(2), "forward"), batch)
    assert caught.value is raised
    assert all(p.grad is None for p in model.parameters())
    assert _same(_state(model), state)


@pytest.mark.no_oom_injection
def test_an_error_in_the_sink_of_a_growth_leaves_no_gradients_behind() -> None:
    # Every piece has been accumulated, but the call ends by an exception.
    model, batch = nn.Linear(6, 4).double(), pairs(64)
    raised = ConnectionError("the dashboard is down")

    def sink(event: Event) -> None:
        if type(event).__name__ == "Resized":
            raise raised

    with MemoryBudget("1GiB", track=(model, batch)) as budget:
        policy = Policy(patience=1, jitter=0.0, cooldown=0.0, min_gain=0.0)
        mbs = ElasticMBS(
            model,
            micro_batch_size=2,
            policy=policy,
            on_event=sink,
            memory=MemoryOptions(sensor=budget, monitor_interval=0),
        )
        for _ in range(30):
            model.zero_grad()
            try:
                mbs.backward(cross_entropy(model), batch)
            except ConnectionError as error:
                assert error is raised
                break
        else:
            pytest.fail("nothing grew")
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.no_oom_injection
@pytest.mark.parametrize("door", DOORS)
def test_earlier_gradients_are_reported_if_they_hold_a_part_of_the_batch(
    door: int,
) -> None:
    model, batch = nn.Linear(6, 4).double(), pairs(8)
    before = _prefill(model)
    mbs = elastic(model, micro_batch_size=4)
    with pytest.raises(ValueError, match="second piece") as caught:
        through(
            door, mbs, failing(model, FailOn(2, error=lambda: ValueError("second piece"))), batch
        )
    assert any("zero_grad()" in note for note in caught.value.__notes__)
    # no None among them, and lists are invariant
    assert off_by(model, before) > 0  # type: ignore[arg-type]
    _prefill(model)
    with pytest.raises(ValueError, match="first piece") as caught:
        through(
            door, mbs, failing(model, FailOn(1, error=lambda: ValueError("first piece"))), batch
        )
    assert not any("zero_grad()" in note for note in getattr(caught.value, "__notes__", [])), (
        "nothing had been accumulated, so there is nothing to say"
    )
    # no None among them, and lists are invariant
    assert off_by(model, before) == 0  # type: ignore[arg-type]


# ---------------------------------------------------------------------- kinds of errors


@pytest.mark.no_oom_injection
@pytest.mark.parametrize("door", DOORS)
def test_the_users_predicate_adds_errors_and_its_own_errors_pass(door: int) -> None:
    model, batch = nn.Linear(6, 4).double(), pairs(8)

    def is_oom(error: BaseException) -> bool:
        return isinstance(error, _CustomError)

    fail = FailOn(1, error=lambda: _CustomError("the accelerator is full"))
    result = through(
        door, elastic(model, micro_batch_size=4, is_oom=is_oom), failing(model, fail), batch
    )
    assert result.ooms == 1

    def broken(error: BaseException) -> bool:
        raise ZeroDivisionError("in the predicate")

    model.zero_grad()
    mbs = elastic(model, micro_batch_size=4, is_oom=broken)
    with pytest.raises(ZeroDivisionError, match="in the predicate"):
        through(door, mbs, failing(model, FailOn(2, error=lambda: ValueError("x"))), batch)
    assert all(p.grad is None for p in model.parameters())
    mbs.close()
    assert still_works(elastic(model), model)


@pytest.mark.no_oom_injection
@pytest.mark.parametrize("door", DOORS)
def test_a_masked_error_shrinks_once_with_a_warning_and_then_passes(door: int) -> None:
    model, batch, events = nn.Linear(6, 4).double(), pairs(8), list[Event]()

    def masked() -> RuntimeError:
        return RuntimeError(
            "cuDNN error: CUDNN_STATUS_NOT_SUPPORTED. This error may appear if you passed in a "
            "non-contiguous input."
        )

    mbs = elastic(model, micro_batch_size=4, on_event=events.append)
    result = through(door, mbs, failing(model, FailOn(1, error=masked)), batch)
    assert result.ooms == 1
    assert (
        sum(
            isinstance(event, Warned) and "hidden out-of-memory" in event.message
            for event in events
        )
        == 1
    )
    model.zero_grad()
    for fails in ((1, 2), (1, 3)):
        mbs = elastic(model, micro_batch_size=4, on_event=events.append)
        with pytest.raises(RuntimeError, match="CUDNN_STATUS_NOT_SUPPORTED"):
            through(door, mbs, failing(model, FailOn(*fails, error=masked)), batch)
        assert all(p.grad is None for p in model.parameters())
    mbs = elastic(model, micro_batch_size=1)
    with pytest.raises(RuntimeError, match="CUDNN_STATUS_NOT_SUPPORTED"):
        through(door, mbs, failing(model, FailOn(1, error=masked)), batch)


@pytest.mark.parametrize("door", DOORS)
def test_a_poisoned_device_is_refused_and_on_fatal_sees_restored_state(door: int) -> None:
    model, batch = _Noisy().double(), pairs(8)
    state, seen = _state(model), list[ElasticMBSError]()

    def on_fatal(error: ElasticMBSError) -> None:
        assert _same(_state(model), state)
        assert all(p.grad is None for p in model.parameters())
        seen.append(error)

    mbs = elastic(model, micro_batch_size=4, on_fatal=on_fatal)
    poison = FailOn(
        2,
        error=lambda: RuntimeError(
            "NCCL error: unhandled cuda error, NCCL version 2.21.5\nCuda failure 'out of memory'"
        ),
    )
    with pytest.raises(PoisonedDeviceError, match="restart") as caught:
        through(door, mbs, _step(model, poison, "forward"), batch)
    assert seen == [caught.value]
    assert isinstance(caught.value, RecoveryError)


def test_on_fatal_that_raises_does_not_hide_the_error() -> None:
    model, batch = nn.Linear(6, 4).double(), pairs(8)

    def on_fatal(error: ElasticMBSError) -> None:
        raise OSError("the disk is full")

    mbs = elastic(model, micro_batch_size=1, on_fatal=on_fatal)
    with pytest.raises(MicroBatchFloorError) as caught:
        mbs.backward(failing(model, FailOn(*range(1, 50))), batch)
    assert any("the disk is full" in note for note in caught.value.__notes__)


def test_on_fatal_is_not_called_for_an_error_of_the_users() -> None:
    model, called = nn.Linear(6, 4).double(), list[ElasticMBSError]()
    mbs = elastic(model, on_fatal=called.append)
    with pytest.raises(ValueError, match="mine"):
        mbs.backward(failing(model, FailOn(1, error=lambda: ValueError("mine"))), pairs(4))
    assert called == []


def test_evaluate_passes_errors_through_and_puts_state_back() -> None:
    model, batch = _Noisy().double(), pairs(8)
    mbs = elastic(model, micro_batch_size=4)
    state, raised = _state(model), KeyboardInterrupt()
    fail = FailOn(2, error=lambda: raised)

    def fn(b: Pair) -> Tensor:
        out: Tensor = model(b[0])
        fail()
        return out

    with pytest.raises(KeyboardInterrupt) as caught:
        mbs.evaluate(fn, batch)
    assert caught.value is raised
    assert _same(_state(model), state)
    assert grads(model) == [None] * 6
    assert mbs.evaluate(fn, batch).shape == (8, 4)


def test_state_goes_back_also_where_autograd_refuses_to_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # A failed backward is drained by another backward. An error of that one took the place of the
    # user's, and state was not put back.
    model, batch = mlp(), pairs(8)

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError(
            "Unable to handle autograd's threading in combination with fork-based multiprocessing"
        )

    def loss_fn(piece: tuple[Tensor, Tensor]) -> Tensor:
        if bool((piece[0] == batch[0][-1]).all(1).any()):
            raise ValueError("mine")
        return nn.functional.cross_entropy(model(piece[0]), piece[1])

    monkeypatch.setattr(torch.autograd, "grad", refuse)
    with pytest.raises(ValueError, match="mine"):
        elastic(model, micro_batch_size=2, grow=False).backward(loss_fn, batch)
    assert all(parameter.grad is None for parameter in model.parameters())
