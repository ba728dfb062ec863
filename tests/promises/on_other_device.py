"""Training on a device that torch does not know; test_other_device.py runs these tests."""

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from elastic_mbs import (
    CallDone,
    ElasticMBS,
    Event,
    MemoryOptions,
    OutOfMemory,
    Policy,
    RecoveryOptions,
    UnsupportedError,
)
from elastic_mbs.device import Accelerator, accelerator_of
from elastic_mbs.engine.outcome.result import StepResult
from elastic_mbs.memory import Headroom, Unavailable, oom, sensor_for
from tests.helpers import other_device
from tests.helpers.other_device import NAME, get, turn

MODULE = other_device.register()
DEVICE = torch.device(NAME, 0)
FIXED = Policy(grow=False, seed=0)
QUIET = MemoryOptions(monitor_interval=0, wait_for_memory=0)
BARE = dict(vars(MODULE))


@pytest.fixture(autouse=True)
def as_registered() -> Iterator[None]:
    yield
    for name in set(vars(MODULE)) - set(BARE):
        delattr(MODULE, name)
    vars(MODULE).update(BARE)
    turn("limit", 1 << 62)
    turn("typed", 1)
    turn("events", 1)
    accelerator_of.cache_clear()
    oom._recognised.clear()


def network() -> nn.Sequential:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(6, 32), nn.Dropout(), nn.Tanh(), nn.Linear(32, 1))
    return layers.double().to(DEVICE)


def batch() -> Tensor:
    return torch.linspace(-1, 1, 96, dtype=torch.float64).view(16, 6)


def seed() -> None:
    MODULE.set_rng_state(torch.Generator().manual_seed(7).get_state())


def undisturbed(partition: tuple[tuple[int, int], ...]) -> list[Tensor]:
    """Return the gradients of an unfaulted loop over the same pieces."""
    model, data = network(), batch()
    seed()
    for start, stop in partition:
        loss = model(data[start:stop].to(DEVICE)).square().mean()
        (loss * (stop - start) / len(data)).backward()
    return [parameter.grad.cpu() for parameter in model.parameters() if parameter.grad is not None]


def off_by(model: nn.Module, partition: tuple[tuple[int, int], ...]) -> float:
    found = [leaf.grad.cpu() for leaf in model.parameters() if leaf.grad is not None]
    wanted = undisturbed(partition)
    assert len(found) == len(wanted) == 4
    return max(
        float((a - b).abs().max() / b.abs().max()) for a, b in zip(found, wanted, strict=True)
    )


def train(
    model: nn.Module, loss_fn: Callable[[Tensor], Any], **options: Any
) -> tuple[StepResult, list[Event]]:
    events: list[Event] = []
    with ElasticMBS(model, policy=FIXED, memory=QUIET, on_event=events.append, **options) as mbs:
        mbs.backward(loss_fn, batch())  # learns the leaves
        model.zero_grad()
        events.clear()
        seed()
        result = mbs.backward(loss_fn, batch())
    return result, events


@pytest.mark.parametrize("place", ["forward", "backward", "after a commit"])
def test_masks_of_a_replay_are_those_of_an_unfaulted_run(place: str) -> None:
    model, pieces = network(), 0

    def fail(_: Tensor) -> None:
        raise torch.OutOfMemoryError("fakeaccel out of memory")

    def loss_fn(piece: Tensor) -> Tensor:
        nonlocal pieces
        pieces += 1
        hidden = model[1](model[0](piece))
        last = model[3](model[2](hidden))
        if pieces == 4:  # the second of the second call
            if place == "forward":
                fail(hidden)
            # the head has committed before the hidden layer's gradient is there
            (hidden if place == "after a commit" else last).register_hook(fail)
        loss: Tensor = last.square().mean()
        return loss

    result, _ = train(model, loss_fn, micro_batch_size=8)
    assert result.ooms == 1
    assert off_by(model, result.partition) <= 1e-12


def test_a_limit_of_the_device_is_survived_and_nothing_stays_behind() -> None:
    model, result = network(), None
    with ElasticMBS(model, policy=FIXED, memory=QUIET) as mbs:
        mbs.backward(lambda piece: model(piece).square().mean(), batch())
        model.zero_grad()
        seed()
        gc.collect()
        rest = get("live")
        turn("limit", rest + 6000)
        result = mbs.backward(lambda piece: model(piece).square().mean(), batch())
        partition, ooms = result.partition, result.ooms
        assert len(partition) > ooms > 0
        assert get("refusals") > 0
        turn("limit", 1 << 62)
        assert off_by(model, partition) <= 1e-12
        del result
        model.zero_grad()
        gc.collect()
        # the runtime keeps the losses of its last call, of 8 bytes each
        assert get("live") <= rest + 8 * len(partition)


def test_a_call_that_ends_by_an_error_puts_the_stream_back() -> None:
    model = network()

    def loss_fn(piece: Tensor) -> Tensor:
        loss: Tensor = model(piece).square().mean()
        if broken:
            raise KeyError("a mistake")
        return loss

    broken = False
    with ElasticMBS(model, policy=FIXED, memory=QUIET) as mbs:
        mbs.backward(loss_fn, batch())
        broken, before = True, MODULE.get_rng_state()
        with pytest.raises(KeyError):
            mbs.backward(loss_fn, batch())
    assert torch.equal(MODULE.get_rng_state(), before)


def test_times_are_those_of_the_devices_queue() -> None:
    model = network()
    before = get("clock")
    _, events = train(model, lambda piece: model(piece).square().mean(), micro_batch_size=4)
    *_, call = [event for event in events if isinstance(event, CallDone)]  # the first is late
    assert call.seconds is not None
    # one millisecond for each operation, by the device's own clock
    assert call.seconds * 1000 == pytest.approx(round(call.seconds * 1000))
    assert 20 < call.seconds * 1000 < get("clock") - before


def test_without_events_times_are_unknown_and_training_goes_on() -> None:
    turn("events", 0)
    model = network()
    result, events = train(model, lambda piece: model(piece).square().mean(), micro_batch_size=4)
    *_, call = [event for event in events if isinstance(event, CallDone)]  # the first is late
    assert call.seconds is None
    assert off_by(model, result.partition) <= 1e-12


def test_outputs_come_to_the_host() -> None:
    model = network()

    def loss_fn(piece: Tensor) -> tuple[Tensor, Tensor]:
        assert piece.device == DEVICE
        return model(piece).square().mean(), piece * 2

    result, _ = train(model, loss_fn, micro_batch_size=4)
    assert result.outputs.device.type == "cpu"
    assert torch.equal(result.outputs, batch() * 2)


@pytest.mark.parametrize("size", [16, 4])
@pytest.mark.parametrize("enabled", [True, False])
def test_small_outputs_of_a_batch_on_the_device_stay_there(size: int, enabled: bool) -> None:
    # code that has moved its batch to the device compares the outputs with it
    model, x = network(), batch().to(DEVICE)

    def loss_fn(piece: Tensor) -> Any:
        return model(piece).square().mean(), {"same": piece * 1, "n": piece.new_ones(())}

    mbs = ElasticMBS(model, micro_batch_size=size, policy=FIXED, memory=QUIET, enabled=enabled)
    with mbs:
        outputs = mbs.backward(loss_fn, x).outputs
        assert bool((outputs["same"] == x).all())
        assert {value.device for value in outputs["n"]} == {DEVICE}
        assert mbs.evaluate(lambda piece: piece * 1, x).device == DEVICE
        assert mbs.evaluate(lambda piece: piece * 1, x, outputs="cpu").device.type == "cpu"
        wide = torch.ones(1, 132_000, dtype=torch.float64, device=DEVICE)
        large = mbs.evaluate(lambda piece: piece[:, :1] * wide, x)  # 16.1 MiB for the batch
        assert large.device.type == "cpu"
        assert mbs.evaluate(lambda piece: piece.to(DEVICE) * 1, batch()).device.type == "cpu"


def test_without_figures_of_memory_no_size_grows() -> None:
    reading = sensor_for(DEVICE)[0].read()
    assert isinstance(reading, Unavailable)
    assert reading.reason == f"{NAME}:0: UnsupportedError: torch.{NAME} has no memory_reserved"
    model = network()
    with ElasticMBS(model, micro_batch_size=2, policy=Policy(patience=1, seed=0)) as mbs:
        for _ in range(8):
            result = mbs.backward(lambda piece: model(piece).square().mean(), batch())
    assert result.micro_batch_size == 2


def test_with_figures_of_memory_sizes_grow() -> None:
    other_device.with_figures(MODULE, 64 << 20)
    turn("limit", 64 << 20)
    reading = sensor_for(DEVICE)[0].read()
    assert isinstance(reading, Headroom)
    assert reading.source == NAME
    assert reading.free == (64 << 20) - get("live")
    model = network()
    policy = Policy(patience=1, jitter=0.0, cooldown=0.0, min_gain=0.0, seed=0)
    with ElasticMBS(model, micro_batch_size=2, policy=policy, memory=QUIET) as mbs:
        for _ in range(12):
            result = mbs.backward(lambda piece: model(piece).square().mean(), batch())
    assert result.micro_batch_size == 16


# ---------------------------------------------------------------------- refused by name


def no_functions() -> None:
    del MODULE.get_rng_state


def never_moves() -> None:
    MODULE.get_rng_state = lambda device: torch.zeros(4, dtype=torch.uint8)
    MODULE.set_rng_state = lambda state, device: None


def cannot_be_put_back() -> None:
    MODULE.set_rng_state = lambda state, device: None


def is_a_number() -> None:
    MODULE.get_rng_state = lambda device: 7


@pytest.mark.parametrize(
    ("lack", "reason"),
    [
        (no_functions, "neither default_generators nor get_rng_state and set_rng_state"),
        (never_moves, "its state does not change when numbers are drawn"),
        (cannot_be_put_back, "put back to an earlier state it draws other numbers"),
        (is_a_number, "its state is a int, and not a tensor in host memory"),
    ],
)
def test_a_generator_that_cannot_be_put_back_is_refused(
    lack: Callable[[], None], reason: str
) -> None:
    lack()
    with pytest.raises(UnsupportedError) as caught:
        ElasticMBS(network())
    assert f"device '{NAME}:0'" in str(caught.value)
    assert reason in str(caught.value)
    assert "enabled=False" in str(caught.value)


def test_trying_a_generator_out_leaves_it_where_it_was() -> None:
    before = MODULE.get_rng_state()
    ElasticMBS(network())
    assert torch.equal(MODULE.get_rng_state(), before)


def test_an_error_that_would_not_be_recognised_is_refused() -> None:
    turn("typed", 0)
    with pytest.raises(UnsupportedError) as caught:
        ElasticMBS(network())
    assert f"device '{NAME}:0'" in str(caught.value)
    assert "raised RuntimeError: the fakeaccel is full" in str(caught.value)
    assert "is_oom" in str(caught.value)


def test_a_predicate_of_the_users_makes_it_recognised() -> None:
    turn("typed", 0)
    model = network()
    recovery = RecoveryOptions(is_oom=lambda error: "is full" in str(error))
    events: list[Event] = []
    with ElasticMBS(
        model, policy=FIXED, memory=QUIET, recovery=recovery, on_event=events.append
    ) as mbs:
        mbs.backward(lambda piece: model(piece).square().mean(), batch())
        model.zero_grad()
        seed()
        turn("limit", get("live") + 6000)
        result = mbs.backward(lambda piece: model(piece).square().mean(), batch())
    turn("limit", 1 << 62)
    assert any(isinstance(event, OutOfMemory) and event.kind == "user" for event in events)
    assert off_by(model, result.partition) <= 1e-12


def test_without_recovery_nothing_is_refused() -> None:
    turn("typed", 0)
    no_functions()
    model = network()
    with ElasticMBS(model, enabled=False) as mbs:
        mbs.backward(lambda piece: model(piece).square().mean(), batch())
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_a_healthy_device_is_not_poisoned() -> None:
    assert oom.probe(DEVICE) is None


def test_the_host_waits_for_copies_where_nothing_is_pinned() -> None:
    accelerator = Accelerator(DEVICE)
    assert not accelerator.copies_ahead
    assert accelerator.second_stream() is None
    assert torch.equal(accelerator.to_host(torch.ones(3, device=DEVICE)), torch.ones(3))
