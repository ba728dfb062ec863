"""No rank waits without a limit, and its error names who is missing, where, and why."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from threading import Event

import pytest
from torch._C._distributed_c10d import HashStore
from torch.nn.parallel import DistributedDataParallel as DDP

from elastic_mbs import DistributedOptions, ElasticMBS
from elastic_mbs.distributed import control
from stress.ranks.job import DIED, run_ranks
from stress.ranks.losses import data
from tests.helpers.ddp import caught, net

TIMEOUT = 4.0
LOST = "PeerError: the other ranks cannot be reached at the end of a batch (batch 2): "


def run_until(rank: int, world: int, ending: str, folder: str = "") -> tuple[str, float]:
    """Make one call; in the second one rank 1 does not come. Return the error, and its seconds.

    A rank that hangs does so until the others have left their files in the folder.
    """
    ddp = DDP(net())
    mbs = ElasticMBS(ddp, distributed=DistributedOptions(timeout=TIMEOUT))

    def call(step: int) -> None:
        mbs.backward(lambda x: ddp(x).pow(2).mean(), data(rank, step))

    call(0)
    if rank == 1:
        if ending == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if ending == "hangs":
            while len(list(Path(folder).iterdir())) < world - 1:
                time.sleep(0.05)
            return "hung until the others had ended", 0.0
        if ending == "late":
            time.sleep(2.5)
        if ending == "closed":
            mbs.close()
            return "closed", 0.0
        if ending == "raises":
            try:
                with mbs:
                    raise RuntimeError("the disk is full")
            except RuntimeError:
                return "raised", 0.0
    began = time.monotonic()
    found, seconds = caught(lambda: call(1)), time.monotonic() - began
    if folder:
        Path(folder, str(rank)).touch()
    return found, seconds


def test_a_rank_that_was_killed_is_an_error_on_the_others_at_once() -> None:
    first, second, third = run_ranks(run_until, "killed", world=3)
    assert second.status == DIED
    for found, seconds in (first.value, third.value):
        assert found.startswith(LOST)
        assert found.endswith("and it goes on from its last checkpoint")
        assert seconds < TIMEOUT


def test_a_rank_that_hangs_is_named_after_the_time_out(tmp_path: Path) -> None:
    first, second, third = run_ranks(run_until, "hangs", str(tmp_path), world=3)
    assert second.value == ("hung until the others had ended", 0.0)
    found = [first.value[0], third.value[0]]
    assert all(each.startswith(LOST) for each in found)
    assert any("no answer within 4 s: rank 1 did not come" in each for each in found)
    assert max(first.value[1], third.value[1]) < TIMEOUT + 6


def make_alone(rank: int, world: int) -> tuple[str, float]:
    ddp = DDP(net())
    if rank == 1:
        time.sleep(6)
        return "asleep", 0.0
    began = time.monotonic()
    found = caught(lambda: ElasticMBS(ddp, distributed=DistributedOptions(timeout=2)))
    return found, time.monotonic() - began


def test_a_rank_that_makes_no_runtime_is_not_waited_for_without_a_limit() -> None:
    first, _ = run_ranks(make_alone)
    found, seconds = first.value
    assert found.startswith("PeerError: not all ranks have made their ElasticMBS within 2 s")
    assert seconds < 5


def test_a_rank_that_is_late_is_waited_for() -> None:
    outcomes = run_ranks(run_until, "late")
    assert [outcome.value[0] for outcome in outcomes] == ["no error", "no error"]


def test_a_rank_whose_data_have_ended_is_named_with_the_reason() -> None:
    first, second = run_ranks(run_until, "closed")
    assert second.value[0] == "closed"
    assert "rank 1 has left: its ElasticMBS was closed" in first.value[0]
    assert first.value[1] < TIMEOUT


def test_a_rank_that_ends_by_an_error_is_named_with_it() -> None:
    first, second = run_ranks(run_until, "raises")
    assert second.value[0] == "raised"
    assert "rank 1 has left: RuntimeError: the disk is full" in first.value[0]
    assert first.value[1] < TIMEOUT


class _SilentStore(HashStore):
    """A store that answers from a moment on, as one that was cut off for a while."""

    def __init__(self) -> None:
        super().__init__()
        self.answers = Event()

    def add(self, key: str, value: int) -> int:
        self.answers.wait(60)
        found: int = super().add(key, value)
        return found


def test_a_store_that_does_not_answer_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "ANSWER", 0.2)
    store = _SilentStore()
    notes, other = control.Notes(store, 0, 2), control.Notes(store, 1, 2)
    other.leave(3, "the disk is full")
    began = time.monotonic()
    for _ in range(20):
        assert notes.left(4) == {}
    assert notes.silent
    assert time.monotonic() - began < 2
    store.answers.set()
    until = time.monotonic() + 30
    while notes.left(4) != {1: "the disk is full"}:
        assert time.monotonic() < until
    assert not notes.silent
    assert notes.left(3) == {}
