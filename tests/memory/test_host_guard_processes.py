"""Real processes held to a limit: the allocator fails at it, training goes on, and nothing outside of a piece is limited."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_DATA covers private memory on Linux only")

ROOT = Path(__file__).resolve().parents[2]

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
            return CgroupMemory(2, "/", self.limit, used, 0, max(0, self.limit - used), "memory.max")
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
                memory = MemoryOptions(host_guard="24MiB", sensor=NoSensor(""), monitor_interval=0, wait_for_memory=0)
                mbs = ElasticMBS(model, micro_batch_size=len(x), memory=memory)
                group.bind()
                events = []
                mbs._context.log._sinks = (events.append,)
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


def test_a_forked_child_and_a_thread_are_held_to_what_they_should_be() -> None:
    run_limited("""
        resource.setrlimit(resource.RLIMIT_DATA, (1 << 40, resource.RLIM_INFINITY))
        guard = guard_beside(group := Group())
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
        guard.lift()
        assert resource.getrlimit(resource.RLIMIT_DATA) == (1 << 40, resource.RLIM_INFINITY)
    """)


def test_threads_and_what_the_first_backward_imports_are_there_before_the_first_piece() -> None:
    # refused memory for the stack of a thread, libgomp ends the process; in the middle of an import, sympy stayed half imported
    run_limited(
        """
        torch.set_num_threads(3)
        guard = guard_beside(group := Group())
        group.leave(256 * MEBI)
        guard.renew()
        guard.lift()
        assert len(os.listdir("/proc/self/task")) >= 3
        loss, wide = torch.zeros((), requires_grad=True).clone(), torch.ones(1 << 18, dtype=torch.uint8)
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
