"""Checks of scenarios on records that are made up, and the stress tool's page.

Each check accepts a good record and rejects one that breaks it.
"""

import math
import re
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from stress.record import End, Mark, Needs, Run, Step
from stress.report.data import run_data
from stress.report.page import render
from stress.scenarios import checks
from stress.scenarios.catalogue import Order
from stress.scenarios.processes import failed, judge
from tests.helpers.records import NEEDS, SAME, grow, halves, mark, oom, record, small, step

DIFFERENCES = ("loss", "norm", "weight", "outputs", "whole_loss", "whole_weight")
blind = checks.froze_while_blind
floor = checks.ended_at_the_floor
calm = checks.calm
went_on = partial(checks.went_on_to, steps=8)
FLOOR = "MicroBatchFloorError: no"
LOST, BACK = mark("sensor_lost", 2), mark("sensor_back", 5)
IN_TWOS = [replace(small(i, 2), size=32) for i in range(4, 8)]
KILLED, RESUMED = mark("killed", 5), replace(mark("resumed", 4), at=0.5)


@pytest.mark.parametrize(
    ("check", "run", "said"),
    [
        (went_on, record(end=None), "no end was recorded"),
        (went_on, record(end=End(1000, 1000, 0, "ValueError: no")), "by an error: ValueError: no"),
        (went_on, record([step(0)]), "1 steps of 8"),
        (went_on, record([step(i) for i in (0, 1, 2, 3, 4, 5, 7, 6)]), "8 steps of 8"),
        (checks.exact, record(differences=None), "not compared"),
        (
            checks.covers_every_sample,
            record([step(0, partition=[[0, 16], [8, 32]])]),
            "32 samples once",
        ),
        (checks.covers_every_sample, record([step(0, partition=[[0, 33]])]), "32 samples once"),
        (
            checks.covers_every_sample,
            record([step(0, partition=[[0, 8], [16, 32]])]),
            "32 samples once",
        ),
        (checks.covers_every_sample, record([step(0, partition=[[8, 32]])]), "32 samples once"),
        (checks.covers_every_sample, record([step(0, partition=[])]), "32 samples once"),
        (
            checks.covers_every_sample,
            record([step(0, partition=[[0, 16], [16, 16], [16, 31]])]),
            "32 samples once",
        ),
        (checks.nothing_held, record(end=End(1256, 1000, 0)), "256 B more are held"),
        (checks.nothing_happened, record(marks=[grow(0), oom(3)]), "step 3: oom"),
        (checks.nothing_happened, record([small(0)]), "in 2 pieces at the end"),
        (checks.something_happened, record(), "nothing was shown"),
        (checks.broken_up, record(), "nothing was shown"),
        (
            checks.cut_up,
            record([small(0), step(1)]),
            "the whole batch went through at once in step 1, so nothing was shown",
        ),
        (
            checks.bounded,
            record(marks=[oom(0), oom(4), oom(5)]),
            "3 out-of-memory errors, where the moves of memory explain 2",
        ),
        (
            checks.bounded_by_halvings,
            record([small(0)], marks=[oom(0)] * 4),
            "4 out-of-memory errors, where the halvings to 16 explain 3",
        ),
        (checks.grown_back, record([small(0)]), "2 pieces of up to 16 instead of 1"),
        (floor, record(end=End(1000, 1000, 0)), "no error was raised"),
        (
            floor,
            record(end=End(1000, 1000, 0, "RuntimeError: no", True, 1.0)),
            "ended by RuntimeError",
        ),
        (
            floor,
            record(end=End(1000, 1000, 0, FLOOR, False, 1.0)),
            "not as before the call",
        ),
        (floor, record(end=End(1000, 1000, 0, FLOOR, True, 99.0)), "after 99.0 s"),
        (blind, record(marks=[LOST, grow(3), BACK, grow(6)]), "step 3: it grew without a sensor"),
        (blind, record(marks=[LOST, BACK]), "nothing grew after the sensor was back"),
        (blind, record(marks=[LOST, grow(6)]), "what was said is ['sensor_lost']"),
        (calm, record(marks=[oom(i) for i in range(3)]), "3 steps ran out of memory"),
        (checks.optimizer_struck, record(), "never ran out of memory"),
        (checks.optimizer_struck, record([]), "was not measured"),
        (checks.evaluated, record(), "nothing was evaluated"),
        (checks.evaluated, record(marks=[mark("eval", 1)]), "nothing was evaluated"),
        (checks.resumed, record(), "killed and resumed never happened"),
        (
            checks.resumed,
            record(marks=[KILLED, mark("resumed", 0)]),
            "0 steps before the checkpoint",
        ),
        (
            checks.resumed,
            record([*map(step, range(4)), *IN_TWOS], marks=[KILLED, RESUMED]),
            "learn its size",
        ),
        (
            checks.resumed,
            record(
                [replace(small(i, 8), size=8 if i < 4 else 4) for i in range(8)],
                marks=[KILLED, RESUMED],
            ),
            "learn its size",
        ),
        (checks.resumed, record(marks=[KILLED, RESUMED, oom(6)]), "ran out after it was resumed"),
    ],
)
def test_a_record_that_breaks_a_check_is_one_complaint(
    check: checks.Check, run: Run, said: str
) -> None:
    (complaint,) = check(run)
    assert said in complaint


@pytest.mark.parametrize(
    ("check", "run"),
    [
        *(
            (check, record())
            for check in (went_on, checks.exact, checks.covers_every_sample, checks.nothing_held)
        ),
        *(
            (check, record())
            for check in (checks.nothing_happened, checks.bounded, checks.grown_back)
        ),
        (checks.covers_every_sample, record([step(0, partition=[[16, 32], [0, 16]])])),
        # a process limit counts the interpreter's memory
        (checks.nothing_held, record(end=End(1256, 1000, 0), kind="rlimit")),
        (checks.nothing_held, record(end=None)),
        (checks.something_happened, record([step(0, ooms=1)])),
        (checks.broken_up, record(expandable=True)),  # expandable segments need not fail
        (checks.broken_up, record([step(0, ooms=1)])),
        (checks.cut_up, record([small(0)])),
        (checks.bounded, record(marks=[oom(0), oom(4)])),
        (checks.bounded, record([])),
        (checks.bounded_by_halvings, record([small(0)], marks=[oom(0)] * 3)),
        (checks.bounded_by_halvings, record([])),
        (checks.grown_back, record([small(0, capacity=2900)])),
        (checks.grown_back, record([step(0, capacity=None)])),
        (checks.grown_back, record([])),
        # large batches took another algorithm, which needs less; and steps took a little more than
        # their pieces by hand
        (
            checks.grown_back,
            record([small(0, capacity=4000)], needs=replace(NEEDS, peaks=[1100, 1800, 2600, 2600])),
        ),
        (checks.grown_back, record([small(0, peak=3600)])),
        (floor, record(end=End(1000, 1000, 3, FLOOR, True, 1.0))),
        (blind, record(marks=[LOST, BACK, grow(6)])),
        (calm, record(marks=[oom(i) for i in range(2)])),
        (calm, record([])),
        (checks.optimizer_struck, record(marks=[mark("optimizer", 0)])),
        (checks.evaluated, record(marks=[mark("eval", 1)], differences=replace(SAME, outputs=0.0))),
        (checks.resumed, record(marks=[KILLED, RESUMED])),
    ],
)
def test_a_good_record_and_what_a_check_allows_is_no_complaint(
    check: checks.Check, run: Run
) -> None:
    assert not list(check(run))


@pytest.mark.parametrize("field", DIFFERENCES)
@pytest.mark.parametrize("value", [1e-6, math.inf, math.nan])
def test_a_difference_is_a_complaint(field: str, value: float) -> None:
    differences = replace(SAME, **{field: value})
    (complaint,) = checks.exact(record(differences=differences))
    assert "differs by" in complaint
    assert "float64" in complaint
    assert math.isnan(differences.largest) == math.isnan(value), (
        "max() passes over a NaN that is not its first value"
    )


# from 32 to 8: two halvings, one more; two at the start, one for the return
def test_a_fall_of_memory_explains_its_halvings_and_one_more() -> None:
    assert (
        checks.allowed_ooms(record([step(i, others=3200 if 2 <= i < 5 else 0) for i in range(8)]))
        == 2 + 3 + 1
    )
    leak = [step(0), small(1, 16, others=1200), small(2, 16, others=1600), small(3, 8, others=2800)]
    assert checks.allowed_ooms(record(leak)) == 2 + 2 + 2, "twice below what ran"
    assert checks.allowed_ooms(record([step(0), step(1, lowest=1800)])) == 2 + 3
    assert checks.allowed_ooms(record([step(0), step(1, elements=64)])) == 4, (
        "each shape class learns for itself"
    )
    assert checks.allowed_ooms(record(kind="cuda")) == 2 * 2 + 3


def test_a_process_that_is_pushed_out_by_the_other_is_a_complaint() -> None:
    first, second = record(kind="shim"), record(kind="shim", process=1)
    assert not list(checks.fair([first, second]))
    assert "below a third" in next(
        checks.fair([first, replace(second, steps=[small(i, 2) for i in range(8)])])
    )
    assert "never ran while" in next(checks.fair([first, replace(second, began=100.0)]))


# ---------------------------------------------------------------------- verdicts


def judged(scenario: str, run: Run, steps: int = 18, model: str = "mine.py:make") -> Run:
    (found,) = judge(
        [replace(run, scenario=scenario, model=model)], Order(scenario, "budget", model, 0, steps)
    )
    return found


FLAT: dict[str, Any] = {
    "needs": replace(NEEDS, sizes=[1, 2], peaks=[1100, 1105], samples=2),
    "end": None,
}
STEEP: dict[str, Any] = {
    "needs": replace(NEEDS, sizes=[1, 2], peaks=[1100, 2200], samples=2),
    "end": None,
}
FEW_PIECES = "there is room for the batch, but it still runs in 8 pieces at the end"


@pytest.mark.parametrize(
    ("complaint", "needs", "unshown"),
    [
        ("memory never ran out, so nothing was shown", STEEP, "memory never ran out"),
        (FEW_PIECES, FLAT, "takes only 0.5% more"),
        (FEW_PIECES, STEEP, None),
        (
            FEW_PIECES,
            {"needs": replace(NEEDS, samples=1, sizes=[1], peaks=[200]), "end": None},
            "its batch is a single sample",
        ),
        (
            FEW_PIECES,
            {"needs": replace(NEEDS, samples=3, sizes=[2], peaks=[200]), "end": None},
            "its batch of 3 cannot be cut into pieces of 2",
        ),
        ("unexpected error: TypeError: mine", FLAT, None),
        ("unexpected error: OptimizerStepError: it does not fit", FLAT, None),
    ],
)
def test_a_users_model_that_shows_nothing_is_told_and_not_failed(
    complaint: str, needs: dict[str, Any], unshown: str | None
) -> None:
    found = judged("cliff", record(complaints=[complaint], **needs))
    assert found.passed is (unshown is not None)
    assert found.complaints == ([] if unshown else [complaint])
    assert (unshown or "") in found.unshown
    assert found.verdict != "ok"


def test_a_process_that_dies_is_a_failed_record_also_of_the_users_model() -> None:
    order = Order("cliff", "shim", "mine.py:make", 0, 6)
    (found,) = judge([failed(order, "the job was ended by SIGSEGV")], order)
    assert (found.passed, found.complaints) == (False, ["the job was ended by SIGSEGV"])


def test_a_batch_that_went_through_whole_is_no_proof() -> None:
    # under the process limit a user's small model ran its whole batch at once, without a failure,
    # and `too_big` said ok
    found = judged("too_big", record([small(0), step(1)]))
    assert "the whole batch went through at once in step 1, so nothing was shown" in (
        found.unshown,
        *found.complaints,
    )
    assert found.verdict != "ok"


def test_a_late_growth_in_few_steps_is_excused() -> None:
    def late(count: int) -> list[Step]:
        return [small(i, peak=4200) for i in range(count)]

    found = judged("sensor_dies", record(late(8)), 8, "wide")
    assert found.passed
    assert found.unshown.startswith("8 steps are too few for it (18 are enough): ")
    assert not judged(
        "sensor_dies", record(late(8), differences=replace(SAME, loss=0.5)), 8, "wide"
    ).passed, "a gradient is right from the start"
    assert not judged("sensor_dies", record(late(18)), 18, "wide").passed


MIB = 2**20


def run(scenario: str = "cliff", kind: str = "budget", **changes: Any) -> Run:
    whole = {
        "at": 5.0,
        "seconds": 0.5,
        "capacity": 100 * MIB,
        "live": 10 * MIB,
        "peak": 60 * MIB,
        "samples": 16,
        "partition": halves(8, 16),
    }
    steps = [
        step(0, **whole | {"size": 16, "loss": 2.0}),
        step(
            1,
            **whole
            | {
                "at": 6.0,
                "size": 8,
                "loss": 1.9,
                "others": 50 * MIB,
                "ooms": 1,
                "replayed": 16,
                "time_lost": 0.1,
                "lowest": 20 * MIB,
            },
        ),
        step(2, **whole | {"at": 7.0, "size": 16, "loss": 1.8}),
    ]
    marks = [
        Mark(6.2, 1, "oom", "in forward", 16, 8),
        Mark(6.1, 1, "move", "a co-tenant holds 50 MiB"),
        Mark(7.4, 2, "grow", "it fits", 8, 16),
    ]
    made = record(
        steps,
        scenario=scenario,
        kind=kind,
        marks=marks,
        end=End(10 * MIB, 10 * MIB, 1),
        passed=True,
    )
    return replace(made, **changes)


FEW = run().steps[:2]
BROKEN = {
    "no steps": run(steps=[], marks=[], end=None, differences=None, needs=Needs(16, 0, [], [])),
    "only a mark": run(steps=[], marks=[Mark(1.0, 0, "error", "it ended")]),
    "no limit": run(steps=[replace(each, capacity=None) for each in FEW]),
    "not a number": run(
        steps=[replace(FEW[0], loss=math.nan), replace(FEW[1], loss=math.inf)],
        differences=replace(SAME, loss=math.nan),
    ),
    "no time": run(steps=[replace(each, seconds=0.0) for each in FEW]),
    "others above all": run(steps=[replace(FEW[0], others=200 * MIB, lowest=-5)]),
    "two lengths": run(steps=[FEW[0], replace(FEW[1], elements=64, size=4)]),
    "a mark of a step that was not made": run(
        marks=[Mark(9.0, 7, "oom", "in the last one", 16, 8)]
    ),
    "failures that were not counted": run(kind="rlimit", end=End(0, 0, None)),
    "a mark without a size before": run(
        marks=[
            Mark(6.0, 1, "resumed", "from its checkpoint", None, 8),
            Mark(5.0, 0, "oom", "first", None, 4),
        ]
    ),
}


@pytest.mark.parametrize("name", list(BROKEN))
def test_every_record_has_a_page_that_needs_nothing_else(name: str) -> None:
    page = render([run(), BROKEN[name]])
    assert all(
        f'{link}"' in page for link in ('href="#run-1', 'href="#run-2', 'id="run-1', 'id="run-2')
    )
    assert all(
        page.count(f"<{tag}") == page.count(f"</{tag}>")
        for tag in ("details", "table", "tr", "td", "svg", "section")
    )
    assert not re.search(
        r"(?i)[\"'> (]nan[\"'%< ]|infinity",
        page.partition("<main>")[2].partition("<script>")[0].replace(">nan<", ""),
    ), name
    assert not re.search(r"https?://(?!www\.w3\.org)|@import| src=", page)


def test_lines_begin_with_the_first_step_and_hold_the_records_figures() -> None:
    data = run_data(run())
    assert data.memory.total == 100 * MIB
    assert data.memory.capacity == [
        (0.0, 100.0 * MIB),
        (1.0, 20.0 * MIB),
        (1.5, 50.0 * MIB),
        (2.0, 100.0 * MIB),
    ]
    assert data.memory.peak[0] == (0.0, 60.0 * MIB)
    times = [(round(t, 6), size) for t, size in data.sizes["micro-batch"]]
    assert times == [
        (0.0, 16),
        (0.5, 16),
        (1.0, 16),
        (1.2, 8),
        (1.5, 8),
        (2.0, 8),
        (2.4, 16),
        (2.5, 16),
    ]
    assert [(round(t, 6), loss) for t, loss in data.loss] == [(0.5, 2.0), (1.5, 1.9), (2.5, 1.8)]
    assert [mark.kind for mark in data.marks] == ["oom", "grow"], (
        "the memory's lane shows the moves"
    )
    ended = run_data(run(end=End(0, 0, 5, "MicroBatchFloorError: it does not fit", True)))
    assert ended.tiles[0] == ("ended by", "MicroBatchFloorError", "it does not fit")


def test_a_failure_is_open_and_what_comes_from_a_record_is_escaped() -> None:
    page = render(
        [
            run("<q>", model="<u>"),
            run(passed=False, complaints=["<i>alert(1)</i>"]),
            run(unshown="memory <never> ran out"),
        ]
    )
    assert "Stress test: 1 of 3 failed" in page
    assert re.findall(r'<details class="run" id="(run-\d)" open>', page) == ["run-2"]
    assert not any(tag in page for tag in ("<i>", "<q>", "<u>", "<never>"))
