"""Offloading and checkpointing in a plan: their sizes fit, and the fastest is PAPAYA's."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from elastic_mbs import ElasticMBS, MemoryBudget, PlanReport
from elastic_mbs.escalation import tile
from elastic_mbs.escalation.checkpoint import CheckpointedBlocks
from elastic_mbs.escalation.head import OtherLayers
from elastic_mbs.escalation.inputs import Inputs
from elastic_mbs.escalation.ladder import Step
from elastic_mbs.escalation.logits import ChunkedLogits
from elastic_mbs.escalation.offload import HostSlot, OffloadedTensors
from elastic_mbs.escalation.position_wise import PositionWise
from elastic_mbs.escalation.tile import TiledModules
from elastic_mbs.planning.lines import Trace
from elastic_mbs.planning.report import PlannedWay
from elastic_mbs.planning.ways import NONE, NOTHING, Known, weighed
from elastic_mbs.planning.work import flops_of
from elastic_mbs.rollback.random_streams import RandomStreams
from tests.helpers.planned import Subject, cnn, gpt, lstm, peak_of, unet
from tests.helpers.steps import quiet, there


def plan_of(
    subject: Subject, share: float, budget: MemoryBudget, **options: int
) -> tuple[ElasticMBS, PlanReport]:
    """Return a plan for a budget between the peaks of the smallest and the largest size."""
    model, loss_fn, batch = subject
    mbs = ElasticMBS(model, **quiet(sensor=budget, **options))
    sizes = mbs.plan(loss_fn, batch).sizes
    low, high = there(sizes[-1].peak), there(sizes[0].peak)
    return mbs, mbs.plan(loss_fn, batch, budget=int(low + share * (high - low)), compare=True)


def of(report: PlanReport) -> dict[str, PlannedWay]:
    """Return the ways by rung; of a rung in parts the last, which is all of it."""
    return {way.name.partition(" (")[0]: way for way in report.ways}


def made(way: str, model: nn.Module, piece: Any) -> AbstractContextManager[Any]:
    if way == "offload":
        return OffloadedTensors(lambda: [*model.parameters(), *model.buffers(), *piece])
    return (
        CheckpointedBlocks([model], RandomStreams((), [])) if way == "checkpoint" else nullcontext()
    )


@pytest.mark.parametrize(
    ("make", "ways"),
    [
        (gpt, ("none", "offload", "checkpoint")),
        (unet, ("none", "offload")),
        (cnn, ("none", "offload")),
    ],
)
def test_the_largest_size_of_each_way_fits_and_the_next_does_not(
    make: Callable[[int], Subject], ways: tuple[str, ...]
) -> None:
    torch.manual_seed(0)
    model, loss_fn, batch = subject = make(96)
    with MemoryBudget(2**40, track=[model, *batch]) as budget:
        report = plan_of(subject, 0.15, budget)[1]
        usable, found = there(report.usable), of(report)
        for name in ways:
            largest = found[name].largest
            assert 4 <= largest < 96, name
            peaks = []
            for size in (largest, largest + max(1, largest // 30)):
                piece = tuple(leaf[:size] for leaf in batch)
                loss_fn(piece).backward()  # makes the gradients

                def run(name: str = name, piece: Any = piece) -> None:
                    with made(name, model, piece):
                        loss_fn(piece).backward()

                peaks.append(peak_of(budget, run))
            assert peaks[0] <= 1.01 * usable <= 1.02 * peaks[1], name
    assert found["none"].largest < min(found[name].largest for name in ways[1:])


class Mixer(nn.Module):
    """Blocks of a running mean and an MLP, and a head over many words."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(2048, 32)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(32, 256), nn.GELU(), nn.Linear(256, 32)) for _ in range(4)
        )
        self.head = nn.Linear(32, 2048)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        for block in self.blocks:
            x = x + block(x.cumsum(1).tanh())
        found: Tensor = self.head(x)
        return found


def test_every_rung_needs_what_the_plan_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tile, "SMALL", 0)
    torch.manual_seed(0)
    model, ids = Mixer(), torch.randint(0, 2048, (2, 256))

    def loss_fn(piece: Tensor) -> Tensor:
        return F.cross_entropy(model(piece)[:, :-1].flatten(0, 1), piece[:, 1:].flatten())

    streams = RandomStreams((), ())
    hooks = {
        "logits": lambda: ChunkedLogits(OtherLayers(), lambda: None),
        "tile": lambda: TiledModules([model], streams, PositionWise(), lambda: None, Inputs()),
        **{
            f"checkpoint ({count} of 4 blocks)": partial(
                CheckpointedBlocks, [model], streams, count
            )
            for count in (1, 2, 3, 4)
        },
    }
    with MemoryBudget(2**40, track=[model, ids]) as budget:
        mbs = ElasticMBS(model, **quiet(sensor=budget))
        report = mbs.plan(loss_fn, ids, budget=2**30, compare=True)
        found = {way.name: way for way in report.ways}
        assert list(found) == ["none", "logits", *list(hooks)[2:], "tile", "offload"]
        peaks = [there(found[name].peak) for name in ("none", *list(hooks)[2:])]
        assert peaks == sorted(peaks, reverse=True)
        loss_fn(ids[:1]).backward()  # makes the gradients
        for name, hook in hooks.items():

            def run(hook: Any = hook) -> None:
                with hook():
                    loss_fn(ids[:1]).backward()

            # `free` memory is not counted
            assert there(found[name].peak) == pytest.approx(peak_of(budget, run), rel=0.02), name
            assert there(found[name].peak) < there(found["none"].peak)
            assert (0.99 if name == "logits" else 1) < there(found[name].work) < 1.4
    assert "fastest: none (the batch fits whole" in str(report)


def test_moved_bytes_are_the_planned_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    model, loss_fn, batch = subject = gpt(16)
    planned = of(plan_of(subject, 0.5, MemoryBudget(2**40))[1])["offload"].moved
    moved = []

    class Noted(HostSlot):
        def __init__(self, tensor: Tensor, way: Any) -> None:
            super().__init__(tensor, way)
            moved.append(tensor.nbytes)

    monkeypatch.setattr("elastic_mbs.escalation.offload.HostSlot", Noted)
    with made("offload", model, batch):
        loss_fn(batch).backward()
    assert planned == pytest.approx(sum(moved) / 16, abs=1)


def test_an_impossible_way_has_its_reason() -> None:
    budget = MemoryBudget(2**40)
    reasons = {
        make: {
            name: way.reason or "" for name, way in of(plan_of(make(16), 0.5, budget)[1]).items()
        }
        for make in (cnn, lstm)
    }
    assert "BatchNorm2d changes its buffer" in reasons[cnn]["checkpoint"]
    assert "has no blocks" in reasons[lstm]["checkpoint"]
    assert {each["offload"] for each in reasons.values()} == {""}
    assert {each["tile"] for each in reasons.values()} == {NOTHING["tile"]}
    assert reasons[cnn]["logits"] == NOTHING["logits"]


def test_the_fastest_way_is_known_from_fits_or_measured_calls() -> None:
    torch.manual_seed(0)
    model, loss_fn, batch = subject = gpt(64)
    budget = MemoryBudget(2**40, track=[model, *batch])
    with budget:
        mbs, report = plan_of(subject, 0.3, budget)
        assert report.fastest is None
        assert {way.seconds for way in report.ways} == {None}
        assert "fastest: not known" in str(report)
        assert plan_of(subject, 1.2, budget)[1].fastest == "none"
        assert plan_of(unet(16), 0, budget, min_micro_batch_size=8)[1].fastest == "offload"
        assert "not even" in str(mbs.plan(loss_fn, batch, budget=1, compare=True)).splitlines()[-1]
        for planned in report.sizes[1:3]:
            mbs.plan(loss_fn, batch, budget=int(there(planned.peak) / 0.94))
            mbs.backward(loss_fn, batch)
        report = mbs.plan(loss_fn, batch, budget=report.capacity, compare=True)
    seconds = {way.name: there(way.seconds) for way in report.ways if way.largest}
    assert report.fastest == min(seconds, key=lambda name: seconds[name])
    assert 1 < there(of(report)["checkpoint"].work) < 1.34
    assert report.sizes[1].seconds == pytest.approx(
        there(mbs.size_models[next(iter(mbs.size_models))].seconds(32)) * 2
    )
    last = str(report).splitlines()[-1]
    assert last.startswith(f"fastest: {report.fastest} (")
    assert "pieces" in last


def test_nothing_is_said_of_ways_that_were_not_asked_for() -> None:
    model, loss_fn, batch = gpt(8)
    report = ElasticMBS(model, **quiet()).plan(loss_fn, batch, budget=2**40)
    assert (report.ways, report.fastest) == ((), None)
    assert "fastest" not in str(report)


positive = st.floats(0.01, 100)


@given(
    alpha=st.integers(2, 1000),
    less=st.floats(0.01, 0.99),
    gamma=positive,
    more=st.floats(1.01, 5),
    delta=positive,
    m=st.integers(1, 50),
)
def test_the_fastest_way_is_chosen_by_p_score_and_p_point(
    alpha: int, less: float, gamma: float, more: float, delta: float, m: int
) -> None:
    # The largest size in the same memory uses all of it.
    beta, other = 10**6, max(1, round(m / less))
    capacity, samples = beta + alpha * m, m * other  # whole pieces either way
    score = (alpha - alpha * m / other) / (gamma * more - gamma)
    point = (capacity - beta) / delta
    assume(other > m and abs(score / point - 1) > 1e-6)
    none, trace = Trace(1, [0], [], flops=10**12), Trace(1, [0], [], flops=round(10**12 * more))
    known = Known((gamma, delta))
    ways = [
        weighed(
            NONE,
            trace=none,
            none=none,
            samples=samples,
            largest=m,
            pieces=other,
            before=other,
            known=known,
        ),
        weighed(
            Step("checkpoint"),
            trace=trace,
            none=none,
            samples=samples,
            largest=other,
            pieces=m,
            before=other,
            known=known,
        ),
    ]
    assert PlanReport(samples, ways=tuple(ways)).fastest == (
        "checkpoint" if score > point else "none"
    )
    assert (delta / gamma > there(ways[1].pays)) == (score > point)


def test_moved_bytes_are_charged_at_the_speed_of_a_copy() -> None:
    none, trace = Trace(2, [0] * 10, [], flops=100), Trace(2, [0] * 20, [], flops=100, moved=1000)
    way = weighed(
        Step("offload"),
        trace=trace,
        none=none,
        samples=8,
        largest=4,
        pieces=2,
        before=4,
        known=Known((1.0, 3.0), 0.002),
    )
    assert way == PlannedWay("offload", 4, 2, 1.0, 500, way.seconds, None)
    assert way.seconds == pytest.approx((1.0 + 500 * 0.002) * 8 + 2 * 3.0 * 2)
    for known in (Known(), Known((1.0, 3.0))):
        assert (
            weighed(
                Step("offload"),
                trace=trace,
                none=none,
                samples=8,
                largest=4,
                pieces=2,
                before=4,
                known=known,
            ).seconds
            is None
        )


class Counted(torch.utils._python_dispatch.TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        self.flops = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.flops += flops_of(func, args, kwargs, out)
        return out


def test_fused_attention_has_the_work_of_its_products() -> None:
    q = torch.randn(2, 4, 8, 16, requires_grad=True)

    def work(attention: Callable[[], Tensor]) -> int:
        with Counted() as counted:
            attention().sum().backward()
        flops: int = counted.flops
        return flops

    products = work(lambda: (q @ q.mT).softmax(-1) @ q)
    assert products > 0
    # the flash kernel computes its scores a second time in backward
    assert 1 <= work(lambda: F.scaled_dot_product_attention(q, q, q)) / products <= 1.25


def test_of_two_ways_of_equal_time_the_first_one_is_chosen() -> None:
    ways = tuple(PlannedWay(name, 4, 2, 1.0, 0, 2.5) for name in ("none", "logits"))
    assert PlanReport(8, ways=ways).fastest == "none"
    assert PlanReport(8, ways=ways[::-1]).fastest == "logits"


@pytest.mark.parametrize("share", [0.3, 1.2])
def test_the_smallest_piece_needs_the_same_in_ways_and_in_the_table(share: float) -> None:
    budget = MemoryBudget(2**40)
    with budget:
        report = plan_of(gpt(8), share, budget)[1]
    none, *others = report.ways
    assert none.peak == report.sizes[-1].peak
    assert all(there(way.peak) <= there(report.usable) for way in others if way.largest)
