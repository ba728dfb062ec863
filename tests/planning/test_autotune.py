"""Ways take turns in training, the fastest one stays, and every gradient is exact meanwhile."""

from __future__ import annotations

from typing import Any, Self

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from elastic_mbs import (
    Deescalated,
    ElasticMBS,
    Escalated,
    Event,
    MemoryBudget,
    MicroBatchFloorError,
    UsageError,
)
from elastic_mbs.controller.messages import Key
from elastic_mbs.controller.peak import Line, PeakModel
from elastic_mbs.engine.outcome.timing import Stopwatch
from elastic_mbs.escalation.autotune import NEAR, TURNS, Autotune, Candidate
from elastic_mbs.escalation.ladder import Step
from elastic_mbs.memory.monitor import Monitor
from elastic_mbs.planning import plan
from elastic_mbs.testing import InjectOOM
from stress.reference.state import error_of
from tests.helpers.steps import elastic, grads, rungs_in_use, there, whole_gradient

BLOCKS, WIDTH, SAMPLES = 4, 8, 8
ALL, OFFLOAD = Step("checkpoint", BLOCKS, BLOCKS), Step("offload")
LINE = Line(1.0, 0.0, 0.0)
Used = tuple[Step, ...]
WAYS: list[Used] = [(), (ALL,), (OFFLOAD,)]


class Job:
    """A deep model, its batch in a budget, and a runtime whose calls take the times of a table."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, times: dict[Used, float], **options: Any
    ) -> None:
        torch.manual_seed(0)
        blocks = [
            nn.Sequential(nn.Linear(WIDTH, 64), nn.Tanh(), nn.Linear(64, WIDTH))
            for _ in range(BLOCKS)
        ]
        self.model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Sequential(*blocks)).double()
        self.x = torch.randn(SAMPLES, 16, WIDTH, dtype=torch.float64)
        self.wanted = whole_gradient(self.model, lambda twin: twin(self.x).square().mean())
        self.events: list[Event] = []
        self.used: list[Used] = []
        self.budget = MemoryBudget("1GiB", track=(self.model, self.x, self.wanted))
        quick = {"escalate": "auto", "sensor": None, "patience": 1, "jitter": 0.0, "grow": True}
        self.budget.__enter__()
        self.mbs: ElasticMBS = elastic(self.model, on_event=self.events.append, **quick | options)
        monkeypatch.setattr(plan, "ways_of", lambda modules: [ALL, OFFLOAD])
        monkeypatch.setattr(Stopwatch, "seconds", lambda watch: times[self.used[-1]])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.budget.__exit__(None, None, None)

    def loss_fn(self, x: Tensor) -> Tensor:
        rungs = rungs_in_use()
        if rungs is not None:
            self.used.append(rungs)
        found: Tensor = self.model(x).square().mean()
        return found

    def tune(self, calls: int) -> list[Used]:
        """Plan and train; return the ways of the calls."""
        self.mbs.plan(self.loss_fn, self.x, autotune=True)
        return self.train(calls)

    def train(self, calls: int, x: Tensor | None = None) -> list[Used]:
        self.used.clear()
        for _ in range(calls):
            self.model.zero_grad()
            self.mbs.backward(self.loss_fn, self.x if x is None else x)
            assert x is not None or error_of(grads(self.model), self.wanted) <= 1e-12
        return self.used

    def taken(self) -> list[Escalated | Deescalated]:
        return [each for each in self.events if isinstance(each, Escalated | Deescalated)]


@pytest.mark.parametrize(
    ("seconds", "stays"),
    [((1.0, 0.5, 0.8), ALL), ((1.0, 0.95, 3.0), None), ((1.0, 2.0, 3.0), None)],
)
def test_ways_take_turns_and_the_fastest_stays(
    monkeypatch: pytest.MonkeyPatch, seconds: tuple[float, ...], stays: Step | None
) -> None:
    with Job(monkeypatch, dict(zip(WAYS, seconds, strict=True))) as job:
        used = job.tune(TURNS * len(WAYS) + 2)
        assert used[: TURNS * len(WAYS)] == TURNS * WAYS
        assert set(used[TURNS * len(WAYS) :]) == {() if stays is None else (stays,)}
        events = job.taken()
        assert [event.by for event in events] == [] if stays is None else ["checkpoint"]
        if events:
            assert "a batch takes 0.5 s, and as it is 1 s" in events[0].line()
        job.budget.limit = int(there(job.budget.limit) * 4)
        assert job.train(3)[-1] == used[-1], "more memory does not make up for it"


def test_a_way_that_runs_out_of_memory_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    with Job(monkeypatch, dict(zip(WAYS, (1.0, 0.1, 0.8), strict=True))) as job:
        job.mbs.plan(job.loss_fn, job.x, autotune=True)
        job.train(1)
        with InjectOOM(at=[9]) as injected:
            assert set(job.train(1)) == {(ALL,)}
        assert injected.hits
        assert job.train(6)[:5] == [(OFFLOAD,), (), (OFFLOAD,), (), (OFFLOAD,)]
        assert job.train(1) == [(OFFLOAD,)]


def test_a_way_goes_where_the_whole_batch_fits_again(monkeypatch: pytest.MonkeyPatch) -> None:
    with Job(monkeypatch, dict(zip(WAYS, (1.0, 0.5, 0.8), strict=True))) as job:
        whole, *_, one = (there(size.peak) for size in job.mbs.plan(job.loss_fn, job.x).sizes)
        job.budget.limit = (whole + one) // 2
        job.tune(TURNS * len(WAYS))
        assert job.train(2)[-1] == (ALL,)
        job.budget.limit = 2 * whole
        assert job.train(3)[-1] == ()
        assert [type(event) for event in job.taken()] == [Escalated, Deescalated]


def test_calls_of_another_kind_take_no_turn_and_keep_their_size(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with Job(monkeypatch, dict(zip(WAYS, (1.0, 2.0, 2.0), strict=True))) as job:
        long = torch.cat([job.x] * 4, 1)
        job.budget.limit = 700_000
        for _ in range(6):
            job.train(1, long)
        size = there(job.mbs.last_result).micro_batch_size
        assert size < SAMPLES
        job.mbs.plan(job.loss_fn, job.x, autotune=True)
        for used in TURNS * WAYS:
            assert set(job.train(1)) == {used}
            assert set(job.train(1, long)) == {()}
            last = there(job.mbs.last_result)
            assert (last.micro_batch_size, last.ooms) == (size, 0)
        assert job.taken() == []


def test_the_loop_written_out_takes_turns_too(monkeypatch: pytest.MonkeyPatch) -> None:
    with Job(monkeypatch, dict(zip(WAYS, (1.0, 0.5, 2.0), strict=True))) as job:
        job.mbs.plan(job.loss_fn, job.x, autotune=True)
        for _ in range(TURNS * len(WAYS) + 1):
            for micro in job.mbs.micro_batches(job.x, name=job.loss_fn.__qualname__):
                with micro:
                    micro.backward(job.loss_fn(micro.data))
        assert job.used == [*TURNS * WAYS, (ALL,)]


@pytest.mark.parametrize("seconds", [(1.0, 2.0, 2.0), (1.0, 2.0, 0.5)])
def test_steps_in_use_stay_where_none_is_faster_and_else_are_announced_when_they_go(
    monkeypatch: pytest.MonkeyPatch, seconds: tuple[float, ...]
) -> None:
    with Job(monkeypatch, {**dict(zip(WAYS, seconds, strict=True)), (ALL, OFFLOAD): 3.0}) as job:
        job.train(1)
        ((_, profile),) = job.mbs._knowledge._profiles.values()
        for step in (ALL, OFFLOAD):
            profile.ladder.climb(step, None)
        assert job.tune(TURNS * len(WAYS)) == TURNS * WAYS
        offloads = seconds[2] < 1
        assert [type(event) for event in job.taken()] == [Deescalated] * offloads
        assert job.train(1) == [(OFFLOAD,) if offloads else (ALL, OFFLOAD)]


def test_a_device_that_tells_no_time_leaves_all_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    with Job(monkeypatch, {}) as job:
        monkeypatch.setattr(Stopwatch, "seconds", lambda watch: None)
        assert job.tune(4) == [(), (), (), ()]
        assert job.taken() == []


def test_a_newer_plan_ends_the_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    with Job(monkeypatch, dict.fromkeys(WAYS, 1.0)) as job:
        assert job.tune(2) == WAYS[:2]
        job.mbs.plan(job.loss_fn, job.x)
        assert job.train(2) == [(), ()]
        assert job.tune(3) == WAYS


def test_a_way_of_a_batch_that_is_always_cut_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    times = dict(zip(WAYS, (1.0, 0.5, 2.0), strict=True))
    with Job(monkeypatch, times, max_micro_batch_size=4) as job:
        job.tune(TURNS * len(WAYS))
        assert set(job.train(8)) == {(ALL,)}


def test_a_call_that_ends_by_an_error_leaves_its_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    with Job(monkeypatch, dict.fromkeys(WAYS, 1.0), escalate=("offload",)) as job:
        job.mbs.plan(job.loss_fn, job.x, autotune=True)
        with InjectOOM(always_from=1), pytest.raises(MicroBatchFloorError):
            job.train(1)
        assert job.train(4)[-1] == (OFFLOAD,)


@pytest.mark.parametrize(
    ("options", "how", "told"),
    [
        ({"escalate": ()}, {}, r'recovery=RecoveryOptions\(escalate="auto"\)'),
        ({}, {"apply": False}, "leave one of them out"),
    ],
)
def test_tuning_that_could_change_nothing_is_refused(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], how: dict[str, Any], told: str
) -> None:
    with Job(monkeypatch, {}, **options) as job:
        with pytest.raises(UsageError, match=told):
            job.mbs.plan(job.loss_fn, job.x, autotune=True, **how)
        with Job(monkeypatch, dict.fromkeys(WAYS, 1.0)) as other:
            assert other.tune(2) == WAYS[:2]


def test_tuning_where_the_free_memory_is_not_known_asks_for_a_budget(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with Job(monkeypatch, dict.fromkeys(WAYS, 1.0)) as job:
        monkeypatch.setattr(Monitor, "read_now", lambda monitor: None)
        with pytest.raises(UsageError, match="the free memory of cpu is not known: add budget="):
            job.mbs.plan(job.loss_fn, job.x, autotune=True)
        assert job.train(1) == [()]
        job.mbs.plan(job.loss_fn, job.x, autotune=True, budget="1GiB")
        assert job.train(2) == WAYS[:2]


@given(st.lists(st.one_of(st.none(), st.floats(1e-3, 1e3)), min_size=12, max_size=12))
def test_the_quickest_call_of_each_way_counts(times: list[float | None]) -> None:
    key, memory = Key("f", "train", 3), PeakModel([LINE], [LINE], held=0)
    ways = [Candidate(step, memory, 8, None) for step in (None, ALL, OFFLOAD, Step("tile"))]
    tuning, seen = Autotune(key, 8, 4, ways), dict[Step | None, list[float | None]]()
    for seconds in times:
        if tuning.candidate is None:
            break
        seen.setdefault(tuning.candidate.step, []).append(seconds)
        if seconds is None:
            tuning.leave_out()
        else:
            tuning.note(2 * seconds, 64)  # a batch of twice the elements
    assert tuning.candidate is None
    assert all(len(each) == TURNS or each[-1] is None for each in seen.values())
    least = {step: min(filter(None, each)) for step, each in seen.items() if None not in each}
    if not least:
        assert tuning.fastest is None
        return
    best = min(least.values())
    plain = None in least and least[None] <= NEAR * best
    assert least[there(tuning.fastest).step] == (least[None] if plain else best)
