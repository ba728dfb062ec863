"""A plan that compares puts the fastest way in use, where `escalate` has it."""

from __future__ import annotations

from typing import Any, Self

import pytest
import torch
from torch import Tensor, nn

from elastic_mbs import Deescalated, ElasticMBS, Escalated, Event, MemoryBudget, PlanReport
from elastic_mbs.escalation.ladder import Step
from elastic_mbs.planning import plan
from stress.reference.state import error_of
from tests.helpers.steps import elastic, grads, there, whole_gradient

BLOCKS, WIDTH, SAMPLES = 4, 8, 16
SLOW_PIECES = (1e-4, 1.0)  # seconds of an element, and of a piece: as on a device that waits
SLOW_SAMPLES = (1.0, 1e-4)


class Block(nn.Module):
    """A block whose activations are many times its input, whose runs are counted."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 16 * WIDTH), nn.Linear(16 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        RUNS.append(1)  # a number of the module's own would be put back
        found: Tensor = x + self.down(self.up(x).sin().tanh())
        return found


RUNS: list[int] = []


class Job:
    """A deep model, its batch, and a runtime whose calls were timed."""

    def __init__(self, time: tuple[float, float] | None, **options: Any) -> None:
        """Make the job; the budget is in force from here on."""
        torch.manual_seed(0)
        blocks = nn.Sequential(*(Block() for _ in range(BLOCKS)))
        self.model = nn.Sequential(nn.Linear(WIDTH, WIDTH), blocks).double()
        self.x = torch.randn(SAMPLES, 32, WIDTH, dtype=torch.float64)
        self.wanted = whole_gradient(self.model, lambda twin: twin(self.x).square().mean())
        self.events: list[Event] = []
        self.budget = MemoryBudget("1GiB", track=(self.model, self.x))
        self.budget.__enter__()
        quick = {"grow": True, "patience": 2, "jitter": 0.0, "sensor": None}
        self.mbs: ElasticMBS = elastic(self.model, on_event=self.events.append, **quick | options)
        # in place of measured times, which would be those of this machine
        self.mbs._knowledge.controller.time = lambda key: time  # type: ignore[method-assign]

    def loss_fn(self, x: Tensor) -> Tensor:
        found: Tensor = self.model(x).square().mean()
        return found

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.budget.__exit__(None, None, None)

    def plan(self, share: float, *, apply: bool = True) -> PlanReport:
        """Plan for a part of the memory that the whole batch needs, and hold the job to it."""
        sizes = self.mbs.plan(self.loss_fn, self.x, apply=False).sizes
        low, high = there(sizes[-1].peak), there(sizes[0].peak)
        self.budget.limit = int(low + share * (high - low))
        return self.mbs.plan(self.loss_fn, self.x, compare=True, apply=apply)

    def step(self, *, may_fail: bool = False) -> tuple[int, int]:
        """Make a step; return its pieces, and how often each piece ran the blocks."""
        self.model.zero_grad()
        RUNS.clear()
        result = self.mbs.backward(self.loss_fn, self.x)
        assert error_of(grads(self.model), self.wanted) <= 1e-12
        assert may_fail or result.ooms == 0
        return len(result.partition), len(RUNS) // len(result.partition)

    def taken(self) -> list[Event]:
        return [each for each in self.events if isinstance(each, Escalated | Deescalated)]


@pytest.fixture(autouse=True)
def two_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plan for two ways alone: each takes half a second to trace."""
    found = [Step("checkpoint", blocks, BLOCKS) for blocks in (1, BLOCKS)]
    monkeypatch.setattr(plan, "ways_of", lambda modules: found)


def test_fewer_pieces_with_more_work_are_used_where_they_are_faster() -> None:
    with Job(SLOW_PIECES, escalate="auto") as job:
        report = job.plan(0.25)
        chosen = there(report.chosen)
        assert chosen.name.startswith("checkpoint (")
        assert chosen.pieces < report.ways[0].pieces
        again = int(chosen.name.partition("(")[2].split()[0])
        assert job.step() == (chosen.pieces, BLOCKS + again)
    (event,) = job.taken()
    assert event.line().startswith(f"from now on with {chosen.name} for ")
    assert f"as planned: {report.why}" in event.line()
    assert f"{chosen.pieces} piece" in report.why


def test_the_way_is_left_when_memory_makes_up_for_it() -> None:
    with Job(SLOW_PIECES, escalate="auto") as job:
        enough = there(there(job.plan(0.25).chosen).until)
        job.step()
        job.budget.limit = int(0.98 * enough)
        for _ in range(4):
            assert job.step()[1] > BLOCKS
        job.budget.limit = int(1.2 * enough)
        for _ in range(4):
            job.step(may_fail=True)  # the size that fits is found again
        assert job.step()[1] == BLOCKS
    assert [type(event) for event in job.taken()] == [Escalated, Deescalated]


def test_a_sample_that_fits_in_one_way_alone_trains_without_an_error() -> None:
    with Job(None, escalate="auto") as job:
        none, *ways = (there(way.peak) for way in job.plan(0, apply=False).ways)
        job.budget.limit = int((min(ways) + none) / 2 / 0.95)  # the policy keeps 5 % free
        report = job.mbs.plan(job.loss_fn, job.x, compare=True)
        assert report.ways[0].largest == 0
        chosen = there(report.chosen)
        assert report.why == "nothing else fits"
        assert job.step()[1] > BLOCKS
        assert there(chosen.until) > job.budget.limit
    assert [type(event) for event in job.taken()] == [Escalated]


@pytest.mark.parametrize(
    ("time", "options", "apply"),
    [
        (SLOW_SAMPLES, {"escalate": "auto"}, True),  # smaller pieces are faster
        (None, {"escalate": "auto"}, True),  # not known
        (SLOW_PIECES, {}, True),  # nobody asked for it
        (SLOW_PIECES, {"escalate": ("offload",)}, True),
        (SLOW_PIECES, {"escalate": "auto"}, False),
    ],
)
def test_pieces_stay_as_they_are_otherwise(
    time: tuple[float, float] | None, options: dict[str, Any], apply: bool
) -> None:
    with Job(time, **options) as job:
        report = job.plan(0.25, apply=apply)
        assert (report.fastest == "none") == (time == SLOW_SAMPLES)
        assert time is not None or {way.until for way in report.ways} == {None}
        if apply:
            assert job.step() == (report.ways[0].pieces, BLOCKS)
    assert not job.taken()


def test_a_second_plan_keeps_the_way_and_its_size() -> None:
    with Job(SLOW_PIECES, escalate="auto") as job:
        first = there(job.plan(0.25).chosen)
        job.step()
        report = job.plan(0.25)
        assert {way.seconds for way in report.ways} == {None}  # times are those of the way in use
        assert job.step()[0] == first.pieces
    assert len(job.taken()) == 1
