"""The guard that makes the allocator fail before the kernel kills: its limit, its ends, and real failures of the allocator in subprocesses."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import textwrap
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from elastic_mbs import ElasticMBS, Event, MemoryBudget, OutOfMemory, UsageError, Warned, elastic_step
from elastic_mbs.memory import HostGuard, host_guard
from tests.helpers.cgroups import ROOT_OF, write_group, write_membership
from tests.helpers.steps import FailOn, cross_entropy, elastic, mlp, off_by, pairs, through, whole_gradient

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_DATA covers private memory on Linux only")

MEBI = 1 << 20
ROOT = Path(__file__).resolve().parents[1]


class Limit:
    """RLIMIT_DATA as a variable; nothing of this process is limited.

    Attributes:
        soft, hard: the limit.
        refuse: raised by the next attempts to set it.
        enforced: whether mappings beyond it fail.
    """

    RLIMIT_DATA = 2
    RLIM_INFINITY = -1

    def __init__(self) -> None:
        self.soft = self.hard = -1
        self.refuse: Exception | None = None
        self.enforced = True
        self.seen: list[int] = []

    def getrlimit(self, which: int) -> tuple[int, int]:
        return self.soft, self.hard

    def setrlimit(self, which: int, limits: tuple[int, int]) -> None:
        if self.refuse is not None:
            raise self.refuse
        self.soft, self.hard = limits
        self.seen.append(self.soft)

    def mmap(self, *_: int) -> Any:
        if self.enforced:
            raise OSError(errno.ENOMEM, "Cannot allocate memory")
        return types.SimpleNamespace(close=lambda: None)


@pytest.fixture
def limit(monkeypatch: pytest.MonkeyPatch) -> Iterator[Limit]:
    fake = Limit()
    monkeypatch.setattr(host_guard, "resource", fake)
    monkeypatch.setattr("mmap.mmap", fake.mmap)
    monkeypatch.setattr(host_guard, "_process", host_guard._ProcessLimit())
    monkeypatch.setattr(host_guard._OwnMemory, "anonymous", lambda _: 100 * MEBI)
    monkeypatch.setattr(host_guard._OwnMemory, "mapped", lambda _: 150 * MEBI)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: types.SimpleNamespace(available=900 * MEBI, total=2000 * MEBI))
    yield fake
    assert not host_guard._process._wanted, "a guard was left up"


def guard_of(root: Path, margin: str | None = "10MiB", **options: Any) -> HostGuard:
    return HostGuard(margin, root=root, **options)


def container(root: Path, limit: int | str, used: int, cache: int = 0) -> None:
    write_group(root / ROOT_OF[2], "/", 2, limit, used, inactive=cache)
    write_membership(root, {2: "/"})


# what the limit is


@pytest.mark.parametrize(
    ("group", "expected"),
    [
        pytest.param(("max", 0, 0), 900 + 100 - 10, id="no container: what the machine has left"),
        pytest.param((500 * MEBI, 300 * MEBI, 0), 200 + 100 - 10, id="what others leave of the container"),
        pytest.param((500 * MEBI, 300 * MEBI, 50 * MEBI), 250 + 100 - 10, id="page cache is not others"),
        pytest.param((1500 * MEBI, 300 * MEBI, 0), 900 + 100 - 10, id="the machine has less than the container"),
        pytest.param((120 * MEBI, 50 * MEBI, 0), 120 - 10, id="never above the container's limit"),
        pytest.param((105 * MEBI, 105 * MEBI, 0), 100 - 10, id="a full container: nothing new"),
    ],
)
def test_the_limit_is_what_others_leave_less_the_margin(tmp_path: Path, limit: Limit, group: tuple[int | str, int, int], expected: int) -> None:
    container(tmp_path, *group)
    guard = guard_of(tmp_path)
    guard.renew()
    assert guard.limit == limit.soft == expected * MEBI
    guard.lift()
    assert (limit.soft, limit.hard) == (-1, -1)


def test_the_limit_is_absolute_and_not_on_top_of_what_is_mapped(tmp_path: Path, limit: Limit, monkeypatch: pytest.MonkeyPatch) -> None:
    # memory that the heap has handed back to the kernel stays mapped and can be touched again without asking
    container(tmp_path, 500 * MEBI, 300 * MEBI)
    guard = guard_of(tmp_path)
    guard.renew()
    before = limit.soft
    monkeypatch.setattr(host_guard._OwnMemory, "mapped", lambda _: 250 * MEBI)
    guard.renew()
    assert limit.soft == before
    guard.lift()


@pytest.mark.parametrize(("total", "margin"), [(1000 * MEBI, 32 * MEBI), (128 * 1024 * MEBI, 1024 * MEBI)])
def test_the_default_margin_grows_with_the_limit(tmp_path: Path, limit: Limit, monkeypatch: pytest.MonkeyPatch, total: int, margin: int) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: types.SimpleNamespace(available=total - 100 * MEBI, total=total))
    guard = guard_of(tmp_path, None)
    guard.renew()
    assert guard.limit == total - margin
    guard.lift()


def test_a_margin_above_the_limit_leaves_nothing_and_does_not_go_below(tmp_path: Path, limit: Limit) -> None:
    container(tmp_path, 50 * MEBI, 50 * MEBI)
    guard = guard_of(tmp_path, "1GiB", warn=[].append)
    guard.renew()
    assert limit.soft == 0
    guard.lift()


@pytest.mark.parametrize(("soft", "hard"), [(200 * MEBI, -1), (200 * MEBI, 400 * MEBI), (-1, 200 * MEBI)])
def test_the_users_own_limit_is_an_upper_bound_and_comes_back(tmp_path: Path, limit: Limit, soft: int, hard: int) -> None:
    limit.soft, limit.hard = soft, hard
    guard = guard_of(tmp_path)
    guard.renew()
    assert (limit.soft, limit.hard) == (200 * MEBI, hard)
    guard.lift()
    assert (limit.soft, limit.hard) == (soft if soft != -1 else 200 * MEBI, hard)


def test_a_limit_that_the_user_sets_meanwhile_stays(tmp_path: Path, limit: Limit) -> None:
    guard = guard_of(tmp_path)
    guard.renew()
    limit.soft = 300 * MEBI
    guard.lift()
    assert limit.soft == 300 * MEBI
    guard.renew()
    limit.soft = 250 * MEBI
    guard.renew()
    assert limit.soft == 250 * MEBI, "it is the upper bound from now on"
    guard.lift()
    assert limit.soft == 250 * MEBI


def test_guards_nest_and_the_lowest_counts(tmp_path: Path, limit: Limit) -> None:
    outer, inner = guard_of(tmp_path, "10MiB"), guard_of(tmp_path, "50MiB")
    outer.renew()
    inner.renew()
    assert limit.soft == (1000 - 50) * MEBI
    outer.renew()
    assert limit.soft == (1000 - 50) * MEBI
    inner.lift()
    assert limit.soft == (1000 - 10) * MEBI
    inner.lift()
    outer.restore()
    assert limit.soft == -1
    outer.restore()
    assert limit.soft == -1


moves = st.one_of(
    st.tuples(st.just("renew"), st.integers(0, 2), st.integers(1, 9)),
    st.tuples(st.just("lift"), st.integers(0, 2), st.just(0)),
    st.tuples(st.just("user"), st.just(0), st.integers(1, 9)),
)


@given(st.lists(moves, max_size=20))
def test_any_order_of_guards_and_of_the_user_keeps_to_the_lowest_and_ends_with_the_users(steps: list[tuple[str, int, int]]) -> None:
    fake, process = Limit(), host_guard._ProcessLimit()
    fake.hard = 1 << 40
    guards: list[Any] = [object(), object(), object()]
    wanted: dict[int, int] = {}
    user = -1
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host_guard, "resource", fake)
        for kind, which, value in steps:
            if kind == "renew":
                process.lower(guards[which], value * MEBI)
                wanted[which] = value * MEBI
                assert fake.soft == min(*wanted.values(), *([user] if user != -1 else []), fake.hard)
            elif kind == "lift":
                process.release(guards[which])
                wanted.pop(which, None)
            else:
                user = fake.soft = value * MEBI + len(wanted) + 1  # one that no guard has asked for
        for guard in guards:
            process.release(guard)
    assert fake.soft == (user if user != -1 or not any(kind == "renew" for kind, _, _ in steps) else fake.hard)
    assert fake.hard == 1 << 40


def test_the_limit_comes_back_where_python_has_no_memory_to_look(tmp_path: Path, limit: Limit, monkeypatch: pytest.MonkeyPatch) -> None:
    limit.soft = 700 * MEBI
    guard = guard_of(tmp_path)
    guard.renew()
    container(tmp_path, 300 * MEBI, 100 * MEBI)
    guard.renew()
    assert limit.soft == 290 * MEBI
    no_memory = FailOn(1, error=MemoryError)
    monkeypatch.setattr(limit, "getrlimit", lambda _: no_memory())
    guard.lift()
    assert limit.soft == 700 * MEBI


def test_a_guard_that_was_restored_can_be_used_again(tmp_path: Path, limit: Limit) -> None:
    container(tmp_path, 500 * MEBI, 300 * MEBI)
    guard = guard_of(tmp_path)
    for _ in range(2):
        guard.renew()
        assert limit.soft == 290 * MEBI
        guard.restore()
        assert limit.soft == -1
        assert not guard._cgroup._files


def test_a_child_begins_with_the_users_limit(tmp_path: Path, limit: Limit) -> None:
    # what runs in the child after a fork; another test forks
    guard = guard_of(tmp_path)
    guard.renew()
    process = host_guard._process
    process._lock.acquire()
    lock = process._lock
    process._after_fork()
    assert limit.soft == -1
    assert process._lock is not lock
    guard.renew()
    assert limit.soft == 990 * MEBI
    guard.lift()
    process._after_fork()
    assert limit.soft == -1


def test_the_own_memory_is_read_from_this_process() -> None:
    own = host_guard._OwnMemory()
    before = own.anonymous()
    pile = bytearray(32 * MEBI)
    pile[::4096] = b"x" * len(pile[::4096])
    assert 24 * MEBI < own.anonymous() - before < 200 * MEBI
    assert own.mapped() >= own.anonymous() > 0
    own._pid = 0  # as in a forked child
    own.anonymous()
    assert own._pid == os.getpid()
    own.close()
    own.close()
    assert own._files == []


# what it says


def test_memory_that_others_took_is_said_once(tmp_path: Path, limit: Limit) -> None:
    said: list[str] = []
    container(tmp_path, 500 * MEBI, 460 * MEBI)
    guard = guard_of(tmp_path, warn=said.append)
    guard.renew()
    guard.renew()
    guard.lift()
    assert len(said) == 1
    assert "leaves 130.0 MiB to this process, which has mapped 150.0 MiB" in said[0]


def test_a_heap_that_is_mapped_beyond_the_limit_gives_back_what_lies_free_in_it(
    tmp_path: Path, limit: Limit, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    container(tmp_path, 500 * MEBI, 460 * MEBI)
    guard = guard_of(tmp_path, warn=said.append)
    trims = []

    def trim(keep: int) -> int:
        trims.append(keep)
        monkeypatch.setattr(host_guard._OwnMemory, "mapped", lambda _: 120 * MEBI)
        return 1

    guard._trim = trim
    guard.renew()
    guard.renew()
    guard.lift()
    assert (trims, said) == ([0], [])


def test_a_library_that_cannot_trim_is_no_error(tmp_path: Path, limit: Limit) -> None:
    container(tmp_path, 500 * MEBI, 460 * MEBI)
    guard = guard_of(tmp_path, warn=[].append)
    guard._trim = None
    guard.renew()
    guard.lift()


@pytest.mark.parametrize(
    ("model", "enabled", "warns"),
    [
        pytest.param(nn.Conv2d(1, 1, 1), True, True, id="convolution"),
        pytest.param(nn.ConvTranspose1d(1, 1, 1), True, True, id="transposed"),
        pytest.param(nn.Conv2d(1, 1, 1), False, False, id="without onednn"),
        pytest.param(nn.Conv2d(1, 1, 1).double(), True, False, id="float64, which oneDNN leaves to torch"),
        pytest.param(nn.Linear(1, 1), True, False, id="linear"),
    ],
)
def test_a_model_with_convolutions_is_warned_of_onednn(
    limit: Limit, monkeypatch: pytest.MonkeyPatch, model: nn.Module, enabled: bool, warns: bool
) -> None:
    events: list[Event] = []
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", enabled)
    elastic(model, host_guard=True, on_event=events.append)
    said = [event.message for event in events if isinstance(event, Warned)]
    assert len(said) == warns
    assert all("torch.backends.mkldnn.enabled = False" in text for text in said)


@pytest.mark.parametrize("error", [ValueError("not allowed to raise maximum limit"), PermissionError(1, "Operation not permitted")])
def test_a_refused_limit_turns_the_guard_off_with_one_warning(tmp_path: Path, limit: Limit, error: Exception) -> None:
    said: list[str] = []
    guard = guard_of(tmp_path, warn=said.append)
    guard.renew()
    guard.lift()
    limit.refuse = error
    guard.renew()
    guard.lift()
    limit.refuse = None
    guard.renew()
    assert limit.soft == -1
    assert len(said) == 1
    assert type(error).__name__ in said[0]
    assert guard.trouble == said[0]
    assert not guard.explains("could not create a primitive")


def test_a_limit_that_cannot_be_put_back_is_said_and_ends_no_step(tmp_path: Path, limit: Limit) -> None:
    said: list[str] = []
    guard = guard_of(tmp_path, warn=said.append)
    guard.renew()
    limit.refuse = PermissionError(1, "Operation not permitted")
    guard.lift()
    guard.renew()
    assert len(said) == 1


def test_a_system_that_refuses_from_the_start_trains_without_a_guard(tmp_path: Path, limit: Limit) -> None:
    limit.refuse = PermissionError(1, "Operation not permitted")
    said: list[str] = []
    guard = guard_of(tmp_path, warn=said.append)
    guard.renew()
    guard.lift()
    assert (len(said), limit.soft, limit.seen) == (1, -1, [])


@pytest.mark.parametrize("error", [OSError("no /proc"), psutil.AccessDenied()])
def test_a_reading_that_fails_never_raises_into_a_step(tmp_path: Path, limit: Limit, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    said: list[str] = []
    guard = guard_of(tmp_path, warn=said.append)
    guard.renew()
    monkeypatch.setattr(psutil, "virtual_memory", FailOn(1, error=lambda: error))
    guard.renew()
    assert (len(said), limit.soft) == (1, -1)


def test_an_ambiguous_error_counts_only_near_the_limit(tmp_path: Path, limit: Limit, monkeypatch: pytest.MonkeyPatch) -> None:
    guard = guard_of(tmp_path)
    assert not guard.explains("could not create a primitive"), "never up"
    guard.renew()
    guard.lift()
    for mapped, near in ((700, False), (750, True), (1200, True)):
        monkeypatch.setattr(host_guard._OwnMemory, "mapped", lambda _, mapped=mapped: mapped * MEBI)
        assert guard.explains("could not create a primitive") is near
        assert guard.explains("could not execute a primitive") is near
        assert not guard.explains("could not create a primitive descriptor for a convolution")
        assert not guard.explains("mat1 and mat2 shapes cannot be multiplied")
    monkeypatch.setattr(host_guard._OwnMemory, "mapped", FailOn(1, error=lambda: OSError("gone")))
    assert not guard.explains("could not create a primitive")


# where it cannot work


@pytest.mark.parametrize("system", ["darwin", "win32"])
def test_a_system_without_such_a_limit_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, system: str) -> None:
    monkeypatch.setattr(sys, "platform", system)
    with pytest.raises(UsageError, match=f"needs Linux.*this is {system}: leave it off"):
        guard_of(tmp_path)


def test_a_python_without_the_resource_module_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_guard, "resource", None)
    with pytest.raises(UsageError, match="needs Linux"):
        guard_of(tmp_path)


def test_a_kernel_that_does_not_enforce_the_limit_is_refused_by_name(tmp_path: Path, limit: Limit) -> None:
    limit.enforced = False
    with pytest.raises(UsageError, match="maps memory beyond it"):
        guard_of(tmp_path)
    assert limit.soft == -1


@pytest.mark.parametrize("value", [None, 1, 0, 64 * MEBI, 2.0])
def test_what_is_no_switch_and_no_size_is_refused(value: Any) -> None:
    with pytest.raises(UsageError, match=r"neither True nor False; a margin is a string"):
        ElasticMBS(mlp(), host_guard=value)


def test_a_margin_that_is_no_size_is_refused() -> None:
    with pytest.raises(UsageError, match="cannot read 'plenty' as a number of bytes"):
        ElasticMBS(mlp(), host_guard="plenty")


def test_a_model_that_is_not_on_the_cpu_is_refused_by_name() -> None:
    with pytest.raises(UsageError, match="train on the CPU, and this one is on 'meta'"):
        ElasticMBS(mlp().to("meta"), host_guard=True)


def test_a_model_that_moves_away_is_refused_at_the_next_call(limit: Limit) -> None:
    model = mlp()
    mbs = elastic(model, host_guard=True)
    mbs.backward(cross_entropy(model), pairs())
    model.to("meta")
    mbs._parts.inventory.refresh()  # new parameters there; on CUDA they stay the same objects
    with pytest.raises(UsageError, match="train on the CPU"):
        mbs.backward(cross_entropy(model), pairs())


# in the engine


def test_without_the_switch_there_is_no_guard(limit: Limit) -> None:
    for mbs in (elastic(mlp()), elastic(mlp(), host_guard=False), elastic(mlp(), host_guard=True, enabled=False)):
        assert mbs._parts.guard is None
    assert limit.seen == []


@pytest.mark.parametrize("door", [1, 3])
def test_the_limit_is_up_in_forward_and_backward_and_down_everywhere_else(limit: Limit, door: int) -> None:
    model = mlp()
    softs: dict[str, list[int]] = {"forward": [], "backward": [], "event": []}

    def loss_fn(batch: Any) -> Any:
        softs["forward"].append(limit.soft)
        if len(softs["forward"]) == 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB.")
        loss = cross_entropy(model)(batch)
        loss.register_hook(lambda _: softs["backward"].append(limit.soft))
        return loss

    def on_event(event: Event) -> None:
        if isinstance(event, OutOfMemory):
            softs["event"].append(limit.soft)

    mbs = elastic(model, micro_batch_size=8, host_guard="10MiB", on_event=on_event)
    batch = pairs()
    wanted = whole_gradient(model, lambda twin: cross_entropy(twin)(batch))
    through(door, mbs, loss_fn, batch)
    assert off_by(model, wanted) <= 1e-12
    assert softs == {"forward": [990 * MEBI] * 3, "backward": [990 * MEBI] * 2, "event": [-1]}
    assert limit.soft == -1


def test_evaluation_is_guarded_too_also_inside_a_step(limit: Limit) -> None:
    model, other = mlp(), mlp(seed=5)
    inner = elastic(other, micro_batch_size=8, host_guard="60MiB")
    seen: list[int] = []

    def loss_fn(batch: Any) -> Any:
        inner.eval(forward, batch)
        seen.append(limit.soft)
        return cross_entropy(model)(batch)

    def forward(part: Any) -> Any:
        seen.append(limit.soft)
        return other(part[0])

    elastic(model, micro_batch_size=8, host_guard="10MiB").backward(loss_fn, pairs())
    assert seen == [940 * MEBI, 990 * MEBI]
    assert limit.soft == -1


@pytest.mark.parametrize("error", [ValueError("mine"), KeyboardInterrupt(), MemoryError()])
def test_the_limit_comes_back_whatever_ends_the_call(limit: Limit, error: BaseException) -> None:
    def loss_fn(batch: Any) -> Any:
        raise error

    mbs = elastic(mlp(), host_guard=True)
    with pytest.raises(BaseException) as caught:
        mbs.backward(loss_fn, pairs())
    assert not isinstance(caught.value, AssertionError)
    assert limit.soft == -1


def test_an_interrupt_between_the_lines_of_the_engine_leaves_no_limit(limit: Limit, monkeypatch: pytest.MonkeyPatch) -> None:
    model = mlp()
    mbs = elastic(model, host_guard=True)
    guard = mbs._parts.guard
    assert guard is not None
    real = guard.renew

    def renew_and_be_interrupted() -> None:
        real()
        raise KeyboardInterrupt

    monkeypatch.setattr(guard, "renew", renew_and_be_interrupted)
    with pytest.raises(KeyboardInterrupt):
        mbs.backward(cross_entropy(model), pairs())
    assert limit.soft == -1


def test_closing_the_runtime_restores_the_limit(limit: Limit) -> None:
    model = mlp()
    with elastic(model, host_guard=True) as mbs:
        for micro in mbs.micro_batches(pairs(), own_graph=False):  # its hooks would stay, as this block is never left
            micro.__enter__()
            assert limit.soft != -1
            break
        mbs.close()
        assert limit.soft == -1
        guard = mbs._parts.guard
        assert guard is not None
        assert not guard._own._files


def test_the_decorator_takes_the_switch(limit: Limit) -> None:
    model = mlp()
    step = elastic_step(model, host_guard=True, monitor_interval=0)(cross_entropy(model))
    step(pairs())
    assert limit.seen[-1] == -1
    assert len(limit.seen) > 2


def test_a_refusal_is_one_event(limit: Limit) -> None:
    limit.refuse = PermissionError(1, "Operation not permitted")
    events: list[Event] = []
    model = mlp()
    mbs = elastic(model, host_guard=True, on_event=events.append)
    for _ in range(3):
        mbs.backward(cross_entropy(model), pairs())
    warned = [event for event in events if isinstance(event, Warned)]
    assert [(event.topic, "PermissionError" in event.message) for event in warned] == [("host_guard", True)]


def test_a_budget_with_no_room_for_the_thread_pool_does_not_end_the_step(limit: Limit) -> None:
    model = mlp()
    with MemoryBudget(2**40, track=model) as budget:
        guard = guard_of(Path("/"))
        budget.limit = 0
        guard.renew()
        guard.lift()
        budget.limit = 2**40


@pytest.mark.parametrize("filled", [False, True])
def test_an_error_of_onednn_near_the_limit_is_out_of_memory_as_often_as_it_comes(limit: Limit, monkeypatch: pytest.MonkeyPatch, filled: bool) -> None:
    model, batch = mlp(), pairs()
    wanted = whole_gradient(model, lambda twin: cross_entropy(twin)(batch))
    fail = FailOn(1, 2, 3, error=lambda: RuntimeError("could not create a primitive"))
    monkeypatch.setattr(host_guard._OwnMemory, "mapped", lambda _: 950 * MEBI)
    events: list[Event] = []

    def loss_fn(part: Any) -> Any:
        fail()
        return cross_entropy(model)(part)

    if filled:
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
    elastic(model, micro_batch_size=8, host_guard=True, on_event=events.append).backward(loss_fn, batch)
    assert off_by(model, wanted) <= 1e-12
    assert [event.kind for event in events if isinstance(event, OutOfMemory)] == ["host"] * 3
    assert not [event for event in events if isinstance(event, Warned)]


def test_an_error_of_onednn_far_from_the_limit_is_tried_once_and_then_raised(limit: Limit) -> None:
    model = mlp()
    fail = FailOn(*range(1, 100), error=lambda: RuntimeError("could not create a primitive"))

    def loss_fn(part: Any) -> Any:
        fail()
        return cross_entropy(model)(part)

    with pytest.raises(RuntimeError, match="could not create a primitive"):
        elastic(model, micro_batch_size=8, host_guard=True).backward(loss_fn, pairs())
    assert fail.count == 2


@pytest.mark.parametrize("error", [MemoryError, lambda: RuntimeError("std::bad_alloc")])
def test_a_heap_without_memory_in_backward_replays_the_batch_because_a_commit_may_be_unnoted(error: Callable[[], Exception]) -> None:
    model, batch = mlp(), pairs()
    wanted = whole_gradient(model, lambda twin: cross_entropy(twin)(batch))
    events: list[Event] = []
    mbs = elastic(model, micro_batch_size=4, on_event=events.append)
    mbs.backward(cross_entropy(model), batch)
    model.zero_grad()
    fail = FailOn(2, error=error)
    leaf = next(model.parameters())
    next(iter(mbs._parts.traits.values()))[1].counted = False  # so that hooks tell
    mbs._parts.commits.listen()
    mbs._parts.commits._hooks[id(leaf)].remove()  # the note of this leaf's commit is what there is no memory for
    leaf.register_post_accumulate_grad_hook(lambda _: fail())
    mbs.backward(cross_entropy(model), batch)
    assert off_by(model, wanted) <= 1e-12
    assert [event.mode for event in events if isinstance(event, OutOfMemory)] == ["step"]


# real limits

PREPARE = """
    import collections, ctypes, os, random, resource, sys, threading
    import torch
    from torch import nn
    from torch.nn import functional
    from elastic_mbs import ElasticMBS, MicroBatchFloorError, OutOfMemory, UsageError
    from elastic_mbs.memory import CgroupMemory, HostGuard, NoSensor, host_guard
    torch.set_num_threads(1)
    MEBI = 1 << 20
    own = host_guard._OwnMemory()

    class Group:  # a container with others in it, without the container
        others = 50 * MEBI
        limit = 1 << 50
        def read(self):
            used = self.others + own.anonymous()
            return CgroupMemory(2, "/", self.limit, used, 0, max(0, self.limit - used), "memory.max")
        def leave(self, room):  # bytes that may be mapped beside what is mapped now, and the margin
            self.limit = own.mapped() + self.others + 24 * MEBI + room
        def close(self):
            pass
"""


# what a guard has imported before its first piece, so that rooms are measured after it
IMPORT = "torch.autograd.backward(torch.zeros((), requires_grad=True).clone(), torch.ones(()))"


def run_limited(code: str, timeout: float = 120, *, fresh: bool = False) -> str:
    """Runs a script in a process of its own, with this repository's package; a fresh one has imported nothing beside it."""
    script = textwrap.dedent(PREPARE) + ("" if fresh else IMPORT) + "\n" + textwrap.dedent(code)
    environment = {**os.environ, "PYTHONPATH": os.fspath(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=timeout, env=environment)
    assert done.returncode == 0, f"exit {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def test_dozens_of_real_failures_of_the_allocator_are_recovered_exactly() -> None:
    # every tensor of 64 KiB and more is a mapping of its own, so that what is mapped is what is in use
    out = run_limited("""
        ctypes.CDLL("libc.so.6").mallopt(-3, 65536)
        random_rooms = random.Random(7)
        torch.manual_seed(0)
        models = {
            "convolutions": (
                nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.Tanh(), nn.Conv2d(16, 4, 3, padding=1), nn.AdaptiveAvgPool2d(1), nn.Flatten()),
                torch.randn(16, 3, 24, 24, dtype=torch.float64),
                (3, 10),
            ),
            "layers": (
                nn.Sequential(nn.Linear(64, 512), nn.Tanh(), nn.Dropout(0.0), nn.Linear(512, 256), nn.Tanh(), nn.Linear(256, 4)),
                torch.randn(512, 64, dtype=torch.float64),
                (4, 8),
            ),
        }
        before = resource.getrlimit(resource.RLIMIT_DATA)
        phases = collections.Counter()
        for model, x, rooms in models.values():
            model.double()
            y = torch.randint(0, 4, (len(x),))
            loss_fn = lambda batch: functional.cross_entropy(model(batch[0]), batch[1])
            size = len(x)
            while size:  # every size once, before there is a limit
                loss_fn((x[:size], y[:size])).backward()
                size //= 2
            model.zero_grad()
            loss_fn((x, y)).backward()
            wanted = [parameter.grad.clone() for parameter in model.parameters()]
            group = Group()
            for _ in range(15):
                mbs = ElasticMBS(model, micro_batch_size=len(x), host_guard="24MiB", sensor=NoSensor(""), monitor_interval=0, wait_for_memory=0)
                mbs._parts.guard._cgroup = group
                events = []
                mbs._parts.log._sinks = (events.append,)
                model.zero_grad()
                group.leave(random_rooms.randrange(*rooms) * MEBI)
                result = mbs.backward(loss_fn, (x, y))
                assert sum(stop - start for start, stop in result.partition) == len(x)
                for parameter, grad in zip(model.parameters(), wanted):
                    error = float((parameter.grad - grad).abs().max() / grad.abs().max())
                    assert error <= 1e-12, error
                phases.update(event.phase for event in events if isinstance(event, OutOfMemory))
                mbs.close()
                assert resource.getrlimit(resource.RLIMIT_DATA) == before
        print(phases["forward"], phases["backward"])
    """)
    forward, backward = map(int, out.split())
    assert forward >= 10
    assert backward >= 10


def test_the_allocator_fails_at_the_limit_and_not_outside_of_a_piece() -> None:
    out = run_limited("""
        guard, group = HostGuard("24MiB"), Group()
        guard._cgroup = group
        group.leave(8 * MEBI)
        guard.renew()
        try:
            torch.ones(64 * MEBI, dtype=torch.uint8)
        except RuntimeError as error:
            print("refused:", str(error)[:22])
        small = torch.ones(2 * MEBI, dtype=torch.uint8)
        guard.lift()
        torch.ones(64 * MEBI, dtype=torch.uint8)
        print("given")
    """)
    assert out.splitlines() == ["refused: [enforce fail at alloc", "given"]


def test_a_micro_batch_of_one_that_does_not_fit_ends_with_a_typed_error_and_a_usable_process() -> None:
    run_limited("""
        before = resource.getrlimit(resource.RLIMIT_DATA)
        group, model = Group(), nn.Linear(4, 4).double()
        mbs = ElasticMBS(model, host_guard="24MiB", sensor=NoSensor(""), monitor_interval=0, wait_for_memory=0)
        mbs._parts.guard._cgroup = group
        group.leave(4 * MEBI)
        big = 64 * MEBI
        loss_fn = lambda batch: (model(batch) * torch.ones(big, dtype=torch.uint8)[0]).sum()
        try:
            mbs.backward(loss_fn, torch.ones(4, 4, dtype=torch.float64))
        except MicroBatchFloorError as error:
            assert "DefaultCPUAllocator" in str(error), error
        else:
            raise AssertionError
        assert resource.getrlimit(resource.RLIMIT_DATA) == before
        big = 1
        mbs.backward(loss_fn, torch.ones(4, 4, dtype=torch.float64))
    """)


def test_a_forked_child_and_a_thread_are_held_to_what_they_should_be() -> None:
    run_limited("""
        resource.setrlimit(resource.RLIMIT_DATA, (1 << 40, resource.RLIM_INFINITY))
        guard, group = HostGuard("24MiB"), Group()
        guard._cgroup = group
        group.leave(64 * MEBI)
        guard.renew()
        low = resource.getrlimit(resource.RLIMIT_DATA)[0]
        assert low < 1 << 40
        seen = []
        thread = threading.Thread(target=lambda: seen.append(resource.getrlimit(resource.RLIMIT_DATA)[0]))
        thread.start(); thread.join()
        assert seen == [low], "the limit is the process's"
        if (child := os.fork()) == 0:
            alone = resource.getrlimit(resource.RLIMIT_DATA)[0] == 1 << 40
            guard.lift()
            group.leave(32 * MEBI)
            guard.renew()
            again = resource.getrlimit(resource.RLIMIT_DATA)[0] < low
            guard.lift()
            os._exit(0 if alone and again and resource.getrlimit(resource.RLIMIT_DATA)[0] == 1 << 40 else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert resource.getrlimit(resource.RLIMIT_DATA)[0] == low, "what the child does is its own"
        guard.restore()
        assert resource.getrlimit(resource.RLIMIT_DATA) == (1 << 40, resource.RLIM_INFINITY)
    """)


def test_threads_of_torch_are_made_before_the_first_piece() -> None:
    run_limited("""
        torch.set_num_threads(3)
        guard, group = HostGuard("24MiB"), Group()
        guard._cgroup = group
        group.leave(256 * MEBI)
        guard.renew()
        guard.lift()
        group.leave(4 * MEBI)  # not enough for the stack of one thread: libgomp would end the process
        guard.renew()
        torch.ones(1 << 18, dtype=torch.uint8).add_(1)
        guard.lift()
        assert len(os.listdir("/proc/self/task")) >= 3
    """)


def test_what_the_first_backward_imports_is_there_before_the_first_piece() -> None:
    """It imported sympy under the limit; refused memory in the middle of that, sympy stayed half imported, and every later backward failed."""
    run_limited(
        """
        guard, group = HostGuard("24MiB"), Group()
        guard._cgroup = group
        group.leave(256 * MEBI)
        guard.renew()
        guard.lift()
        group.leave(0)
        guard.renew()
        loss = torch.zeros((), requires_grad=True).clone()
        try:
            torch.autograd.backward(loss, torch.ones(()))
        finally:
            guard.lift()
        torch.autograd.backward(torch.zeros((), requires_grad=True).clone(), torch.ones(()))
    """,
        fresh=True,
    )


def test_a_user_limit_below_the_container_is_kept() -> None:
    run_limited("""
        model = nn.Linear(4, 4).double()
        limit = own.mapped() + 200 * MEBI
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
        seen = []
        def loss_fn(batch):
            seen.append(resource.getrlimit(resource.RLIMIT_DATA))
            return model(batch).sum()
        with ElasticMBS(model, host_guard=True) as mbs:
            mbs.backward(loss_fn, torch.ones(4, 4, dtype=torch.float64))
        assert set(seen) == {(limit, limit)}
        assert resource.getrlimit(resource.RLIMIT_DATA) == (limit, limit)
    """)
