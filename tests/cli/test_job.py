"""The logs of a job of several ranks: one run of one page, and one panel."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from elastic_mbs.cli import command
from elastic_mbs.cli.report.job import by_job, read_job
from elastic_mbs.cli.report.svg import lanes
from elastic_mbs.sinks.log_reader import files_of, read_log
from elastic_mbs.sinks.run_log import event_line, header_line, path_of_rank
from tests.helpers.events import KEY, RUN


def logs(folder: Path, *, ranks: int = 2, late: float = 1.5) -> Path:
    """Write the logs of two starts of a job; each rank begins later than the one before."""
    path = folder / "run.jsonl"
    for rank in range(ranks):
        began = 1.7e9 + late * rank
        lines = []
        for job in ("first", "second"):
            run = f"{job}-{rank}"
            about = {"name": "my job", "device": "cpu", "job": job, "rank": rank, "ranks": ranks}
            lines.append(header_line(run, 0.0, began, about))
            lines += [event_line(event, run, at, began + at) for at, event in RUN]
        path_of_rank(path, rank).write_bytes(b"".join(lines))
    return path


def test_the_files_of_a_log_are_its_own_and_those_of_the_ranks(tmp_path: Path) -> None:
    path = logs(tmp_path, ranks=11)
    (tmp_path / "run.rank.jsonl").touch()
    (tmp_path / "rerun.rank1.jsonl").touch()
    names = [file.name for file in files_of(path)]
    assert names == [f"run.rank{rank}.jsonl" for rank in range(11)]  # in order of the ranks
    path.touch()
    assert files_of(path)[0] == path
    assert files_of(tmp_path / "none" / "run.jsonl") == [tmp_path / "none" / "run.jsonl"]


def test_the_ranks_of_a_job_are_one_run_on_one_time_axis(tmp_path: Path) -> None:
    runs = [run for file in files_of(logs(tmp_path)) for run in read_log(file)]
    jobs = by_job(runs)
    assert [[run.id for run in job] for job in jobs] == [
        ["first-0", "first-1"],
        ["second-0", "second-1"],
    ]
    job, alone = read_job(jobs[0]), read_job([jobs[0][0]])
    assert len(job.sizes) == 4
    first, second = job.sizes[f"rank 0, {KEY}"], job.sizes[f"rank 1, {KEY}"]
    assert [(t + 1.5, size) for t, size in first] == second
    assert job.seconds == alone.seconds + 1.5
    assert job.loss == alone.loss  # of the global batch
    assert len(job.marks) == job.events == 2 * alone.events
    figures, own = ({name: value for name, value, _ in tiles} for tiles in (job.tiles, alone.tiles))
    assert int(figures["OOMs survived"]) == 2 * int(own["OOMs survived"])
    assert figures["calls"] == own["calls"]
    assert dict(job.about)["ranks"] == "0, 1 of 2"
    assert [lane.name for lane in lanes(job)] == [
        "Memory of rank 0",
        "Memory of rank 1",
        "Micro-batch size",
        "Throughput",
        "Loss",
    ]


def test_a_report_shows_a_job_as_one_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.main(["report", str(logs(tmp_path))]) == 0
    page = (tmp_path / "run.html").read_text()
    assert "2 runs" in page
    assert "Memory of rank 1" in page
    assert "rank 1: out of memory in backward" in page
    assert capsys.readouterr().out.strip() == str(tmp_path / "run.html")


def test_a_panel_shows_a_row_for_each_rank(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    monkeypatch.setattr(time, "time", lambda: 1.7e9 + 10.0)
    monkeypatch.setenv("COLUMNS", "120")
    assert command.main(["watch", str(logs(tmp_path)), "--once"]) == 0
    out = capsys.readouterr().out
    assert "my job · 2 of 2 ranks" in out
    for rank in (0, 1):
        assert f"rank {rank}: out of memory in AdamW.step()" in out  # the latest of all
    rows = [line.split() for line in out.splitlines()]
    assert sum(row[1:2] in (["0"], ["1"]) for row in rows) == 2
