"""The worlds: the limit strikes where it is told to, recovery is exact, the co-tenant comes and goes, and nothing is left behind."""

from __future__ import annotations

import functools
import importlib
import os
import sys
import types
import weakref
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

from elastic_mbs import ElasticMBS, MemoryBudget, MemoryOptions, UsageError
from elastic_mbs.memory import Headroom, MemorySensor, NoSensor, Unavailable, UsageMeter
from stress.limits import (
    KINDS,
    BudgetLimit,
    Child,
    Confined,
    CudaLimit,
    Fence,
    ProcessLimit,
    ShimLimit,
    available,
    checkerboard,
    cuda,
    in_child,
    open_limit,
    run_child,
    run_children,
)
from stress.limits import fence as fences
from stress.limits import rlimit as rlimit_module
from stress.limits import shim as shim_module
from stress.limits.neighbour import Neighbour
from tests.helpers import limit_jobs

MEBI = 1 << 20
LONG = 120.0
HOST = [
    pytest.param(kind, marks=pytest.mark.skipif(available(kind) is not None, reason=str(available(kind)))) for kind in ("budget", "shim", "rlimit")
]
needs_shim = pytest.mark.skipif(available("shim") is not None, reason=str(available("shim")))
needs_rlimit = pytest.mark.skipif(available("rlimit") is not None, reason=str(available("rlimit")))


# ---------------------------------------------------------------------- what every kind promises, in the real thing


@functools.cache
def told(kind: str) -> dict[str, dict[str, Any]]:
    """What one training run in a world of this kind says, by topic."""
    messages: list[dict[str, Any]] = []
    if in_child(kind):
        messages += run_child(kind, limit_jobs.train, {"kind": kind}, deadline=LONG)
    else:
        limit_jobs.train(messages.append, kind)
    return {message.pop("what"): message for message in messages}


def slack(kind: str) -> int:
    """What a process limit counts beside tensors; and a few numbers that a runtime remembers, which are tensors."""
    return 2 * MEBI if kind == "rlimit" else 256


@pytest.mark.parametrize("phase", ["forward", "backward"])
@pytest.mark.parametrize("kind", HOST)
def test_the_limit_strikes_and_the_gradient_is_exact(kind: str, phase: str) -> None:
    run = told(kind)[phase]
    assert phase in run["phases"]
    assert run["worst"] <= 1e-12
    assert run["pieces"] > 1
    assert ("virtual device" if kind == "budget" else "DefaultCPUAllocator: can't allocate memory") in run["message"]
    assert run["failures"] == (None if kind == "rlimit" else len(run["phases"]))


@pytest.mark.parametrize("kind", HOST)
def test_nothing_is_held_after_recovery(kind: str) -> None:
    assert told(kind)["forward"]["left"] <= slack(kind)
    assert told(kind)["backward"]["left"] <= slack(kind)


@pytest.mark.parametrize("kind", HOST)
def test_the_co_tenant_takes_memory_and_gives_it_back(kind: str) -> None:
    beside, refused, alone = (told(kind)[what] for what in ("beside", "refused", "alone"))
    assert beside["others"] == 10 * MEBI
    assert abs(beside["live"] - 8 * MEBI) <= slack(kind)
    assert abs(beside["free"] - 2 * MEBI) <= slack(kind)
    assert beside["capacity"] == beside["total"] - 10 * MEBI
    assert beside["source"] == kind
    assert refused["kind"] == ("allocator" if kind == "budget" else "host")
    assert alone["others"] == 0


@pytest.mark.parametrize("kind", HOST)
def test_the_peak_of_a_step_is_not_lost_when_the_runtime_resets_its_own(kind: str) -> None:
    alone = told(kind)["alone"]
    assert abs(alone["peak"] - 14 * MEBI) <= slack(kind)
    assert abs(alone["of the runtime"] - 8 * MEBI) <= slack(kind)


@pytest.mark.parametrize("kind", HOST)
def test_no_limit_is_left_at_the_end(kind: str) -> None:
    assert told(kind)["lifted"]["bytes"] == 64 * MEBI


@needs_shim
def test_two_elastic_processes_share_one_device_and_the_parents_limit() -> None:
    with Fence.create(40 * MEBI) as fence:
        pair = [Child("shim", limit_jobs.share, {"size": 64 * MEBI, "hold": LONG}, deadline=LONG, fence=fence) for _ in range(2)]
        found = dict(islice(run_children(pair), 2))  # both hold what they have got
    assert sorted(found) == [0, 1]
    assert {message["kind"] for message in found.values()} == {"host"}
    assert 38 * MEBI <= sum(message["held"] for message in found.values()) <= 40 * MEBI
    assert any(message["others"] > 0 for message in found.values())
    assert all(message["held"] + message["others"] <= 40 * MEBI for message in found.values())


@needs_shim
def test_a_killed_process_gives_its_memory_to_the_other() -> None:
    with Fence.create(40 * MEBI) as fence, Child("shim", limit_jobs.share, {"size": 30 * MEBI, "hold": LONG}, deadline=LONG, fence=fence) as first:
        assert next(iter(first))["held"] == 30 * MEBI
        assert 30 * MEBI <= fence.live() <= 31 * MEBI
        first.kill()
        with Child("shim", limit_jobs.share, {"size": 38 * MEBI, "hold": 0.0}, deadline=LONG, fence=fence) as other:
            (second,) = other
        assert second["held"] == 38 * MEBI
        assert second["others"] == 0


@needs_rlimit
def test_the_process_limit_can_be_moved_from_outside() -> None:
    with Child("rlimit", limit_jobs.be_limited_from_outside, deadline=LONG) as child:
        messages = iter(child)
        start = next(messages)
        rlimit_module.move(start["pid"], start["base"])
        end = next(messages)
    assert end["kind"] == "host"
    assert end["others"] == 1 << 40, "all of it"


# ---------------------------------------------------------------------- the kinds


def test_each_kind_tells_why_it_cannot_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    assert KINDS == ("budget", "shim", "rlimit", "cuda")
    assert available("budget") is None
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "CUDA device" in str(available("cuda"))
    with pytest.raises(UsageError, match="needs a CUDA device"):
        open_limit("cuda")
    with pytest.raises(UsageError, match="needs a CUDA device"):
        CudaLimit()
    monkeypatch.setenv("CC", "no-such-compiler")
    assert "no-such-compiler" in str(available("shim"))
    monkeypatch.setattr(rlimit_module, "resource", None)
    assert "needs Linux" in str(available("rlimit"))
    with pytest.raises(UsageError, match="needs Linux"):
        ProcessLimit()


def test_a_libc_without_mallopt_has_no_process_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rlimit_module, "sys", types.SimpleNamespace(platform="linux"))
    monkeypatch.setattr(rlimit_module, "ctypes", types.SimpleNamespace(CDLL=lambda _: object()))
    monkeypatch.setattr(rlimit_module, "resource", object())
    assert "needs glibc" in str(available("rlimit"))


@pytest.mark.parametrize("ask", [available, in_child, open_limit], ids=["available", "in_child", "open_limit"])
def test_an_unknown_kind_is_refused_with_those_there_are(ask: Any) -> None:
    with pytest.raises(UsageError, match="no memory limit 'moon'; one of budget, shim, rlimit, cuda"):
        ask("moon")


def test_the_shim_needs_a_process_started_under_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(fences.VARIABLE, raising=False)
    with pytest.raises(UsageError, match="run_child"):
        ShimLimit()


def test_a_module_that_is_missing_on_windows_is_not_needed_to_import(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "resource", None)
    try:
        assert importlib.reload(rlimit_module).resource is None
    finally:
        monkeypatch.undo()
        importlib.reload(rlimit_module)


# ---------------------------------------------------------------------- budget


def test_the_budget_is_what_the_co_tenant_leaves_and_never_negative() -> None:
    with BudgetLimit() as world:
        world.resize("64MiB")
        world.occupy(24 * MEBI)
        assert world.budget.limit == 40 * MEBI
        world.occupy(80 * MEBI)
        assert world.budget.limit == 0
        reading = world.sensor.read()
        assert isinstance(reading, Headroom)
        assert (reading.free, reading.total, reading.held_by_others) == (0, 64 * MEBI, 64 * MEBI)
        world.resize(None)
        assert isinstance(world.sensor, MemorySensor)
        assert isinstance(world.sensor, UsageMeter)
        unlimited = world.sensor.read()
        assert isinstance(unlimited, Headroom)
        assert unlimited.free > 1 << 28, "the machine's memory"
    assert MemoryBudget.current() is None


def test_a_budget_given_is_used() -> None:
    budget = MemoryBudget("1GiB")
    with BudgetLimit(budget) as world:
        kept = torch.zeros(MEBI, dtype=torch.uint8)
        assert world.live() == budget.live == MEBI == len(kept)


@pytest.mark.parametrize("size", ["much", -1])
def test_a_size_that_is_none_is_refused(size: Any) -> None:
    with BudgetLimit() as world, pytest.raises(UsageError, match=str(size)):
        world.resize(size)


def test_in_a_fragmented_budget_single_large_blocks_fail_while_memory_is_free() -> None:
    with BudgetLimit() as world:
        before = torch.zeros(2 * MEBI, dtype=torch.uint8)
        world.resize(64 * MEBI)
        world.fragment(MEBI)
        small = [torch.zeros(MEBI, dtype=torch.uint8) for _ in range(8)]
        before.add_(1)[MEBI:].view(2, -1)  # what is there already may be used
        assert torch.eye(8).to_sparse().sum() == 8, "what has no storage is let through"
        with pytest.raises(torch.OutOfMemoryError, match=r"Tried to allocate 1\.00 MiB, in blocks of 1\.00 MiB"):
            torch.zeros(MEBI + 1, dtype=torch.uint8)
        assert world.failures() == 1
        assert world.live() == 10 * MEBI, "what was refused is not counted"
        world.fragment(None)
        assert len(torch.zeros(2 * MEBI, dtype=torch.uint8)) == 2 * MEBI
    assert len(small) == 8


def test_a_world_that_cannot_be_read_gives_no_reading_and_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: BudgetLimit) -> int:
        raise OSError("no such file")

    monkeypatch.setattr(BudgetLimit, "live", refuse)
    reading = BudgetLimit().sensor.read()
    assert isinstance(reading, Unavailable)
    assert "'budget' cannot be read: no such file" in reading.reason


def test_a_sensor_that_is_a_meter_takes_the_meters_place() -> None:
    # resident memory, which a CPU's own meter reads, cannot be held against the capacity of such a world
    model = torch.nn.Linear(4, 4)
    with BudgetLimit() as world, ElasticMBS(model, memory=MemoryOptions(sensor=world.sensor, monitor_interval=0)) as mbs:
        assert mbs._parts.meter is world.sensor
    with BudgetLimit() as world, ElasticMBS(model, memory=MemoryOptions(sensor=NoSensor(""), monitor_interval=0)) as mbs:
        assert mbs._parts.meter is world.budget


def test_the_peak_of_an_interval_begins_with_what_is_live() -> None:
    with BudgetLimit() as world:
        kept = torch.zeros(3 * MEBI, dtype=torch.uint8)
        torch.zeros(5 * MEBI, dtype=torch.uint8)
        resets = world.sensor.resets
        world.reset_peak()
        assert world.sensor.resets == resets + 1, "a runtime's own interval is void now"
        assert world.peak() == 3 * MEBI == len(kept)


def test_leaving_by_an_error_lifts_the_limit_as_well() -> None:
    world = BudgetLimit()
    with pytest.raises(KeyError), world:
        world.resize(1)
        world.fragment(1)
        world.occupy(1)
        raise KeyError
    assert MemoryBudget.current() is None
    assert world.budget.limit >= 1 << 60
    assert world.others() == 0


# ---------------------------------------------------------------------- shim, without the library


@pytest.fixture
def shim(monkeypatch: pytest.MonkeyPatch) -> Iterator[ShimLimit]:
    """The world as a process under the fence sees it; what the library would write there is for a test to write."""
    with Fence.create() as fence:
        monkeypatch.setenv(fences.VARIABLE, str(fence.path))
        monkeypatch.setattr(shim_module, "under", lambda path: True)
        yield ShimLimit()


def write_slot(fence: Fence, place: int, pid: int, live: int, peak: int = 0, failures: int = 0) -> None:
    first = 16 + 8 * place
    for offset, value in enumerate((pid, fences.start_time(pid), live, peak, failures, 1)):
        fence._words[first + offset] = value


@needs_shim
def test_the_shim_tells_its_own_bytes_from_those_of_others(shim: ShimLimit) -> None:
    write_slot(shim.fence, 0, os.getppid(), 30 * MEBI)
    assert (shim.live(), shim.peak(), shim.failures(), shim.others()) == (0, 0, 0, 30 * MEBI), "before the first block"
    write_slot(shim.fence, 1, os.getpid(), 5 * MEBI, 7 * MEBI, 3)
    assert (shim.live(), shim.peak(), shim.failures(), shim.others()) == (5 * MEBI, 7 * MEBI, 3, 30 * MEBI)
    assert isinstance(unlimited := shim.sensor.read(), Headroom)
    assert unlimited.free > 1 << 28
    onednn = torch.backends.mkldnn.enabled
    with shim:
        assert not torch.backends.mkldnn.enabled, "it crashes where it gets no memory"
        shim.resize(50 * MEBI)
        shim.fragment(2 * MEBI)
        assert (shim.fence.budget, shim.fence.largest) == (50 * MEBI, 2 * MEBI)
        assert isinstance(reading := shim.sensor.read(), Headroom)
        assert (reading.free, reading.total, reading.held_by_others) == (15 * MEBI, 50 * MEBI, 30 * MEBI)
        shim.reset_peak()  # not under the library: nothing happens
    assert (shim.fence.budget, shim.fence.largest) == (fences.UNLIMITED, fences.UNLIMITED)
    assert torch.backends.mkldnn.enabled == onednn


@needs_shim
def test_a_shared_device_keeps_its_capacity_when_one_leaves(shim: ShimLimit) -> None:
    with ShimLimit(shared=True, onednn=True) as world:
        assert torch.backends.mkldnn.enabled
        world.fence.budget = 10 * MEBI
        assert world.total() == 10 * MEBI
    assert shim.fence.budget == 10 * MEBI


@needs_shim
def test_the_co_tenants_process_is_there_when_it_is_needed_and_gone_at_the_end(shim: ShimLimit) -> None:
    with shim:
        shim.occupy(0)
        assert shim._neighbour is None
        shim.occupy(MEBI)
        neighbour = shim._neighbour
        assert isinstance(neighbour, Neighbour)
        shim.occupy(2 * MEBI)
        assert shim._neighbour is neighbour
    assert fences.start_time(neighbour.pid) == -1


# ---------------------------------------------------------------------- process limit, as a variable


class Limits:
    """RLIMIT_DATA of this process, without its force."""

    RLIMIT_DATA = 2
    RLIM_INFINITY = -1

    def __init__(self) -> None:
        self.soft = self.hard = -1

    def getrlimit(self, which: int) -> tuple[int, int]:
        return self.soft, self.hard

    def setrlimit(self, which: int, limits: tuple[int, int]) -> None:
        self.soft, self.hard = limits

    def prlimit(self, pid: int, which: int, limits: tuple[int, int] | None = None) -> tuple[int, int]:
        before = self.soft, self.hard
        if limits is not None:
            assert pid == os.getpid()
            self.soft, self.hard = limits
        return before


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> Limits:
    fake = Limits()
    monkeypatch.setattr(rlimit_module, "resource", fake)
    monkeypatch.setattr(rlimit_module, "trouble", lambda: None)
    monkeypatch.setattr(rlimit_module, "ctypes", types.SimpleNamespace(CDLL=lambda _: types.SimpleNamespace(mallopt=lambda *_: 1)))
    return fake


@needs_rlimit
def test_the_limit_counts_from_what_was_mapped_when_the_world_was_opened(limits: Limits) -> None:
    onednn = torch.backends.mkldnn.enabled
    world = ProcessLimit()
    with world:
        assert not torch.backends.mkldnn.enabled
        assert world.base > 50 * MEBI
        assert limits.soft == -1, "no limit yet"
        world.resize(30 * MEBI)
        assert limits.soft == world.base + 30 * MEBI
        world.occupy(10 * MEBI)
        assert limits.soft == world.base + 20 * MEBI
        assert world.others() == 10 * MEBI
        rlimit_module.move(os.getpid(), world.base + 5 * MEBI)
        assert world.others() == 25 * MEBI, "somebody else has moved it"
        world.occupy(90 * MEBI)
        assert limits.soft == world.base, "what is there stays"
        world.occupy(0)
        sizes: list[tuple[int, int]] = []
        world.warm(lambda size: sizes.append((size, limits.soft)), [4, 1, 4, 2])
        assert sizes == [(1, -1), (2, -1), (4, -1)]
        assert limits.soft == world.base + 30 * MEBI
        with pytest.raises(UsageError, match="'rlimit' knows no fragmentation"):
            world.fragment(5)
        world.resize(None)
        assert limits.soft == -1
        assert world.others() == 0
        world.resize(1)
    assert (limits.soft, limits.hard) == (-1, -1)
    assert torch.backends.mkldnn.enabled == onednn


@needs_rlimit
def test_the_users_hard_limit_is_kept(limits: Limits) -> None:
    limits.hard = limits.soft = 1000 * MEBI
    with ProcessLimit(onednn=True) as world:
        assert torch.backends.mkldnn.enabled
        world.resize(1 << 50)
        assert limits.soft == 1000 * MEBI
    assert (limits.soft, limits.hard) == (1000 * MEBI, 1000 * MEBI)


@needs_rlimit
def test_where_the_kernel_resets_no_mark_the_peak_is_that_of_the_run(limits: Limits, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError

    with ProcessLimit() as world:
        monkeypatch.setattr(Path, "write_text", refuse)
        world.reset_peak()
        assert world.peak() >= world.live() >= 0


# ---------------------------------------------------------------------- CUDA, in numbers


class Card:
    """A device of CUDA as far as torch is asked."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, free: int = 1000 * MEBI) -> None:
        self.total, self.free, self.ours, self.fraction, self.ooms, self.told = 1000 * MEBI, free, 0, 1.0, 2, [0]
        for name, answer in {
            "is_available": lambda: True,
            "init": lambda: None,
            "current_device": lambda: 0,
            "mem_get_info": lambda device: (self.free - self.ours - self.told[-1], self.total),
            "empty_cache": lambda: None,
            "memory_reserved": lambda device: self.ours,
            "memory_allocated": lambda device: self.ours,
            "max_memory_allocated": lambda device: self.ours + MEBI,
            "reset_peak_memory_stats": lambda device: None,
            "memory_stats": lambda device: {"num_ooms": self.ooms},
            "set_per_process_memory_fraction": lambda fraction, device: setattr(self, "fraction", fraction),
        }.items():
            monkeypatch.setattr(torch.cuda, name, answer)
        monkeypatch.setattr(Neighbour, "on_cuda", classmethod(lambda cls, index: self))

    def __enter__(self) -> Card:
        return self

    def __exit__(self, *error: object) -> None:
        self.told.append(-1)

    def hold(self, size: int) -> int:
        self.told.append(size)
        return size


def test_on_cuda_a_capacity_is_a_fraction_and_the_co_tenant_fills_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    card = Card(monkeypatch)
    world = CudaLimit()
    assert world.device == torch.device("cuda", 0)
    with world:
        world.resize(400 * MEBI)
        assert card.fraction == 0.4
        assert card.told == [0], "no process yet"
        card.ours = 100 * MEBI
        world.occupy(200 * MEBI)
        assert card.told[-1] == 800 * MEBI, "200 MiB are left to us, of which we have 100 already"
        assert world.others() == 200 * MEBI
        world.resize(500 * MEBI)
        assert card.told[-1] == 700 * MEBI
        world.occupy(0)
        assert card.told[-1] == 0
        assert (world.live(), world.peak()) == (100 * MEBI, 101 * MEBI)
        world.reset_peak()
        card.ooms += 3
        assert world.failures() == 3
        world.fragment(None)
        with pytest.raises(UsageError, match=r"2\.0 GiB is more than cuda:0 has"):
            world.resize("2GiB")
        world.resize(None)
        assert card.fraction == 1.0
        world.occupy(300 * MEBI)
        world.resize("100MiB")
    assert card.told[-1] == -1, "its process has ended"
    assert card.fraction == 1.0


class Arena:
    """One long segment of a caching allocator: first fit, and neighbours that are free become one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.size = 0
        self.taken: dict[int, int] = {}
        monkeypatch.setattr(checkerboard, "_block", lambda device, size: self.take(size))
        monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
        self.gaps = 0

    def free(self) -> list[int]:
        ends = [0, *(start + size for start, size in sorted(self.taken.items()))]
        return [start - end for start, end in zip([*sorted(self.taken), self.size], ends, strict=True) if start > end]

    def take(self, size: int) -> object:
        if size <= 2 * MEBI and self.gaps:
            self.gaps -= 1
            return type("Stray", (), {"data_ptr": lambda self: -1})()
        self.size = max(self.size, size)
        ends = [0, *(start + taken for start, taken in sorted(self.taken.items()))]
        start = next(end for end, next_ in zip(ends, [*sorted(self.taken), self.size], strict=True) if next_ - end >= size)
        self.taken[start] = size
        block = type("Block", (), {"data_ptr": lambda self: start})()
        weakref.finalize(block, self.taken.pop, start)
        return block


@pytest.mark.parametrize(("size", "largest"), [(3000 * MEBI, 250 * MEBI), (1001 * MEBI, 64 * MEBI + 5), (700 * MEBI, 1)])
def test_on_a_checkerboard_memory_is_free_but_in_no_large_block(size: int, largest: int, monkeypatch: pytest.MonkeyPatch) -> None:
    arena = Arena(monkeypatch)
    arena.gaps = 3
    board = checkerboard.Checkerboard(torch.device("cuda", 0), size, largest)
    assert max(arena.free()) <= max(checkerboard.LEAST, largest)
    assert sum(arena.free()) > 0.85 * size
    del board
    assert arena.free() == [arena.size], "what it held is whole again"


def test_on_cuda_a_fragmented_world_breaks_up_what_its_capacity_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    card = Card(monkeypatch)
    built: list[tuple[int, int]] = []
    monkeypatch.setattr(cuda, "Checkerboard", lambda device, size, largest: built.append((size, largest)))
    with CudaLimit() as world:
        world.fragment(100 * MEBI)
        assert built == [], "without a limit there is nothing to break up"
        card.ours = 30 * MEBI
        world.resize(600 * MEBI)
        assert built == [(520 * MEBI, 100 * MEBI)], "less what is held already, and room for segments of small tensors"
        world.resize(60 * MEBI)
        assert len(built) == 1, "too narrow for one hole"
        monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: [{"device": 0, "is_expandable": False}, {"device": 1, "is_expandable": True}])
        assert not world.expandable()
        monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: [{"device": 0, "is_expandable": True}])
        assert world.expandable()
        world.fragment(None)
        world.resize(600 * MEBI)
        assert len(built) == 1


def test_two_who_share_a_gpu_have_what_the_third_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    card = Card(monkeypatch, free=900 * MEBI)
    with Confined() as device:
        device.leave(300 * MEBI)
        assert card.told[-1] == 600 * MEBI
        with CudaLimit(shared=True) as world:
            assert world.others() == 0
            card.ours = 100 * MEBI
            assert world.others() == 0, "what we have taken ourselves"
            card.free -= 50 * MEBI
            assert world.others() == 50 * MEBI
        device.leave(None)
        assert card.told[-1] == 0
    assert card.told[-1] == -1
    with pytest.raises(UsageError, match="are in use"), CudaLimit():
        card.ours = 400 * MEBI
        CudaLimit().__enter__()


def test_a_lower_limit_strikes_what_is_cached_too(monkeypatch: pytest.MonkeyPatch) -> None:
    card, emptied = Card(monkeypatch), []
    with CudaLimit() as world:
        monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(card.fraction))
        world.resize(500 * MEBI)
    assert emptied[0] == 1.0, "torch asks the fraction only when it takes more: what is cached would go on as before"


def test_a_gpu_that_others_use_is_not_filled(monkeypatch: pytest.MonkeyPatch) -> None:
    Card(monkeypatch, free=700 * MEBI)
    with pytest.raises(UsageError, match=r"300\.0 MiB of cuda:1 are in use"):
        CudaLimit("cuda:1").__enter__()


@pytest.mark.gpu
def test_on_a_gpu_memory_is_broken_up_unless_segments_are_expandable() -> None:  # cuda-only
    def had(size: int) -> bool:
        try:
            torch.empty(size, dtype=torch.uint8, device=world.device)
        except torch.OutOfMemoryError:
            return False
        return True

    with CudaLimit() as world:
        torch.zeros(1, device=world.device)
        world.fragment(256 * MEBI)
        world.resize("4GiB")
        assert torch.cuda.memory_reserved(world.device) - world.live() > 3 << 30 or world.expandable()
        assert had(200 * MEBI)
        assert had(1 << 30) is world.expandable()
        world.fragment(None)
        assert had(3 << 30)


@pytest.mark.gpu
def test_on_a_gpu_the_limit_strikes_and_the_co_tenant_comes_and_goes() -> None:  # cuda-only
    with CudaLimit() as world:
        torch.zeros(1, device=world.device)
        world.resize("1GiB")
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(2 << 30, dtype=torch.uint8, device=world.device)
        assert world.failures() == 1
        world.occupy(512 * MEBI)
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(768 * MEBI, dtype=torch.uint8, device=world.device)
        world.occupy(0)
        kept = torch.empty(768 * MEBI, dtype=torch.uint8, device=world.device)
        assert world.live() >= kept.numel()
        del kept
    assert torch.empty(2 << 30, dtype=torch.uint8, device=world.device).numel() == 2 << 30
