"""Release of a failed attempt, of caches, and the probe of a device's health."""

import gc
import logging
import sys
import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor, nn

from elastic_mbs import MemoryBudget
from elastic_mbs.device import Accelerator
from elastic_mbs.errors import MicroBatchFloorError
from elastic_mbs.memory import oom
from elastic_mbs.memory.oom import Kind, clear_traceback, probe, release
from tests.helpers.oom_errors import CUDA_ADVICE, Wrapper, caught, fail, judged
from tests.helpers.steps import elastic


def attempt(watch: list[weakref.ref[torch.Tensor]], wrap: bool) -> None:
    activations = torch.zeros(1000)
    watch.append(weakref.ref(activations))
    try:
        fail()
    except torch.OutOfMemoryError:
        if wrap:
            raise Wrapper("step failed")  # noqa: B904 - that it is not linked is the point
        raise


@pytest.fixture
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize("wrap", [False, True])
@pytest.mark.usefixtures("no_collector")
def test_a_verdict_keeps_nothing_of_the_failed_attempt_alive(wrap: bool) -> None:
    watch: list[weakref.ref[torch.Tensor]] = []
    try:
        attempt(watch, wrap)
    except Exception as error:
        verdict = judged(error)
        assert watch[0]() is not None
    assert verdict.kind is Kind.ALLOCATOR
    assert watch[0]() is None, "by reference counts alone"


@pytest.mark.usefixtures("no_collector")
def test_clearing_a_traceback_frees_its_tensors_although_the_error_is_kept() -> None:
    watch: list[weakref.ref[torch.Tensor]] = []
    direct, context = caught(attempt, watch, False), caught(attempt, watch, True)
    wrapped = Wrapper("step failed")
    wrapped.__cause__, wrapped.__context__ = (
        ExceptionGroup("pieces", [context, wrapped]) if isinstance(context, Exception) else None,
        direct,
    )
    direct.__cause__ = wrapped
    clear_traceback(wrapped)
    assert [ref() for ref in watch] == [None, None]


@pytest.mark.parametrize("alien", [False, True])
@pytest.mark.no_oom_injection
def test_unrun_branches_of_a_failed_backward_keep_no_activations(
    alien: bool,
) -> None:
    # Autograd leaves them in the thread's queue until its next backward: the replay's forward had
    # to fit beside the attempt that had failed.
    torch.manual_seed(0)
    model = nn.Linear(4, 512, bias=False).double()
    x = torch.randn(8, 4, dtype=torch.float64)
    live: list[int] = []
    failing = [True]

    def fail(grad: Tensor) -> None:
        if failing.pop() if failing else False:
            raise (
                ValueError("mine")
                if alien
                else torch.OutOfMemoryError("CUDA out of memory. in a branch")
            )

    def loss_fn(piece: Tensor) -> Tensor:
        live.append(budget.live)
        branches = [model(piece).exp() for _ in range(3)]
        branches[-1].register_hook(fail)
        return sum((branch.mean() for branch in branches), torch.zeros((), dtype=torch.float64))

    with MemoryBudget("1GiB", track=(model, x)) as budget:
        mbs = elastic(model, micro_batch_size=8)
        if alien:
            with pytest.raises(ValueError, match="mine"):
                mbs.backward(loss_fn, x)
            live.append(budget.live)
        else:
            assert mbs.backward(loss_fn, x).ooms == 1
    assert live[1] - live[0] < 8 * 512 * 8


@pytest.fixture
def emptied(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the backends whose cache was emptied; the XPU's fails, and the CPU has none."""
    calls: list[str] = []

    def empty(name: str) -> None:
        calls.append(name)
        if name == "xpu":
            raise RuntimeError("XPU error: out of memory" + CUDA_ADVICE)

    def module(name: str) -> SimpleNamespace:
        return (
            SimpleNamespace() if name == "cpu" else SimpleNamespace(empty_cache=lambda: empty(name))
        )

    monkeypatch.setattr(torch, "get_device_module", module)
    return calls


DEVICES = [torch.device(name) for name in ("cuda:0", "cuda:1", "cpu", "xpu", "mtia")]


def test_a_first_failure_costs_a_young_collection_only(
    monkeypatch: pytest.MonkeyPatch, emptied: list[str]
) -> None:
    monkeypatch.setattr(gc, "collect", made := Mock())
    release(devices=DEVICES, thorough=False)
    assert emptied == []
    made.assert_called_once_with(1)


def test_a_cycle_of_the_failed_attempt_is_collected_at_the_first_failure() -> None:
    gc.collect()
    cycle: list[Any] = [torch.zeros(10)]
    gone = weakref.ref(cycle[0])
    cycle.append(cycle)
    del cycle
    release(devices=[], thorough=False)
    assert gone() is None


def test_a_thorough_release_empties_each_backend_once(
    emptied: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    cycle: list[Any] = [torch.zeros(10)]
    gone = weakref.ref(cycle[0])
    cycle.append(cycle)
    del cycle
    with caplog.at_level(logging.DEBUG, logger="elastic_mbs"):
        release(devices=iter(DEVICES), thorough=True)
    assert gone() is None
    assert emptied == ["cuda", "mtia", "xpu"]
    assert "empty_cache on xpu: XPU error: out of memory" in caplog.messages


def test_of_errors_pinned_by_a_shell_only_out_of_memory_is_cleared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def mistake() -> None:
        evidence = torch.zeros(3)
        watch.append(weakref.ref(evidence))
        fail("shape", ValueError)

    watch: list[weakref.ref[torch.Tensor]] = []
    for error in (caught(mistake), caught(attempt, watch, False)):
        for name, value in (
            ("last_exc", error),
            ("last_value", error),
            ("last_traceback", error.__traceback__),
        ):
            monkeypatch.setattr(sys, name, value, raising=False)
        release(devices=[], thorough=False)
        assert None not in [ref() for ref in watch]
        release(devices=[], thorough=True)
    assert [ref() is None for ref in watch] == [False, True]


@pytest.mark.parametrize(
    ("errors", "expected"),
    [
        ([None], None),
        ([RuntimeError("CUDA error: out of memory"), None], None),
        ([torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")], None),
        (
            [RuntimeError("CUDA error: out of memory" + CUDA_ADVICE)] * 2,
            "CUDA error: out of memory",
        ),
        (
            [RuntimeError("CUDA error: an illegal memory access was encountered" + CUDA_ADVICE)],
            "CUDA error: an illegal memory access was encountered",
        ),
        (
            [RuntimeError("CUDA driver error: device not ready")],
            "CUDA driver error: device not ready",
        ),
        ([RuntimeError("")], "RuntimeError"),
    ],
    ids=[
        "healthy",
        "one left over",
        "merely full",
        "keeps failing",
        "sticky",
        "poisoned",
        "silent",
    ],
)
def test_a_probe_tells_a_poisoned_device_from_a_healthy_one(
    monkeypatch: pytest.MonkeyPatch, errors: list[Exception | None], expected: str | None
) -> None:
    pending = list(errors)

    def exercise(accelerator: Accelerator) -> None:
        assert accelerator.device.type == "cuda"
        error = pending.pop(0)
        if error is not None:
            raise error

    monkeypatch.setattr(oom, "_exercise", exercise)
    assert probe(torch.device("cuda:0")) == expected
    assert pending == []


@pytest.mark.gpu
def test_a_thorough_release_gives_the_cache_back_to_the_device() -> None:
    device = torch.device("cuda")
    kept = torch.zeros(1 << 28, dtype=torch.uint8, device=device)
    del kept
    reserved = torch.cuda.memory_reserved(device)
    release(devices=[device], thorough=False)
    assert torch.cuda.memory_reserved(device) == reserved
    release(devices=[device], thorough=True)
    assert torch.cuda.memory_reserved(device) <= reserved - (1 << 28)


def test_bookkeeping_is_not_repeated_after_an_asynchronous_error() -> None:
    runs: list[str] = []

    def operation() -> None:
        runs.append("run")
        if len(runs) == 1:
            raise RuntimeError("CUDA error: out of memory")

    with pytest.raises(
        MicroBatchFloorError, match="there is no room to compare the buffers: CUDA error"
    ):
        oom.retry("compare the buffers", operation, [])
    assert len(runs) == 1
