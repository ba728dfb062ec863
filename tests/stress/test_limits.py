"""The memory limits.

A limit strikes where told, recovery is exact, the co-tenant comes and goes, and nothing is left
behind.
"""

import functools
import sys
import types
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

from elastic_mbs import ElasticMBS, MemoryOptions, UsageError
from elastic_mbs.memory import Headroom, NoSensor, Unavailable
from stress.limits import (
    KINDS,
    BudgetLimit,
    Child,
    Fence,
    ProcessLimit,
    ShimLimit,
    available,
    in_child,
    open_limit,
    run_child,
    run_children,
)
from stress.limits import fence as fences
from stress.limits import rlimit as rlimit_module
from tests.helpers import limit_jobs
from tests.helpers.rlimit import Limit

MEBI = 1 << 20
LONG = 120.0
HOST = [
    pytest.param(
        kind, marks=pytest.mark.skipif(available(kind) is not None, reason=str(available(kind)))
    )
    for kind in ("budget", "shim", "rlimit")
]
needs_shim = pytest.mark.skipif(available("shim") is not None, reason=str(available("shim")))
needs_rlimit = pytest.mark.skipif(available("rlimit") is not None, reason=str(available("rlimit")))


@functools.cache
def told(kind: str) -> dict[str, dict[str, Any]]:
    """Return the messages of one training run under a limit of this kind, by topic."""
    messages: list[dict[str, Any]] = []
    if in_child(kind):
        messages += run_child(kind, limit_jobs.train, {"kind": kind}, deadline=LONG)
    else:
        limit_jobs.train(messages.append, kind)
    return {message.pop("what"): message for message in messages}


def slack(kind: str) -> int:
    """Return the bytes that a limit counts beside tensors.

    A process limit counts others, and a runtime remembers a few numbers, which are tensors.
    """
    return 4 * MEBI if kind == "rlimit" else 256


@pytest.mark.parametrize("phase", ["forward", "backward"])
@pytest.mark.parametrize("kind", HOST)
def test_the_limit_strikes_the_gradient_is_exact_and_nothing_is_held(kind: str, phase: str) -> None:
    run = told(kind)[phase]
    assert phase in run["phases"]
    assert run["worst"] <= 1e-12
    assert run["pieces"] > 1
    assert (
        "virtual device" if kind == "budget" else "DefaultCPUAllocator: can't allocate memory"
    ) in run["message"]
    assert run["failures"] == (None if kind == "rlimit" else len(run["phases"]))
    assert run["left"] <= slack(kind)


@pytest.mark.parametrize("kind", HOST)
def test_the_co_tenant_takes_memory_and_gives_it_back_and_no_limit_is_left(kind: str) -> None:
    beside, refused, alone = (told(kind)[what] for what in ("beside", "refused", "alone"))
    assert beside["others"] == 10 * MEBI
    assert abs(beside["live"] - 8 * MEBI) <= slack(kind)
    assert abs(beside["free"] - 2 * MEBI) <= slack(kind)
    assert beside["capacity"] == beside["total"] - 10 * MEBI
    assert beside["source"] == kind
    assert refused["kind"] == ("allocator" if kind == "budget" else "host")
    assert alone["others"] == 0
    assert abs(alone["peak"] - 14 * MEBI) <= slack(kind), "not lost when the runtime resets its own"
    assert abs(alone["of the runtime"] - 8 * MEBI) <= slack(kind)
    assert told(kind)["lifted"]["bytes"] == 64 * MEBI
    assert told(kind)["needs"]["onednn"] is (kind == "budget"), "it crashes where it gets no memory"


@needs_shim
def test_two_elastic_processes_share_one_device_and_the_parents_limit() -> None:
    with Fence.create(40 * MEBI) as fence:
        pair = [
            Child(
                "shim",
                limit_jobs.share,
                {"size": 64 * MEBI, "hold": LONG},
                deadline=LONG,
                fence=fence,
            )
            for _ in range(2)
        ]
        found = dict(islice(run_children(pair), 2))  # both hold what they have got
        assert fence.budget == 40 * MEBI, "it stays as it is when one leaves"
    assert sorted(found) == [0, 1]
    assert {message["kind"] for message in found.values()} == {"host"}
    assert 38 * MEBI <= sum(message["held"] for message in found.values()) <= 40 * MEBI
    assert any(message["others"] > 0 for message in found.values())
    assert all(message["held"] + message["others"] <= 40 * MEBI for message in found.values())


def test_each_kind_tells_why_it_cannot_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    assert KINDS == ("budget", "shim", "rlimit", "cuda", "simcuda")
    assert available("budget") is None
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UsageError, match="needs a CUDA device"):
        open_limit("cuda")
    monkeypatch.setenv("CC", "no-such-compiler")
    assert "no-such-compiler" in str(available("shim"))
    if sys.platform == "linux":
        with monkeypatch.context() as patched:
            patched.setattr(rlimit_module, "ctypes", types.SimpleNamespace(CDLL=lambda _: object()))
            assert "needs glibc" in str(available("rlimit")), "mallopt is missing"
    monkeypatch.setattr(rlimit_module, "resource", None)
    with pytest.raises(UsageError, match="needs Linux"):
        open_limit("rlimit")
    monkeypatch.delenv(fences.VARIABLE, raising=False)
    with pytest.raises(UsageError, match="run_child"):
        ShimLimit()


def test_the_budget_is_what_the_co_tenant_leaves_and_never_negative() -> None:
    with BudgetLimit() as memory:
        memory.resize(64 * MEBI)
        memory.occupy(24 * MEBI)
        assert memory.budget.limit == 40 * MEBI
        memory.occupy(80 * MEBI)
        assert memory.budget.limit == 0
        reading = memory.sensor.read()
        assert isinstance(reading, Headroom)
        assert (reading.free, reading.total, reading.held_by_others) == (0, 64 * MEBI, 64 * MEBI)
        memory.resize(None)
        unlimited = memory.sensor.read()
        assert isinstance(unlimited, Headroom)
        assert unlimited.free > 1 << 28, "the machine's memory"
        kept = torch.zeros(3 * MEBI, dtype=torch.uint8)
        torch.zeros(5 * MEBI, dtype=torch.uint8)
        resets = memory.sensor.resets
        memory.reset_peak()
        assert memory.sensor.resets == resets + 1, "a runtime's own interval is void now"
        assert memory.peak() == memory.live() == 3 * MEBI == len(kept)


def test_large_blocks_fail_in_a_fragmented_budget() -> None:
    with BudgetLimit() as memory:
        before = torch.zeros(2 * MEBI, dtype=torch.uint8)
        memory.resize(64 * MEBI)
        memory.fragment(MEBI)
        small = [torch.zeros(MEBI, dtype=torch.uint8) for _ in range(8)]
        before.add_(1)[MEBI:].view(2, -1)  # existing memory may be used
        assert torch.eye(8).to_sparse().sum() == 8, "what has no storage is let through"
        with pytest.raises(
            torch.OutOfMemoryError, match=r"Tried to allocate 1\.0 MiB, in blocks of 1\.0 MiB"
        ):
            torch.zeros(MEBI + 1, dtype=torch.uint8)
        assert memory.failures() == 1
        assert memory.live() == 10 * MEBI, "what was refused is not counted"
        memory.fragment(None)
        assert len(torch.zeros(2 * MEBI, dtype=torch.uint8)) == 2 * MEBI
    assert len(small) == 8


def test_a_limit_that_cannot_be_read_gives_no_reading_and_no_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(self: BudgetLimit) -> int:
        raise OSError("no such file")

    monkeypatch.setattr(BudgetLimit, "live", refuse)
    reading = BudgetLimit().sensor.read()
    assert isinstance(reading, Unavailable)
    assert "'budget' cannot be read: no such file" in reading.reason


def test_a_sensor_that_is_a_meter_takes_the_meters_place() -> None:
    # resident memory, which a CPU's own meter reads, cannot be held against the capacity of such a
    # memory
    model = torch.nn.Linear(4, 4)
    with (
        BudgetLimit() as memory,
        ElasticMBS(model, memory=MemoryOptions(sensor=memory.sensor, monitor_interval=0)) as mbs,
    ):
        assert mbs._resources.meter is memory.sensor
    with (
        BudgetLimit() as memory,
        ElasticMBS(model, memory=MemoryOptions(sensor=NoSensor(""), monitor_interval=0)) as mbs,
    ):
        assert mbs._resources.meter is memory.budget


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> Limit:
    fake = Limit()
    monkeypatch.setattr(rlimit_module, "resource", fake)
    monkeypatch.setattr(rlimit_module, "trouble", lambda: None)
    monkeypatch.setattr(
        rlimit_module,
        "ctypes",
        types.SimpleNamespace(CDLL=lambda _: types.SimpleNamespace(mallopt=lambda *_: 1)),
    )
    return fake


@needs_rlimit
def test_the_limit_counts_from_what_was_mapped_and_keeps_to_the_users_own(
    limits: Limit, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError

    with ProcessLimit() as memory:
        assert limits.soft == -1, "no limit yet"
        memory.resize(30 * MEBI)
        memory.occupy(10 * MEBI)
        assert limits.soft == memory.base + 20 * MEBI
        memory.occupy(90 * MEBI)
        assert limits.soft == memory.base, "what is there stays"
        sizes: list[tuple[int, int]] = []
        memory.warm(lambda size: sizes.append((size, limits.soft)), [4, 1, 4, 2])
        assert sizes == [(1, -1), (2, -1), (4, -1)]
        with pytest.raises(UsageError, match="'rlimit' knows no fragmentation"):
            memory.fragment(5)
    assert (limits.soft, limits.hard) == (-1, -1)
    limits.hard = limits.soft = 1000 * MEBI
    monkeypatch.setattr(Path, "write_text", refuse)
    with ProcessLimit() as memory:
        memory.resize(1 << 50)
        assert limits.soft == 1000 * MEBI
        memory.reset_peak()
        assert memory.peak() >= memory.live() >= 0, (
            "where the kernel resets no mark, the peak is that of the run"
        )
    assert (limits.soft, limits.hard) == (1000 * MEBI, 1000 * MEBI)


@needs_rlimit
def test_the_process_limit_counts_a_block_that_would_fit_a_hole_of_the_heap() -> None:
    (found,) = run_child("rlimit", limit_jobs.take_beside_holes, {"mebi": 16}, deadline=LONG)
    assert found["kind"] == "host"
    assert found["taken"] <= 8
