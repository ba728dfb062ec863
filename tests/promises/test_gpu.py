"""Promises on a GPU; without one, the same tests run on the CPU under a `MemoryBudget`.

On CUDA the errors are the allocator's own: a memory fraction stands for a small device, another
process for the co-tenant.
"""

import contextlib
import inspect
import json
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from elastic_mbs import ElasticMBS, Event, MemoryOptions, OptimizerOutOfMemory, OutOfMemory, Policy
from elastic_mbs.memory import oom
from stress.reference.state import error_of
from tests.helpers.room import (
    PLENTY,
    ROOT,
    Neighbour,
    Pair,
    Room,
    Wide,
    batch_on,
    by_hand,
    loss_of,
    needs,
    scale,
    wide,
)
from tests.helpers.steps import elastic, grads, off_by, through, whole_gradient

# torch warns at the first set_sync_debug_mode that it does not see every synchronisation
pytestmark = pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype feature")


# ---------------------------------------------------------------------- real out-of-memory errors


@pytest.mark.parametrize("phase", ["forward", "backward"])
@pytest.mark.parametrize("door", [1, 3])
def test_a_real_oom_is_survived_with_the_exact_gradient(
    device: torch.device, phase: str, door: int
) -> None:
    model, batch = wide(device), batch_on(device, scale(device)[0])
    events: list[Event] = []
    with Room(device, model) as room:
        forward, step = needs(room, model, batch)
        assert step > 1.1 * forward, "no limit lets forward fit and backward fail"
        reference = whole_gradient(model, lambda twin: loss_of(twin, batch))
        room.allow((forward + step) // 2 if phase == "backward" else int(0.8 * forward))
        mbs = elastic(model, micro_batch_size=len(batch[1]), on_event=events.append)
        result = through(door, mbs, lambda piece: loss_of(model, piece), batch)
        assert result.ooms >= 1
        assert next(event.phase for event in events if isinstance(event, OutOfMemory)) == phase
        assert off_by(model, reference) <= 1e-12


def test_a_batch_far_beyond_the_memory_has_the_exact_gradient(device: torch.device) -> None:
    model, batch = wide(device), batch_on(device, scale(device)[0])
    with Room(device, model) as room:
        _, step = needs(room, model, batch)
        reference = whole_gradient(model, lambda twin: loss_of(twin, batch))
        room.allow(step // 6)
        result = elastic(model, micro_batch_size=len(batch[1])).backward(
            lambda piece: loss_of(model, piece), batch
        )
        assert result.ooms >= 3
        assert result.micro_batch_size <= len(batch[1]) // 8
        assert off_by(model, reference) <= 1e-12


@pytest.mark.parametrize("door", [1, 3])
def test_no_memory_of_a_failed_attempt_stays(device: torch.device, door: int) -> None:
    model, batch = wide(device), batch_on(device, scale(device)[0])
    with Room(device, model) as room:
        forward, step = needs(room, model, batch)
        taken = []
        for limit in ((forward + step) // 2, int(0.8 * forward)) * 4:
            room.allow(limit)
            mbs = elastic(model, micro_batch_size=len(batch[1]))
            assert through(door, mbs, lambda piece: loss_of(model, piece), batch).ooms
            model.zero_grad()
            mbs.close()
            del mbs
            room.allow(PLENTY)
            taken.append(room.taken())
        assert set(taken) == {taken[0]}


def test_evaluation_survives_too(device: torch.device) -> None:
    model, batch = wide(device), batch_on(device, scale(device)[0])
    with Room(device, model) as room, torch.no_grad():
        model(batch[0])
        need = room.need(lambda: model(batch[0]))
        expected = model(batch[0])
        room.allow(need // 2)
        events: list[Event] = []
        outputs = elastic(model, micro_batch_size=len(batch[1]), on_event=events.append).evaluate(
            lambda piece: model(piece[0]), batch, outputs="device"
        )
        assert events
        # Some of these sums of 16384 terms are nearly zero. In another order they differ by the
        # rounding of their terms.
        assert torch.allclose(outputs, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("middle", [nn.Dropout(0.5), nn.BatchNorm1d], ids=["dropout", "batchnorm"])
def test_the_devices_random_stream_and_buffers_are_rolled_back(
    device: torch.device, middle: Any
) -> None:
    samples, width = scale(device)
    model = wide(device, middle if isinstance(middle, nn.Module) else middle(width))
    batch = batch_on(device, samples)
    start = {key: value.clone() for key, value in model.state_dict().items()}

    def stream() -> Tensor:
        return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()

    with Room(device, model) as room:
        forward, _ = needs(room, model, batch)
        model.load_state_dict(start)
        torch.manual_seed(5)
        room.allow(int(0.8 * forward))
        result = elastic(model, micro_batch_size=samples).backward(
            lambda piece: loss_of(model, piece), batch
        )
        assert result.ooms
        found, after = grads(model), stream()
        buffers = [buffer.clone() for buffer in model.buffers()]
        room.allow(PLENTY)
        model.load_state_dict(start)
        torch.manual_seed(5)
        reference = by_hand(model, batch, result.partition)
        assert torch.equal(after, stream())
        assert all(
            torch.equal(mine, other) for mine, other in zip(buffers, model.buffers(), strict=True)
        )
        assert error_of(found, reference) <= 1e-12


def test_sizes_grow_back_when_a_neighbour_leaves(device: torch.device) -> None:
    samples = scale(device)[0]
    model, batch = wide(device), batch_on(device, samples)
    policy = Policy(patience=1, jitter=0.0, cooldown=0.1, min_gain=0.0)

    def loss_fn(piece: Pair) -> Tensor:
        return loss_of(model, piece)

    with Room(device, model) as room, Neighbour(room) as neighbour:
        _, step = needs(room, model, batch)
        reference = whole_gradient(model, lambda twin: loss_of(twin, batch))
        neighbour.come(left=int(0.4 * step))
        with ElasticMBS(
            model, policy=replace(policy, seed=0), memory=MemoryOptions(monitor_interval=0.02)
        ) as mbs:

            def size() -> int:
                model.zero_grad()
                found = mbs.backward(loss_fn, batch).micro_batch_size
                assert off_by(model, reference) <= 1e-12
                time.sleep(0.03)  # time for a reading
                return found

            beside = [size() for _ in range(8)]
            assert max(beside) < samples
            neighbour.go()
            deadline = time.monotonic() + 20
            while (alone := size()) < samples and time.monotonic() < deadline:
                pass
            assert alone == samples


def test_the_batch_runs_whole_again_when_just_enough_memory_is_back(
    device: torch.device,
) -> None:
    # On CUDA the cache holds the failed attempt's memory. It must not count as the need of smaller
    # pieces.
    model, batch = wide(device), batch_on(device, scale(device)[0])
    policy = Policy(patience=1, jitter=0.0, cooldown=0.0, min_gain=0.0)
    with Room(device, model) as room:
        _, step = needs(room, model, batch)
        with ElasticMBS(
            model,
            policy=replace(policy, seed=0),
            memory=MemoryOptions(monitor_interval=0, wait_for_memory=0),
        ) as mbs:

            def pieces(share: float, calls: int) -> int:
                model.zero_grad()
                room.allow(int(share * step))
                for _ in range(calls):
                    partition = mbs.backward(lambda piece: loss_of(model, piece), batch).partition
                    model.zero_grad()
                return len(partition)

            assert pieces(1.4, 6) == 1
            assert pieces(0.9, 6) > 1
            assert pieces(1.4, 10) == 1


# ---------------------------------------------------------------------- half precision


def test_half_precision_gradients_are_summed_in_float32(device: torch.device) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 4)).to(device, torch.bfloat16)
    batch = batch_on(device, 64, dtype=torch.bfloat16)
    size, total = 4, 64
    sums: list[Tensor] = []
    for start in range(0, total, size):
        piece = (batch[0][start : start + size], batch[1][start : start + size])
        (loss_of(model, piece).float() * (size / total)).backward()
        gradients = [
            parameter.grad.float() for parameter in model.parameters() if parameter.grad is not None
        ]
        sums = gradients if not sums else [a + b for a, b in zip(sums, gradients, strict=True)]
        model.zero_grad()
    with elastic(model, micro_batch_size=size, accumulate_dtype=torch.float32) as mbs:
        mbs.backward(lambda piece: loss_of(model, piece), batch)
    for parameter, wide_sum in zip(model.parameters(), sums, strict=True):
        assert parameter.grad is not None
        assert parameter.grad.dtype is torch.bfloat16
        assert torch.equal(parameter.grad, wide_sum.bfloat16())


def test_a_scaled_step_is_the_same_after_an_oom(device: torch.device) -> None:
    samples, width = scale(device)
    half = torch.float16 if device.type == "cuda" else torch.bfloat16
    torch.manual_seed(0)
    model = Wide(width).to(device)
    start = {key: value.clone() for key, value in model.state_dict().items()}
    batch = batch_on(device, samples, dtype=torch.float32)

    def loss_fn(piece: Pair) -> Tensor:
        with torch.autocast(device.type, half):
            return loss_of(model, piece)

    def step(scaler: torch.amp.GradScaler) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        model.zero_grad()

    with Room(device, model) as room:
        loss_fn(batch).backward()
        model.zero_grad()
        need = room.need(lambda: loss_fn(batch).backward())
        model.zero_grad()
        scaler = torch.amp.GradScaler(device.type, init_scale=2.0**10)
        room.allow(int(0.6 * need))
        result = elastic(model, micro_batch_size=samples, scaler=scaler).backward(loss_fn, batch)
        assert result.ooms
        room.allow(PLENTY)
        step(scaler)
        trained = [parameter.detach().clone() for parameter in model.parameters()]
        model.load_state_dict(start)
        twin = torch.amp.GradScaler(device.type, init_scale=2.0**10)
        for begin, end in result.partition:
            twin.scale(
                loss_fn((batch[0][begin:end], batch[1][begin:end])).float()
                * ((end - begin) / samples)
            ).backward()
        step(twin)
        assert twin.get_scale() == scaler.get_scale()
        for mine, other in zip(trained, model.parameters(), strict=True):
            assert torch.allclose(mine, other, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("first", [True, False], ids=["first", "later"])
@pytest.mark.parametrize("implementation", ["foreach", "fused"])
def test_an_optimizers_step_that_does_not_fit_at_once_is_made_all_the_same(
    device: torch.device, implementation: str, first: bool
) -> None:
    # On CUDA each of 16 parameters has 16 MiB. A block of 10 MiB or more has its own segment.
    # Smaller ones share segments of 20 MiB, whose free parts would make the limit inexact.
    side = 2048 if device.type == "cuda" else 64

    def make() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = nn.Sequential(
            *(nn.Linear(side, side, bias=False, device=device) for _ in range(16))
        )
        for parameter in model.parameters():
            parameter.grad = torch.randn(side, side, device=device)
        optimizer = (
            torch.optim.AdamW(model.parameters(), fused=True)
            if implementation == "fused"
            else torch.optim.AdamW(model.parameters(), foreach=True)
        )
        if not first:
            optimizer.step()
        return model, optimizer

    reference, plain = make()
    plain.step()
    model, optimizer = make()
    events: list[Event] = []
    size = 16 * side * side * 4
    with Room(device, model) as room:
        room.track(optimizer)
        # There is room for a new state, and for a quarter of the temporaries of foreach. A fused
        # step with a state needs nothing.
        room.allow(
            (2 * size if first else 0) + (size // 4 if implementation == "foreach" else size // 16)
        )
        mbs = ElasticMBS(model, on_event=events.append, memory=MemoryOptions(monitor_interval=0))
        mbs.optimizer_step(optimizer)
        mbs.close()
    tries = [event.action for event in events if isinstance(event, OptimizerOutOfMemory)]
    released = ["with the caches let go of"]
    # A fused step with a new state makes copies, which do not fit. With an old state it makes none.
    assert tries == (
        [*released, "one parameter at a time"]
        if implementation != "fused"
        else released
        if first
        else []
    )
    assert all(
        torch.equal(a, b) for a, b in zip(model.parameters(), reference.parameters(), strict=True)
    )


HAS_LAST_RESORT = "use_on_oom" in inspect.signature(torch.cuda.MemPool.__init__).parameters


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_LAST_RESORT, reason="this torch has no MemPool(use_on_oom=True)")
def test_the_figures_of_a_pool_of_last_resort_are_known(
    gpu: torch.device, record_property: Any
) -> None:
    # The figures decide if `optimizer_step` is to use such a pool: its gain, and the memory that
    # stays lost afterwards.
    command = [sys.executable, "-m", "tests.helpers.last_resort"]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    record_property("last_resort", ran.stdout)
    assert ran.returncode == 0, ran.stderr
    without, _ = map(json.loads, ran.stdout.splitlines())
    assert not without["made"]


@pytest.mark.gpu
def test_after_a_driver_level_error_the_device_is_known_to_be_sound_or_not(
    gpu: torch.device, record_property: Any
) -> None:
    ballast: list[Tensor] = []
    with contextlib.suppress(torch.OutOfMemoryError):
        for size in (2**30, 2**25, 2**20):
            with contextlib.suppress(torch.OutOfMemoryError):
                while True:
                    ballast.append(torch.empty(size, dtype=torch.uint8, device=gpu))
    seen: list[str] = []
    works: dict[str, Callable[[], object]] = {
        "cublas": lambda: torch.ones(8, 8, device=gpu) @ torch.ones(8, 8, device=gpu),
        "cusolver": lambda: torch.linalg.svd(torch.ones(64, 64, device=gpu)),
        "cufft": lambda: torch.fft.fft(torch.ones(2**12, device=gpu)),
        "conv": lambda: functional.conv2d(
            torch.ones(1, 8, 32, 32, device=gpu), torch.ones(8, 8, 3, 3, device=gpu)
        ),
    }
    for name, work in works.items():
        try:
            with warnings.catch_warnings():
                # libraries may warn when they give up a plan or a solver and try the next
                warnings.simplefilter("ignore")
                work()
                torch.cuda.synchronize(gpu)
        except Exception as error:
            verdict = oom.classify(error)
            seen.append(
                f"{name}: {type(error).__name__}: {str(error).splitlines()[0]} -> "
                f"{verdict.kind.name if verdict else None}"
            )
            assert verdict is not None, seen[-1]
            oom.clear_traceback(error)
    ballast.clear()
    oom.release(devices=[gpu], thorough=True)
    answer = oom.probe(gpu)
    record_property("driver_errors", "; ".join(seen))
    record_property("probe", str(answer))
    assert answer is None
    assert torch.equal(
        torch.ones(4, 4, device=gpu) @ torch.ones(4, 4, device=gpu),
        torch.full((4, 4), 4.0, device=gpu),
    )


@pytest.mark.gpu
def test_the_demo_on_cuda_survives_and_is_equal() -> None:
    # The batch is the default one. A small one would fit whole, as the limit leaves room for the
    # workspaces of cuBLAS.
    command = [
        sys.executable,
        "-m",
        "elastic_mbs",
        "demo",
        "--device",
        "cuda",
        "--steps",
        "8",
        "--no-page",
    ]
    # The deadline is against hanging. On a simulated device one core computes everything.
    ran = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=1800, check=False
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "EQUAL within rounding" in ran.stdout
