"""The co-tenant of a GPU, here on a CPU whose allocator fails: it takes what is free, gives it back, and ends with its parent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from stress.limits import Fence
from stress.limits import fence as fences
from stress.limits.neighbour import GRAIN, Neighbour
from tests.helpers.fenced import wait_for_end

pytestmark = pytest.mark.skipif(fences.trouble() is not None, reason=str(fences.trouble()))


def test_a_neighbour_takes_what_is_free_and_the_rest_when_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    with Fence.create(5 * GRAIN) as fence:
        for name, value in fences.environment(fence).items():
            monkeypatch.setenv(name, value)
        with Neighbour("cpu") as neighbour:
            assert neighbour.hold(2 * GRAIN) == 2 * GRAIN == fence.live()
            assert neighbour.hold(15 * GRAIN) == fence.live() == 5 * GRAIN, "to the last block"
            fence.budget = 10 * GRAIN
            while fence.live() < 10 * GRAIN:
                time.sleep(0.002)
            assert neighbour.hold(GRAIN) == GRAIN == fence.live()
            assert neighbour.hold(0) == 0 == fence.live()
            os.kill(neighbour.pid, signal.SIGKILL)
            with pytest.raises(RuntimeError, match=r"has ended \(exit code -9\)"):
                neighbour.hold(GRAIN)


def test_a_neighbour_ends_with_its_parent() -> None:
    code = "from stress.limits.neighbour import Neighbour\nprint(Neighbour('cpu').__enter__().pid, flush=True)\nimport time; time.sleep(600)"
    parent = subprocess.Popen([sys.executable, "-c", code], cwd=Path(fences.__file__).parents[2], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    parent.kill()
    parent.communicate()
    wait_for_end(pid)
