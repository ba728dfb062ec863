"""The stress tool's page, from records that are made up."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from typing import Any

import pytest

from stress.record import End, Mark, Needs, Run
from stress.report.data import run_data
from stress.report.page import render
from tests.helpers.records import SAME, halves, record, step

MIB = 2**20


def run(scenario: str = "cliff", kind: str = "budget", **changes: Any) -> Run:
    whole = {"at": 5.0, "seconds": 0.5, "capacity": 100 * MIB, "live": 10 * MIB, "peak": 60 * MIB, "samples": 16, "partition": halves(8, 16)}
    steps = [
        step(0, **whole | {"size": 16, "loss": 2.0}),
        step(1, **whole | {"at": 6.0, "size": 8, "loss": 1.9, "others": 50 * MIB, "ooms": 1, "replayed": 16, "time_lost": 0.1, "lowest": 20 * MIB}),
        step(2, **whole | {"at": 7.0, "size": 16, "loss": 1.8}),
    ]
    marks = [Mark(6.2, 1, "oom", "in forward", 16, 8), Mark(6.1, 1, "move", "a co-tenant holds 50 MiB"), Mark(7.4, 2, "grow", "it fits", 8, 16)]
    made = record(steps, scenario=scenario, kind=kind, marks=marks, end=End(10 * MIB, 10 * MIB, 1), passed=True)
    return replace(made, **changes)


FEW = run().steps[:2]
BROKEN = {
    "no steps": run(steps=[], marks=[], end=None, differences=None, needs=Needs(16, 0, [], [])),
    "only a mark": run(steps=[], marks=[Mark(1.0, 0, "error", "it ended")]),
    "no limit": run(steps=[replace(each, capacity=None) for each in FEW]),
    "not a number": run(steps=[replace(FEW[0], loss=math.nan), replace(FEW[1], loss=math.inf)], differences=replace(SAME, loss=math.nan)),
    "no time": run(steps=[replace(each, seconds=0.0) for each in FEW]),
    "others above all": run(steps=[replace(FEW[0], others=200 * MIB, lowest=-5)]),
    "two lengths": run(steps=[FEW[0], replace(FEW[1], elements=64, size=4)]),
    "a mark of a step that was not made": run(marks=[Mark(9.0, 7, "oom", "in the last one", 16, 8)]),
    "failures that were not counted": run(kind="rlimit", end=End(0, 0, None)),
    "a mark without a size before": run(marks=[Mark(6.0, 1, "resumed", "from its checkpoint", None, 8), Mark(5.0, 0, "oom", "first", None, 4)]),
}


@pytest.mark.parametrize("name", list(BROKEN))
def test_every_record_has_a_page_that_needs_nothing_else(name: str) -> None:
    page = render([run(), BROKEN[name]])
    assert all(f'{link}"' in page for link in ('href="#run-1', 'href="#run-2', 'id="run-1', 'id="run-2'))
    assert all(page.count(f"<{tag}") == page.count(f"</{tag}>") for tag in ("details", "table", "tr", "td", "svg", "section"))
    assert not re.search(r"(?i)[\"'> (]nan[\"'%< ]|infinity", page.partition("<main>")[2].partition("<script>")[0].replace(">nan<", "")), name
    assert not re.search(r"https?://(?!www\.w3\.org)|@import| src=", page)


def test_lines_begin_with_the_first_step_and_hold_the_records_figures() -> None:
    data = run_data(run())
    assert data.memory.total == 100 * MIB
    assert data.memory.capacity == [(0.0, 100.0 * MIB), (1.0, 20.0 * MIB), (1.5, 50.0 * MIB), (2.0, 100.0 * MIB)]
    assert data.memory.peak[0] == (0.0, 60.0 * MIB)
    times = [(round(t, 6), size) for t, size in data.sizes["micro-batch"]]
    assert times == [(0.0, 16), (0.5, 16), (1.0, 16), (1.2, 8), (1.5, 8), (2.0, 8), (2.4, 16), (2.5, 16)]
    assert [(round(t, 6), loss) for t, loss in data.loss] == [(0.5, 2.0), (1.5, 1.9), (2.5, 1.8)]
    assert [mark.kind for mark in data.marks] == ["oom", "grow"], "the memory's lane shows the moves"
    ended = run_data(run(end=End(0, 0, 5, "MicroBatchFloorError: it does not fit", True)))
    assert ended.tiles[0] == ("ended by", "MicroBatchFloorError", "it does not fit")


def test_a_failure_is_open_and_what_comes_from_a_record_is_escaped() -> None:
    page = render([run("<q>", model="<u>"), run(passed=False, complaints=["<i>alert(1)</i>"]), run(unshown="memory <never> ran out")])
    assert "Stress test: 1 of 3 failed" in page
    assert re.findall(r'<details class="run" id="(run-\d)" open>', page) == ["run-2"]
    assert not any(tag in page for tag in ("<i>", "<q>", "<u>", "<never>"))
