"""The co-tenant on the heap: it takes what is free, gives it back, and ends with its parent."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
import torch

from stress.limits import Fence
from stress.limits import fence as fences
from stress.limits.neighbour import Neighbour, cuda
from tests.helpers.fenced import start, wait_for_end

pytestmark = pytest.mark.skipif(fences.trouble() is not None, reason=str(fences.trouble()))

MEBI = 1 << 20


def test_a_neighbour_takes_what_is_free_and_the_rest_when_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    with Fence.create(10 * MEBI) as fence:
        for name, value in fences.environment(fence).items():
            monkeypatch.setenv(name, value)
        with Neighbour() as neighbour:
            assert neighbour.hold(4 * MEBI) == 4 * MEBI == fence.live()
            assert neighbour.hold(30 * MEBI) == fence.live() == 10 * MEBI, "to the last block"
            fence.budget = 20 * MEBI
            while fence.live() < 20 * MEBI:
                time.sleep(0.002)
            assert neighbour.hold(MEBI) == MEBI == fence.live()
            assert fence.of(neighbour.pid).failures > 0
            assert neighbour.hold(0) == 0 == fence.live()
            neighbour.hold(5 * MEBI)
            os.kill(neighbour.pid, signal.SIGKILL)
            while fence.live():
                time.sleep(0.002)
            with pytest.raises(RuntimeError, match=r"has ended \(exit code -9\)"):
                neighbour.hold(MEBI)


def test_a_neighbour_ends_with_its_parent() -> None:
    code = f"""
    sys.path.insert(0, {str(Path(fences.__file__).parent)!r})
    from neighbour import Neighbour
    neighbour = Neighbour().__enter__()
    neighbour.hold(1 << 20)
    print("ready", flush=True)
    print(neighbour.pid, flush=True)
    time.sleep(600)
    """
    with Fence.create() as fence:
        process = start(fence, code)
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        assert fence.of(pid).live == MEBI
        process.kill()
        process.communicate()
        wait_for_end(pid)


def test_on_a_gpu_it_takes_and_frees_blocks_of_torchs_allocator(monkeypatch: pytest.MonkeyPatch) -> None:
    _, take, free = cuda("cpu")
    block = take(MEBI)
    assert block.nbytes == MEBI
    free(block)
    assert block.untyped_storage().nbytes() == 0

    def full(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(torch, "empty", full)
    assert take(MEBI) is None
