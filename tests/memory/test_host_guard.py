"""The guard that makes the allocator fail before the kernel kills: its limit and its warnings."""

import os
import subprocess
import sys
import textwrap
import types
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from elastic_mbs import ElasticMBS, Event, MemoryOptions, UsageError, Warned
from elastic_mbs.memory import host_guard
from tests.helpers.rlimit import (
    MEBI,
    ROOT_OF,
    Limit,
    fake_limit,
    guard_of,
    write_group,
    write_membership,
)
from tests.helpers.room import ROOT
from tests.helpers.steps import FailOn, cross_entropy, elastic, elsewhere, mlp, pairs

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="RLIMIT_DATA covers private memory on Linux only"
)

limit = pytest.fixture(fake_limit)


def container(root: Path, limit: int | str, used: int, cache: int = 0) -> None:
    write_group(root / ROOT_OF[2], "/", 2, limit, used, inactive=cache)
    write_membership(root, {2: "/"})


@pytest.mark.parametrize(
    ("group", "expected"),
    [
        pytest.param(("max", 0, 0), 900 + 100 - 10, id="no container: what the machine has left"),
        pytest.param(
            (500 * MEBI, 300 * MEBI, 0), 200 + 100 - 10, id="what others leave of the container"
        ),
        pytest.param(
            (500 * MEBI, 300 * MEBI, 50 * MEBI), 250 + 100 - 10, id="page cache is not others"
        ),
        pytest.param(
            (1500 * MEBI, 300 * MEBI, 0),
            900 + 100 - 10,
            id="the machine has less than the container",
        ),
        pytest.param((120 * MEBI, 50 * MEBI, 0), 120 - 10, id="never above the container's limit"),
        pytest.param(
            (105 * MEBI, 105 * MEBI, 0),
            100 - 10,
            id="a full container: nothing new, although more is mapped",
        ),
    ],
)
def test_the_limit_is_what_others_leave_less_the_margin(
    tmp_path: Path, limit: Limit, group: tuple[int | str, int, int], expected: int
) -> None:
    container(tmp_path, *group)
    guard = guard_of(tmp_path)
    guard.renew()
    assert guard.limit == limit.soft == expected * MEBI
    guard.lift()
    assert (limit.soft, limit.hard) == (-1, -1)


@pytest.mark.parametrize(
    ("total", "margin", "left"),
    [
        (1000 * MEBI, None, 1000 * MEBI - 32 * MEBI),
        (128 * 1024 * MEBI, None, 127 * 1024 * MEBI),
        (1000 * MEBI, "1GiB", 0),
    ],
    ids=["at least 32 MiB", "grows with the limit", "never below nothing"],
)
def test_the_margin_is_left_to_others(
    tmp_path: Path,
    limit: Limit,
    monkeypatch: pytest.MonkeyPatch,
    total: int,
    margin: str | None,
    left: int,
) -> None:
    monkeypatch.setattr(
        psutil,
        "virtual_memory",
        lambda: types.SimpleNamespace(available=total - 100 * MEBI, total=total),
    )
    guard = guard_of(tmp_path, margin, warn=[].append)
    guard.renew()
    assert guard.limit == limit.soft == left
    guard.lift()


@pytest.mark.parametrize(("soft", "hard"), [(200 * MEBI, -1), (200 * MEBI, 400 * MEBI)])
def test_the_users_own_limit_is_an_upper_bound_and_comes_back(
    tmp_path: Path, limit: Limit, soft: int, hard: int
) -> None:
    limit.soft, limit.hard = soft, hard
    guard = guard_of(tmp_path)
    guard.renew()
    assert (limit.soft, limit.hard) == (200 * MEBI, hard)
    guard.lift()
    assert (limit.soft, limit.hard) == (soft, hard)


moves = st.tuples(st.booleans(), st.integers(0, 2), st.integers(1, 9))


@given(st.integers(1, 9), st.lists(moves, max_size=20))
def test_any_order_of_guards_keeps_to_the_lowest_and_ends_with_the_users(
    user: int, steps: list[tuple[bool, int, int]]
) -> None:
    fake, process = Limit(), host_guard._ProcessLimit()
    fake.soft, fake.hard = user * MEBI, 1 << 40
    guards: list[Any] = [object(), object(), object()]
    wanted: dict[int, int] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host_guard, "resource", fake)
        for up, which, value in steps:
            if up:
                wanted[which] = value * MEBI
                process.lower(guards[which], value * MEBI)
            else:
                wanted.pop(which, None)
                process.release(guards[which])
            assert (fake.soft, fake.hard) == (
                min(user * MEBI, *wanted.values(), fake.hard),
                1 << 40,
            )


def test_the_limit_comes_back_where_python_has_no_memory_to_look(
    limit: Limit, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    limit.soft = 700 * MEBI
    container(tmp_path, 300 * MEBI, 100 * MEBI)
    guard = guard_of(tmp_path)
    guard.renew()
    assert limit.soft == 290 * MEBI
    monkeypatch.setattr(limit, "getrlimit", FailOn(1, error=MemoryError))
    guard.lift()
    assert limit.soft == 700 * MEBI


@pytest.mark.parametrize(
    "helps", [True, False, None], ids=["trimmed", "nothing to trim", "cannot trim"]
)
def test_memory_that_others_took_is_trimmed_from_the_heap_else_said_once(
    tmp_path: Path, limit: Limit, monkeypatch: pytest.MonkeyPatch, helps: bool | None
) -> None:
    said: list[str] = []
    container(tmp_path, 500 * MEBI, 460 * MEBI)
    guard = guard_of(tmp_path, warn=said.append)

    def trim(_: int) -> None:
        if helps:
            monkeypatch.setattr(host_guard, "own_memory", lambda: (100 * MEBI, 120 * MEBI))

    guard._trim = None if helps is None else trim
    guard.renew()
    guard.renew()
    guard.lift()
    assert len(said) == (not helps)
    assert helps or "leaves 130.0 MiB to this process, which has mapped 150.0 MiB" in said[0]


@pytest.mark.parametrize(
    ("model", "enabled", "warns"),
    [
        pytest.param(nn.Conv2d(1, 1, 1), True, True, id="convolution"),
        pytest.param(nn.ConvTranspose1d(1, 1, 1), True, True, id="transposed"),
        pytest.param(nn.Conv2d(1, 1, 1), False, False, id="without onednn"),
        pytest.param(
            nn.Conv2d(1, 1, 1).double(), True, False, id="float64, which oneDNN leaves to torch"
        ),
        pytest.param(nn.Linear(1, 1), True, False, id="linear"),
    ],
)
def test_a_model_with_convolutions_is_warned_of_onednn(
    limit: Limit, monkeypatch: pytest.MonkeyPatch, model: nn.Module, enabled: bool, warns: bool
) -> None:
    events: list[Event] = []
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", enabled)
    elastic(model, host_guard=True, on_event=events.append)
    said = [
        event.message
        for event in events
        if isinstance(event, Warned) and event.topic == "host_guard"
    ]
    assert len(said) == warns
    assert all("torch.backends.mkldnn.enabled = False" in text for text in said)


@pytest.mark.parametrize(
    "error",
    [
        ValueError("not allowed to raise maximum limit"),
        PermissionError(1, "Operation not permitted"),
    ],
)
@pytest.mark.parametrize("while_up", [False, True])
def test_a_refused_limit_turns_the_guard_off_with_one_warning(
    tmp_path: Path, limit: Limit, error: Exception, while_up: bool
) -> None:
    said: list[str] = []
    guard = guard_of(tmp_path, warn=said.append)
    guard.renew()
    if not while_up:
        guard.lift()
    limit.refuse = error
    guard.lift()
    guard.renew()
    guard.lift()
    limit.refuse = None
    guard.renew()
    assert limit.soft == (-1 if not while_up else 990 * MEBI), (
        "what cannot be put back ends no step"
    )
    assert len(said) == 1
    assert type(error).__name__ in said[0]
    assert guard.trouble == said[0]
    assert not guard.explains("could not create a primitive")
    limit.refuse = error
    at_once = guard_of(tmp_path, warn=said.append)
    at_once.renew()
    assert said == [at_once.trouble] * 2, (
        "one that is refused when it is made is off as well, with a warning of its own"
    )


@pytest.mark.parametrize("error", [OSError("no /proc"), psutil.AccessDenied()])
def test_a_reading_that_fails_never_raises_into_a_step(
    tmp_path: Path, limit: Limit, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    said: list[str] = []
    guard = guard_of(tmp_path, warn=said.append)
    guard.renew()
    monkeypatch.setattr(psutil, "virtual_memory", FailOn(1, error=lambda: error))
    guard.renew()
    assert (len(said), limit.soft) == (1, -1)


def test_an_ambiguous_error_counts_only_near_the_limit(
    tmp_path: Path, limit: Limit, monkeypatch: pytest.MonkeyPatch
) -> None:
    guard = guard_of(tmp_path)
    assert not guard.explains("could not create a primitive"), "never up"
    guard.renew()
    guard.lift()
    for mapped, near in ((700, False), (750, True), (1200, True)):
        monkeypatch.setattr(host_guard, "own_memory", lambda mapped=mapped: (0, mapped * MEBI))
        assert guard.explains("could not create a primitive") is near
        assert guard.explains("could not execute a primitive") is near
        assert not guard.explains("could not create a primitive descriptor for a convolution")
        assert not guard.explains("mat1 and mat2 shapes cannot be multiplied")
    monkeypatch.setattr(host_guard, "own_memory", FailOn(1, error=lambda: OSError("gone")))
    assert not guard.explains("could not create a primitive")


@pytest.mark.parametrize("system", ["darwin", "win32"])
def test_a_system_without_such_a_limit_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, system: str
) -> None:
    monkeypatch.setattr(sys, "platform", system)
    with pytest.raises(UsageError, match=f"needs Linux.*this is {system}: leave it off"):
        guard_of(tmp_path)


def test_a_kernel_that_does_not_enforce_the_limit_is_refused_by_name(
    tmp_path: Path, limit: Limit
) -> None:
    limit.enforced = False
    with pytest.raises(UsageError, match="maps memory beyond it"):
        guard_of(tmp_path)
    assert limit.soft == -1


@pytest.mark.parametrize(
    ("model", "value", "said"),
    [
        *[
            (mlp(), value, "neither True nor False; a margin is a string")
            for value in (None, 1, 0, 2.0)
        ],
        (mlp(), "plenty", "cannot read 'plenty' as a number of bytes"),
        (elsewhere(mlp()), True, "train on the CPU, and this one is on 'meta'"),
    ],
)
def test_what_is_no_switch_and_no_size_and_no_model_on_the_cpu_is_refused(
    model: nn.Module, value: Any, said: str
) -> None:
    with pytest.raises(UsageError, match=said):
        ElasticMBS(model, memory=MemoryOptions(host_guard=value))


def test_a_model_that_moves_away_is_refused_at_the_next_call(limit: Limit) -> None:
    model = mlp()
    mbs = elastic(model, host_guard=True)
    mbs.backward(cross_entropy(model), pairs())
    elsewhere(model)
    mbs._resources.model.refresh()  # new parameters there; on CUDA they stay the same objects
    with pytest.raises(UsageError, match="train on the CPU"):
        mbs.backward(cross_entropy(model), pairs())


PREPARE = """
    import collections, ctypes, os, random, resource, sys, threading
    import torch
    from torch import nn
    from torch.nn import functional
    from elastic_mbs import ElasticMBS, MemoryOptions, MicroBatchFloorError, OutOfMemory, UsageError
    from elastic_mbs.memory import CgroupMemory, HostGuard, NoSensor, host, host_guard
    torch.set_num_threads(1)
    MEBI = 1 << 20

    class Group:  # a container with others in it, without the container
        others = 50 * MEBI
        limit = 1 << 50
        def read(self):
            used = self.others + host_guard.own_memory()[0]
            left = max(0, self.limit - used)
            return CgroupMemory(2, "/", self.limit, used, 0, left, "memory.max")
        def leave(self, room):  # bytes that may be mapped beside what is mapped now, and the margin
            self.limit = host_guard.own_memory()[1] + self.others + 24 * MEBI + room

        def bind(self):
            host.cgroup_memory = lambda root: self.read()

    def guard_beside(group):
        group.bind()
        return HostGuard("24MiB")
"""


# what a guard has imported before its first piece, so that rooms are measured after it
IMPORT = "torch.autograd.backward(torch.zeros((), requires_grad=True).clone(), torch.ones(()))"


def run_limited(code: str, timeout: float = 120, *, fresh: bool = False) -> str:
    """Run a script in its own process, with this repository's package.

    A fresh one has imported nothing beside it.
    """
    script = textwrap.dedent(PREPARE) + ("" if fresh else IMPORT) + "\n" + textwrap.dedent(code)
    environment = {**os.environ, "PYTHONPATH": os.fspath(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        check=False,
        timeout=timeout,
        env=environment,
    )
    assert done.returncode == 0, f"exit {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def test_dozens_of_real_failures_of_the_allocator_are_recovered_exactly() -> None:
    # every tensor of 64 KiB and more is a mapping of its own, so that what is mapped is what is in
    # use
    out = run_limited("""
        ctypes.CDLL("libc.so.6").mallopt(-3, 65536)
        random_rooms = random.Random(7)
        torch.manual_seed(0)
        convolutions = nn.Sequential(
            nn.Conv2d(3, 16, 3, padding=1), nn.Tanh(), nn.Conv2d(16, 4, 3, padding=1),
            nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        )
        layers = nn.Sequential(
            nn.Linear(64, 512), nn.Tanh(), nn.Dropout(0.0), nn.Linear(512, 256), nn.Tanh(),
            nn.Linear(256, 4),
        )
        cases = ((convolutions, (16, 3, 24, 24), (3, 6)), (layers, (512, 64), (4, 6)))
        before = resource.getrlimit(resource.RLIMIT_DATA)
        phases = collections.Counter()
        for model, shape, rooms in cases:
            model.double()
            x, y = torch.randn(shape, dtype=torch.float64), torch.randint(0, 4, shape[:1])
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
                memory = MemoryOptions(
                    host_guard="24MiB", sensor=NoSensor(""), monitor_interval=0, wait_for_memory=0
                )
                mbs = ElasticMBS(model, micro_batch_size=len(x), memory=memory)
                group.bind()
                events = []
                mbs._resources.log._sinks = (events.append,)
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
    assert forward + backward >= 20
    assert min(forward, backward) >= 1


def test_a_forked_child_and_a_thread_are_held_to_what_they_should_be() -> None:
    run_limited("""
        resource.setrlimit(resource.RLIMIT_DATA, (1 << 40, resource.RLIM_INFINITY))
        soft = lambda: resource.getrlimit(resource.RLIMIT_DATA)[0]
        guard = guard_beside(group := Group())
        group.leave(64 * MEBI)
        guard.renew()
        low = soft()
        assert low < 1 << 40
        seen = []
        thread = threading.Thread(target=lambda: seen.append(soft()))
        thread.start(); thread.join()
        assert seen == [low], "the limit is the process's"
        if (child := os.fork()) == 0:
            alone = soft() == 1 << 40
            guard.lift()
            group.leave(32 * MEBI)
            guard.renew()
            again = soft() < low
            guard.lift()
            os._exit(0 if alone and again and soft() == 1 << 40 else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert soft() == low, "the child's limit is its own"
        guard.lift()
        assert resource.getrlimit(resource.RLIMIT_DATA) == (1 << 40, resource.RLIM_INFINITY)
    """)


def test_threads_and_imports_are_there_before_the_first_piece() -> None:
    # refused memory for the stack of a thread, libgomp ends the process; in the middle of an
    # import, sympy stayed half imported
    run_limited(
        """
        torch.set_num_threads(3)
        guard = guard_beside(group := Group())
        group.leave(256 * MEBI)
        guard.renew()
        guard.lift()
        assert len(os.listdir("/proc/self/task")) >= 3
        loss = torch.zeros((), requires_grad=True).clone()
        wide = torch.ones(1 << 18, dtype=torch.uint8)
        group.leave(0)
        guard.renew()
        try:
            wide.add_(1)
            torch.autograd.backward(loss, torch.ones(()))
        finally:
            guard.lift()
        torch.autograd.backward(torch.zeros((), requires_grad=True).clone(), torch.ones(()))
    """,
        fresh=True,
    )
