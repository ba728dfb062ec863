"""The page: the report of the run, with the co-tenant's moves and the losses of the run without limits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from html import escape
from pathlib import Path

from elastic_mbs.cli.demo.compare import Outcome
from elastic_mbs.cli.demo.console import verdict
from elastic_mbs.cli.report.data import Mark, read_run
from elastic_mbs.cli.report.page import document, section
from elastic_mbs.events import format_bytes
from elastic_mbs.sinks.run_log_reader import open_lines, read_runs


def render(outcome: Outcome, rows: Mapping[str, str], log: Path) -> str:
    """The page as HTML; `rows` are the figures of the summary, and the run is the last one of the log."""
    run = read_runs(open_lines(log))[-1]
    data = read_run(run)
    began = float(run.header["time"])
    moves = []
    for at, move in outcome.notes.moves:
        facts = (("step", str(move.step + 1)), ("left for us", format_bytes(move.left)))
        moves.append(Mark(at - began, "note", move.what, facts, f"{move.what}: {format_bytes(move.left)} left for us"))
    data = replace(
        data,
        title="The run with elastic_mbs",
        marks=sorted([*data.marks, *moves], key=lambda mark: mark.t),
        reference=[(t, loss) for (t, _), loss in zip(data.loss, outcome.reference, strict=True)],
    )
    note = "".join(f"<span><b>{escape(name)}</b> {escape(value)}</span>" for name, value in rows.items())
    return document("elastic_mbs demo", verdict(outcome), section(data, remark=data.about[0][1], opened=True, note=f'<p class="about">{note}</p>'))
