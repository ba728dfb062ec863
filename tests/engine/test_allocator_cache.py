"""A caching allocator keeps what a failed attempt had: that must not pass for memory which a micro-batch needs."""

import random

import pytest
import torch

from elastic_mbs import ElasticMBS, MemoryBudget, MemoryOptions, Policy
from elastic_mbs.controller.controller import CallOutcome, Controller, Key
from elastic_mbs.memory import Reading, Usage, oom
from elastic_mbs.testing import InjectOOM
from tests.helpers.room import Pair, batch_on, loss_of, wide

KEY = Key("loss", "train", 1)


class Elsewhere:
    """Stands for the device of the model, and says that it is no CPU: only other devices are asked for their use in every call."""

    type = "xpu"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, torch.device)

    __hash__ = None  # type: ignore[assignment]  # nobody hashes it


class Caching:
    """A budget as torch's allocator on a GPU would tell of it: what is freed stays reserved, until memory runs out and what is unused is given back.

    What is in use at that moment is freed right after it, and stays reserved again. Blocks are `waste` times as long as the tensors in them.
    """

    def __init__(self, budget: MemoryBudget, waste: float = 1.0) -> None:
        self.budget = budget
        self.waste = waste
        self.resets = self.idle = self.reserved = self.peak = self.seen = 0

    def read(self) -> Reading:
        return self.budget.read()

    def usage(self) -> Usage:
        if self.budget.ooms > self.seen:
            self.seen, self.reserved = self.budget.ooms, min(self.reserved, self.budget.limit)
        self.reserved = max(self.reserved, round(self.waste * self.budget.peak))
        self.peak = max(self.peak, self.reserved)
        return Usage(self.budget.live, self.reserved, self.budget.peak, self.peak, 0, self.idle)

    def reset_peak(self) -> None:
        self.usage()
        self.resets += 1
        self.budget.reset_peak()
        self.peak, self.idle = self.reserved, self.reserved - self.budget.live

    def empty(self) -> None:
        self.usage()
        self.budget.reset_peak()
        self.reserved = round(self.waste * self.budget.live)


def test_the_batch_goes_through_whole_again_when_as_much_memory_is_back_as_there_was() -> None:
    device = torch.device("cpu")
    model, batch = wide(device), batch_on(device, 32)

    def loss_fn(piece: Pair) -> torch.Tensor:
        return loss_of(model, piece)

    with MemoryBudget(2**40, track=[model]) as budget:
        loss_fn(batch).backward()
        budget.reset_peak()
        loss_fn(batch).backward()
        whole = budget.peak
        model.zero_grad()
        policy = Policy(patience=1, jitter=0.0, cooldown=0.0, min_gain=0.0)
        with ElasticMBS(model, policy=policy, memory=MemoryOptions(sensor=Caching(budget), monitor_interval=0, wait_for_memory=0)) as mbs:
            mbs._context.devices[:] = [Elsewhere()]  # type: ignore[list-item]  # it stands for a device

            def pieces() -> int:
                model.zero_grad()
                return len(mbs.backward(loss_fn, batch).partition)

            budget.limit = int(1.1 * whole)
            assert [pieces() for _ in range(6)][-1] == 1
            budget.limit = int(0.9 * whole)
            beside = [pieces() for _ in range(6)]
            assert beside[-1] == 2
            budget.limit = int(1.1 * whole)
            assert [pieces() for _ in range(10)][-1] == 1


@pytest.mark.no_oom_injection
def test_what_the_allocator_wastes_is_known_after_a_failure_because_its_cache_is_emptied_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was taken for nothing where the first call had run out of memory, and growth failed on it again and again."""
    device = torch.device("cpu")
    model, batch, emptied = wide(device), batch_on(device, 32), list[object]()
    with MemoryBudget(2**40, track=[model]) as budget:
        loss_of(model, batch).backward()
        cache = Caching(budget, waste=1.3)
        with ElasticMBS(model, micro_batch_size=32, memory=MemoryOptions(sensor=cache, monitor_interval=0, wait_for_memory=0)) as mbs:
            mbs._context.devices[:] = [Elsewhere()]  # type: ignore[list-item]  # it stands for a device

            def empty_caches(devices: object) -> None:
                emptied.append(devices)
                cache.empty()

            monkeypatch.setattr(oom, "empty_caches", empty_caches)

            def call() -> float:
                mbs.backward(lambda piece: loss_of(model, piece), batch)
                tracks = mbs.state_dict()["controller"]["tracks"]  # type: ignore[index]  # a state is typed as JSON, whatever is in it
                return float(tracks[0]["fragmentation"])

            with InjectOOM(at=[10]):
                call()
            assert emptied == []
            # What is wasted around the parameters may be of use to what follows, or not: somewhere between all of it and the rest.
            assert all(1.2 < call() <= 1.31 for _ in range(5))
            assert len(emptied) == 1


@pytest.mark.parametrize(
    ("known", "usage", "after"),
    [
        (1.0, Usage(0, 0, 100, 120, 0), 1.2),  # nothing was cached before: it is known
        (1.2, Usage(0, 0, 50, 120, 0, 70), 1.2),  # between 1 and 2.4, as what is known
        (1.0, Usage(0, 0, 50, 120, 0, 40), 1.6),  # 80 at least
        (1.8, Usage(0, 0, 100, 120, 0, 40), 1.2),  # 120 at most
    ],
)
def test_fragmentation_is_what_is_known_as_far_as_the_cache_allows(known: float, usage: Usage, after: float) -> None:
    controller = Controller(start=8, policy=Policy(), clock=lambda: 0.0, random=random.Random(0))
    for least, most in ((known, known), (usage.least_fragmentation, usage.fragmentation)):
        controller.begin(KEY, 16, 1)
        seen = CallOutcome(16, 1, 2, None, most, None, 0, 0, least)
        controller.end(KEY, seen, None)
    tracks = controller.state_dict()["tracks"]
    assert isinstance(tracks, list)
    assert tracks[0]["fragmentation"] == pytest.approx(after)
