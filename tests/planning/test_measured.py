"""A plan that measures: real times of each way, and nothing of the runs stays."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from elastic_mbs import ElasticMBS, Escalated, Event, MemoryBudget, PlanReport, UsageError
from elastic_mbs.escalation.ladder import Step
from elastic_mbs.planning import plan
from elastic_mbs.planning.ways import Times
from elastic_mbs.rehearsal import trials
from elastic_mbs.testing import InjectOOM
from stress.reference.state import error_of
from tests.helpers.steps import elastic, grads, there, whole_gradient

BLOCKS, WIDTH, SAMPLES = 4, 8, 8
WHOLE = Step("checkpoint", BLOCKS, BLOCKS)


@pytest.fixture(autouse=True)
def few_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plan for two ways alone: each takes half a second to trace."""
    monkeypatch.setattr(plan, "ways_of", lambda modules: [WHOLE, Step("tile")])


@pytest.fixture
def job() -> Iterator[tuple[nn.Sequential, Tensor]]:
    """Give a deep model with state of every kind, and its batch, in 1 GiB."""
    torch.manual_seed(0)
    blocks = nn.Sequential(
        *(
            nn.Sequential(nn.Linear(WIDTH, 64), nn.Tanh(), nn.Linear(64, WIDTH))
            for _ in range(BLOCKS)
        )
    )
    model = nn.Sequential(nn.BatchNorm1d(16), blocks, nn.Dropout(0.1)).double()
    x = torch.randn(SAMPLES, 16, WIDTH, dtype=torch.float64)
    with MemoryBudget("1GiB", track=(model, x)):
        yield model, x


def runtime(model: nn.Module, **options: Any) -> ElasticMBS:
    return elastic(model, **{"sensor": None, **options})


def timed(monkeypatch: pytest.MonkeyPatch, seconds: Callable[[int, Step], float | None]) -> None:
    """Have these seconds in place of those of this machine; the batch runs all the same."""
    run = trials.Trials.seconds

    def found(
        self: trials.Trials, tried: Iterable[trials.Pieces]
    ) -> dict[trials.Pieces, float | None]:
        return {each: seconds(*each) for each in run(self, tried)}

    monkeypatch.setattr(trials.Trials, "seconds", found)


def squares(model: nn.Module) -> Callable[[Tensor], Tensor]:
    return lambda batch: model(batch).square().mean()


def planned(mbs: ElasticMBS, loss_fn: Callable[[Any], Any], x: Tensor, **how: Any) -> PlanReport:
    return mbs.plan(loss_fn, x, compare=True, measure=True, **how)


def test_times_are_measured_and_nothing_stays(job: tuple[nn.Sequential, Tensor]) -> None:
    model, x = job
    outside = nn.Parameter(torch.ones(WIDTH, dtype=torch.float64))
    queue, x0 = torch.zeros(WIDTH, dtype=torch.float64), x.clone()
    seen: list[bool] = []

    def loss_fn(batch: Tensor) -> Tensor:
        seen.append(model.training)
        queue.add_(batch.detach().mean((0, 1)) + random.random() * 0)
        batch.mul_(1.5)
        found: Tensor = (model(batch) * outside).square().mean() * torch.rand((), dtype=x.dtype)
        return found

    events: list[Event] = []
    mbs = runtime(model, escalate="auto", on_event=events.append)
    for leaf in (*model.parameters(), outside):
        leaf.grad = torch.full_like(leaf, 3.0)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    streams = torch.get_rng_state(), random.getstate()
    report = planned(mbs, loss_fn, x, apply=False)
    assert report.measured
    assert all(there(way.seconds) > 0 for way in report.ways if way.largest)
    assert [way.name for way in report.ways if way.largest] == ["none", str(WHOLE)]
    assert 0 < there(report.sizes[0].seconds) <= there(report.sizes[-1].seconds)
    assert all(seen), "in the modes of training"
    assert torch.equal(streams[0], torch.get_rng_state())
    assert streams[1] == random.getstate()
    assert all(value.equal(state[name]) for name, value in model.state_dict().items())
    assert all(
        leaf.grad is not None and leaf.grad.eq(3).all() for leaf in (*model.parameters(), outside)
    )
    assert torch.equal(x, x0)
    assert not queue.any()
    assert events == []


@pytest.mark.parametrize(("faster", "chosen"), [(0.5, str(WHOLE)), (0.95, "none"), (2.0, "none")])
def test_a_way_that_is_faster_by_a_tenth_is_used_even_where_all_fits(
    job: tuple[nn.Sequential, Tensor], monkeypatch: pytest.MonkeyPatch, faster: float, chosen: str
) -> None:
    model, x = job[0][1], job[1]
    timed(monkeypatch, lambda size, step: faster if step == WHOLE else 1.0)
    events: list[Event] = []
    loss_fn = squares(model)
    wanted = whole_gradient(model, lambda twin: squares(twin)(x))
    mbs = runtime(model, escalate="auto", on_event=events.append)
    report = planned(mbs, loss_fn, x)
    assert report.fastest == chosen
    assert report.why.startswith("measured: 1 s" if chosen == "none" else "1 piece in 0.5 s")
    mbs.backward(loss_fn, x)
    assert error_of(grads(model), wanted) <= 1e-12
    assert [event.by for event in events if isinstance(event, Escalated)] == (
        [] if chosen == "none" else ["checkpoint"]
    )


def test_two_sizes_give_the_time_of_a_sample_and_of_a_piece(
    job: tuple[nn.Sequential, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x = job[0][1], job[1]
    timed(monkeypatch, lambda size, step: 3.0 * SAMPLES + 5.0 * -(-SAMPLES // size))
    report = runtime(model).plan(squares(model), x, measure=True)
    assert {row.pieces: row.seconds for row in report.sizes} == pytest.approx(
        {pieces: 24.0 + 5.0 * pieces for pieces in (1, 2, 4, 8)}
    )
    assert report.ways == ()


def test_out_of_memory_anywhere_ends_a_trial_and_leaves_nothing(
    job: tuple[nn.Sequential, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x = job
    mbs, run, struck = runtime(model, escalate="auto"), trials.Trials.times, list[int]()
    state = {name: value.clone() for name, value in model.state_dict().items()}

    def times(self: trials.Trials, report: PlanReport) -> Times:
        with InjectOOM() as counter:
            found = run(self, report)
        stride = counter.count // 60
        for at in range(1 + random.randrange(stride), counter.count, stride):
            with InjectOOM(at=[at]) as injected:
                ways = run(self, report).ways
            if not injected.hits:  # the last runs can have fewer operations
                continue
            struck.append(sum(seconds == math.inf for seconds in ways.values()))
            assert all(there(seconds) > 0 for seconds in ways.values())
            assert all(value.equal(state[name]) for name, value in model.state_dict().items())
            assert all(leaf.grad is None for leaf in model.parameters())
        return found

    monkeypatch.setattr(trials, "RUNS", 1)
    monkeypatch.setattr(trials.Trials, "times", times)
    planned(mbs, squares(model), x, apply=False)
    assert {0, 1} <= set(struck), "some strike operations of our own, which are tried again"
    assert len(struck) > 40


def test_a_hook_that_would_run_is_refused_and_the_way_out_is_right(
    job: tuple[nn.Sequential, Tensor],
) -> None:
    model, x = job
    ran: list[Tensor] = []
    hook = model[1][0][0].weight.register_post_accumulate_grad_hook(ran.append)  # type: ignore[index]  # of torch's stubs
    mbs = runtime(model)
    loss_fn = squares(model)
    with pytest.raises(UsageError, match=r"hook on parameter '1\.0\.0\.weight' would run"):
        mbs.plan(loss_fn, x, measure=True)
    assert ran == []
    assert mbs.plan(loss_fn, x).largest == SAMPLES
    hook.remove()
    assert mbs.plan(loss_fn, x, measure=True).sizes[0].seconds
