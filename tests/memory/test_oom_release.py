"""Nothing of a failed attempt stays alive, caches are given back, and a device is asked whether it is still healthy."""

import gc
import logging
import sys
import weakref
from collections.abc import Iterator
from types import SimpleNamespace, TracebackType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from elastic_mbs import MemoryBudget
from elastic_mbs.memory import oom
from elastic_mbs.memory.oom import Kind, classify, clear_traceback, probe, release
from tests.helpers.oom_chains import Wrapper, caught, fail
from tests.helpers.oom_tables import CUDA_ADVICE
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
    verdict = None
    try:
        attempt(watch, wrap)
    except Exception as error:
        verdict = classify(error)
        assert watch[0]() is not None
    assert verdict is not None
    assert watch[0]() is None, "by reference counts alone"


@pytest.mark.usefixtures("no_collector")
def test_clearing_a_traceback_frees_what_a_cycle_through_a_handlers_variable_keeps() -> None:
    def wrapping() -> None:
        activations = torch.zeros(1000)
        watch.append(weakref.ref(activations))
        try:
            fail()
        except torch.OutOfMemoryError as inner:
            kept = inner  # this frame → kept → its traceback → this frame
            raise Wrapper("step failed") from kept

    def run(clear: bool) -> None:
        try:
            wrapping()
        except Wrapper as error:
            if clear:
                clear_traceback(error)

    watch: list[weakref.ref[torch.Tensor]] = []
    run(clear=False)
    assert watch[0]() is not None
    run(clear=True)
    assert watch[1]() is None


@pytest.mark.usefixtures("no_collector")
def test_clearing_a_traceback_frees_its_tensors_although_the_error_is_kept() -> None:
    watch: list[weakref.ref[torch.Tensor]] = []
    direct, context = caught(attempt, watch, False), caught(attempt, watch, True)
    wrapped = Wrapper("step failed")
    wrapped.__cause__, wrapped.__context__ = ExceptionGroup("pieces", [context, wrapped]) if isinstance(context, Exception) else None, direct
    direct.__cause__ = wrapped
    clear_traceback(wrapped)
    assert [ref() for ref in watch] == [None, None]


@pytest.mark.parametrize("alien", [False, True])
@pytest.mark.no_oom_injection
def test_branches_that_a_failed_backward_never_came_to_do_not_keep_its_activations(alien: bool) -> None:
    """Autograd leaves them in the thread's queue until its next backward: the replay's forward had to fit beside the attempt that had failed."""
    torch.manual_seed(0)
    model = nn.Linear(4, 512, bias=False).double()
    x = torch.randn(8, 4, dtype=torch.float64)
    live: list[int] = []
    failing = [True]

    def fail(grad: Tensor) -> None:
        if failing.pop() if failing else False:
            raise ValueError("mine") if alien else torch.OutOfMemoryError("CUDA out of memory. in a branch")

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


class Backend:
    """Stands for torch.cuda and its like."""

    def __init__(self, error: Exception | None = None) -> None:
        self.calls = 0
        self.error = error

    def empty_cache(self) -> None:
        self.calls += 1
        if self.error is not None:
            raise self.error


def backends(monkeypatch: pytest.MonkeyPatch, **modules: object) -> None:
    monkeypatch.setattr(torch, "get_device_module", modules.__getitem__)


DEVICES = [torch.device("cuda:0"), torch.device("cuda:1"), torch.device("cpu"), torch.device("xpu")]


def test_a_first_failure_costs_neither_a_collection_nor_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = Backend()
    backends(monkeypatch, cuda=cuda, cpu=SimpleNamespace(), xpu=cuda)
    monkeypatch.setattr(gc, "collect", lambda: pytest.fail("collected"))
    release(devices=DEVICES, thorough=False)
    assert cuda.calls == 0


def test_a_thorough_release_collects_then_empties_each_backend_once(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda, xpu = Backend(), Backend()
    backends(monkeypatch, cuda=cuda, cpu=SimpleNamespace(), xpu=xpu)
    watch: list[weakref.ref[torch.Tensor]] = []
    cycle: list[Any] = [torch.zeros(10)]
    watch.append(weakref.ref(cycle[0]))
    cycle.append(cycle)
    del cycle
    release(devices=iter(DEVICES), thorough=True)
    assert watch[0]() is None
    assert (cuda.calls, xpu.calls) == (1, 1)


def test_a_release_that_itself_fails_is_logged_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    xpu = Backend()
    backends(monkeypatch, cuda=Backend(RuntimeError("CUDA error: out of memory" + CUDA_ADVICE)), cpu=SimpleNamespace(), xpu=xpu)
    with caplog.at_level(logging.DEBUG, logger="elastic_mbs"):
        release(devices=[*DEVICES, torch.device("meta")], thorough=True)
    assert xpu.calls == 1
    assert "empty_cache on cuda: CUDA error: out of memory" in caplog.messages


def pin(monkeypatch: pytest.MonkeyPatch, error: BaseException, traceback: TracebackType | None) -> None:
    for name, value in (("last_exc", error), ("last_value", error), ("last_traceback", traceback)):
        monkeypatch.setattr(sys, name, value, raising=False)


def test_an_out_of_memory_pinned_by_a_shell_is_cleared(monkeypatch: pytest.MonkeyPatch) -> None:
    watch: list[weakref.ref[torch.Tensor]] = []
    error = caught(attempt, watch, False)
    pin(monkeypatch, error, error.__traceback__)
    release(devices=[], thorough=False)
    assert watch[0]() is not None
    release(devices=[], thorough=True)
    assert watch[0]() is None


def test_another_error_pinned_by_a_shell_is_left_to_be_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    def mistake() -> None:
        evidence = torch.zeros(3)
        watch.append(weakref.ref(evidence))
        fail("shape", ValueError)

    watch: list[weakref.ref[torch.Tensor]] = []
    error = caught(mistake)
    pin(monkeypatch, error, error.__traceback__)
    release(devices=[], thorough=True)
    assert watch[0]() is not None


# ---- probing ----


@pytest.mark.parametrize(
    ("errors", "expected"),
    [
        ([None], None),
        ([RuntimeError("CUDA error: out of memory"), None], None),
        ([torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")], None),
        ([RuntimeError("CUDA error: out of memory" + CUDA_ADVICE)] * 2, "CUDA error: out of memory"),
        (
            [RuntimeError("CUDA error: an illegal memory access was encountered" + CUDA_ADVICE)],
            "CUDA error: an illegal memory access was encountered",
        ),
        ([RuntimeError("CUDA driver error: device not ready")], "CUDA driver error: device not ready"),
        ([RuntimeError("")], "RuntimeError"),
    ],
    ids=["healthy", "one left over", "merely full", "keeps failing", "sticky", "poisoned", "silent"],
)
def test_a_probe_tells_a_poisoned_device_from_a_healthy_one(
    monkeypatch: pytest.MonkeyPatch, errors: list[Exception | None], expected: str | None
) -> None:
    pending = list(errors)

    def exercise(device: torch.device) -> None:
        assert device.type == "cuda"
        error = pending.pop(0)
        if error is not None:
            raise error

    monkeypatch.setattr(oom, "_exercise", exercise)
    assert probe(torch.device("cuda:0")) == expected
    assert pending == []


def test_the_cpu_is_always_healthy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(oom, "_exercise", lambda device: pytest.fail("exercised"))
    assert probe(torch.device("cpu")) is None


# ---- on a GPU ----


@pytest.mark.gpu
def test_a_real_device_out_of_memory_is_recognised_and_leaves_a_healthy_device() -> None:
    device = torch.device("cuda")
    size = 4 * torch.cuda.get_device_properties(device).total_memory
    with pytest.raises(torch.OutOfMemoryError) as info:
        torch.empty(size, dtype=torch.uint8, device=device)
    verdict = classify(info.value)
    assert verdict is not None
    assert verdict.kind is Kind.ALLOCATOR
    assert verdict.requested == pytest.approx(size, rel=0.01)
    assert probe(device) is None


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
