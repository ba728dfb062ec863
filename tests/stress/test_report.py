"""The stress tool's page and picture, from records that are made up."""

from __future__ import annotations

import builtins
import math
import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from elastic_mbs.errors import UsageError
from stress.record import Differences, End, Mark, Needs, Run, Step
from stress.report import write_html, write_png
from stress.report.data import MOVES, overview, run_data
from stress.report.page import render

MIB = 2**20


def step(number: int, size: int = 8, **changes: Any) -> Step:
    plain: dict[str, Any] = {
        "step": number,
        "at": 5.0 + number,
        "seconds": 0.5,
        "capacity": 100 * MIB,
        "others": 0,
        "live": 10 * MIB,
        "peak": 60 * MIB,
        "samples": 16,
        "elements": 32,
        "size": size,
        "partition": [[0, 8], [8, 16]],
        "ooms": 0,
        "replayed": 0,
        "loss": 2.0 - number / 10,
        "norm": 1.0,
        "time_lost": 0.0,
    }
    return Step(**{**plain, **changes})


def run(scenario: str = "cliff", kind: str = "budget", **changes: Any) -> Run:
    plain: dict[str, Any] = {
        "model": "mlp",
        "dtype": "float64",
        "seed": 3,
        "needs": Needs(16, 10 * MIB, [1, 16], [12 * MIB, 60 * MIB]),
        "steps": [step(0, 16), step(1, 8, others=50 * MIB, ooms=1, replayed=16, time_lost=0.1), step(2, 16)],
        "marks": [
            Mark(6.2, 1, "oom", "out of memory in forward", 16, 8),
            Mark(6.1, 1, "move", "the co-tenant holds 50 MiB"),
            Mark(7.4, 2, "grow", "it is predicted to fit", 8, 16),
        ],
        "end": End(10 * MIB, 10 * MIB, 1),
        "differences": Differences(1e-15, 2e-15, 3e-14, 1e-12, 1e-10),
        "seconds": 2.0,
        "passed": True,
    }
    return Run(scenario, kind, **{**plain, **changes})


BROKEN = {
    "no steps": run(steps=[], marks=[], end=None, differences=None, needs=Needs(16, 0, [], [])),
    "only a mark": run(steps=[], marks=[Mark(1.0, 0, "error", "it ended")]),
    "no limit": run(steps=[step(0, capacity=None), step(1, capacity=None)]),
    "not a number": run(steps=[step(0, loss=math.nan), step(1, loss=math.inf)], differences=Differences(math.nan, 0.0, 0.0, 1e-12, 1e-12)),
    "one step": run(steps=[step(0)]),
    "no time": run(steps=[step(0, seconds=0.0), step(1, seconds=0.0)]),
    "others above all": run(steps=[step(0, others=200 * MIB, lowest=-5)]),
    "failed": run(passed=False, complaints=["<script>alert(1)</script>", "3 & 4"]),
    "two lengths": run(steps=[step(0), step(1, elements=64, size=4), step(2)]),
    "a mark of a step that was not made": run(marks=[Mark(9.0, 7, "oom", "in the last one", 16, 8)]),
    "failures that were not counted": run(kind="rlimit", end=End(0, 0, None)),
    "a mark without a size before": run(marks=[Mark(6.0, 1, "resumed", "from its checkpoint", None, 8), Mark(5.0, 0, "oom", "first", None, 4)]),
}


class Closed(HTMLParser):
    """Checks that elements are closed in their order, and collects anchors and links."""

    VOID = frozenset({"meta", "wbr", "br"})

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.anchors: set[str] = set()
        self.links: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in self.VOID:
            self.open.append(tag)
        given = dict(attrs)
        if "id" in given:
            assert given["id"] not in self.anchors
            self.anchors.add(str(given["id"]))
        if tag == "a":
            self.links.add(str(given["href"]).removeprefix("#"))

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """An element that is empty."""

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


@pytest.mark.parametrize("name", list(BROKEN))
def test_every_record_has_a_page_and_a_picture(name: str, tmp_path: Path) -> None:
    runs = [run(), BROKEN[name]]
    page = render(runs)
    parsed = Closed()
    parsed.feed(page)
    assert parsed.open == []
    assert parsed.links == {"run-1", "run-2"} <= parsed.anchors
    assert not re.search(r"(?i)[\"'> (]nan[\"'%< ]|infinity", page.partition("<main>")[2].partition("<script>")[0].replace(">nan<", "")), name
    write_png(runs, tmp_path / "runs.png")
    assert (tmp_path / "runs.png").read_bytes().startswith(b"\x89PNG")


def test_no_runs_have_a_page_and_a_picture_too(tmp_path: Path) -> None:
    assert "nothing was run" in render([])
    write_png([], tmp_path / "runs.png")
    assert (tmp_path / "runs.png").stat().st_size > 1000


def test_the_page_needs_nothing_else() -> None:
    page = render([run()])
    assert not re.search(r"https?://(?!www\.w3\.org)", page)
    assert "@import" not in page
    assert " src=" not in page


def test_a_failure_stands_out_by_a_word_is_open_and_tells_what_was_wrong() -> None:
    page = render([run(), BROKEN["failed"], run("steady")])
    assert "Stress test: 1 of 3 failed" in page
    assert page.count("✗ FAILED") == 2  # in the table and above its lanes
    assert re.findall(r'<details class="run" id="(run-\d)" open>', page) == ["run-2"]
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in page
    assert "<script>alert(1)" not in page
    assert "3 &amp; 4" in page
    page = render([run(), run("steady")])
    assert "all 2 passed" in page
    assert re.findall(r'<details class="run" id="(run-\d)" open>', page) == ["run-1"]


def test_a_run_that_shows_nothing_says_so_on_the_page_and_is_not_counted_as_passed() -> None:
    nothing = run("sawtooth", unshown="memory <never> ran out")
    page = render([run(), nothing])
    assert "Stress test: 1 of 2 passed, 1 showed nothing" in page
    assert page.count("not shown") == 2  # in the table and above its lanes
    assert "It shows nothing: memory &lt;never&gt; ran out" in page
    assert overview([run(), nothing])[0][:2] == ("runs passed", "1 of 2")


def test_names_of_the_users_are_escaped() -> None:
    page = render([run("<q>", "<i>", model="<u>", marks=[Mark(6.0, 1, "<s>", "<em>")])])
    for tag in ("<q>", "<i>", "<u>", "<s>", "<em>"):
        assert tag not in page


def test_lines_begin_with_the_first_step_and_hold_what_the_record_says() -> None:
    data = run_data(run(steps=[step(0, 16), step(1, 8, others=50 * MIB, lowest=20 * MIB, time_lost=0.1), step(2, 16)]))
    assert data.memory.total == 100 * MIB
    assert data.memory.capacity == [(0.0, 100.0 * MIB), (1.0, 20.0 * MIB), (1.5, 50.0 * MIB), (2.0, 100.0 * MIB)]
    assert data.memory.peak[0] == (0.0, 60.0 * MIB)
    times = [(round(t, 6), size) for t, size in data.sizes["micro-batch"]]
    assert times == [(0.0, 16), (0.5, 16), (1.0, 16), (1.2, 8), (1.5, 8), (2.0, 8), (2.4, 16), (2.5, 16)]
    assert [(round(t, 6), loss) for t, loss in data.loss] == [(0.5, 2.0), (1.5, 1.9), (2.5, 1.8)]
    assert [(mark.kind, mark.size) for mark in data.marks] == [("note", None), ("oom", 8), ("grow", 16)]
    assert data.lost[2] == (1.5, 0.2)
    assert data.rates["train"][0] == (0.0, 32.0)
    assert data.seconds == 2.5


def test_inputs_of_another_length_have_a_line_of_their_own() -> None:
    data = run_data(BROKEN["two lengths"])
    assert sorted(data.sizes) == ["samples of 32 numbers", "samples of 64 numbers"]


def test_a_limit_that_moves_all_the_time_is_drawn_and_not_marked() -> None:
    moves = [Mark(5.0 + number / 10, 0, "move", "the limit moves") for number in range(MOVES + 1)]
    assert len(run_data(run(marks=moves[:-1])).marks) == MOVES
    assert run_data(run(marks=moves)).marks == []


def test_the_overview_counts_real_failures_apart_and_names_the_worst_run() -> None:
    runs = [run(), run(kind="shim", end=End(0, 0, 7)), run("leak", "rlimit", end=None, differences=Differences(1e-9, 0.0, 0.0, 1e-12, 1e-12))]
    told = {name: (value, remark) for name, value, remark in overview(runs)}
    assert told["runs passed"] == ("3 of 3", "budget 1, shim 1, rlimit 1")
    assert told["allocator failures"][0] == "7"
    assert told["largest difference"] == ("1.0e-09", "leak · rlimit")
    assert told["OOMs survived"][0] == "3"
    runs = [*runs, run("sawtooth", differences=Differences(math.nan, 0.0, 0.0, 1e-12, 1e-12))]
    assert {name: remark for name, _, remark in overview(runs)}["largest difference"] == "sawtooth · budget"


def test_an_error_that_ended_the_run_is_told() -> None:
    data = run_data(run("one_sample_too_big", end=End(0, 0, 5, error="MicroBatchFloorError: a micro-batch of 1 does not fit", restored=True)))
    assert data.tiles[0] == ("ended by", "MicroBatchFloorError", "a micro-batch of 1 does not fit")


def test_where_nothing_can_be_written_one_line_says_so(tmp_path: Path) -> None:
    for option, write in (("--html", write_html), ("--png", write_png)):
        with pytest.raises(UsageError, match=rf"{option} .*nowhere") as told:
            write([run()], tmp_path / "nowhere" / "runs")
        assert len(str(told.value).splitlines()) == 1


def test_without_matplotlib_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain_import = builtins.__import__

    def without(name: str, *rest: Any, **options: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return plain_import(name, *rest, **options)

    monkeypatch.delitem(sys.modules, "stress.report.picture", raising=False)
    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(UsageError, match=r"elastic-mbs\[plot\]"):
        write_png([run()], tmp_path / "runs.png")
    write_html([run()], tmp_path / "runs.html")
    assert (tmp_path / "runs.html").read_text(encoding="utf-8").startswith("<!DOCTYPE html>")
