"""The page: all runs in a table, then each with the lanes of the report."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from importlib import resources
from pathlib import Path

from elastic_mbs import __version__
from elastic_mbs.cli.report.page import document, section, tiles
from elastic_mbs.cli.report.scale import duration

from ..record import Run, count
from .data import difference, overview, run_data, sizes

KINDS = {
    "budget": "live tensors are counted",
    "shim": "the allocator itself fails",
    "rlimit": "the limit of the process is moved",
    "cuda": "a GPU, shared with another process",
}
_BADGES = {
    "ok": '<span class="badge passed">✓ passed</span>',
    "not shown": '<span class="badge">– not shown</span>',
    "FAILED": '<span class="badge failed">✗ FAILED</span>',
}


def write_html(runs: Sequence[Run], path: Path) -> None:
    """Writes the runs as one HTML file that needs nothing else. OSError where it cannot be written."""
    path.write_text(render(runs), encoding="utf-8")


def render(runs: Sequence[Run]) -> str:
    """The runs as HTML. Everything that comes from them is escaped."""
    failed = [number for number, run in enumerate(runs) if not run.passed]
    head = f'<section class="run overview"><dl class="tiles">{tiles(overview(runs))}</dl>{_table(runs)}</section>'
    sections = [
        section(
            run_data(run),
            remark=f"{run.kind} · {run.model}",
            opened=number in (failed or [0]),
            name=f"run-{number + 1}",
            badge=_BADGES[run.verdict],
            note=_complaints(run),
        )
        for number, run in enumerate(runs)
    ]
    verdict = f"{len(failed)} of {len(runs)} failed" if failed else count(runs) if runs else "nothing was run"
    style = resources.files(__package__).joinpath("page.css").read_text(encoding="utf-8")
    subtitle = f"elastic_mbs {__version__} · training while memory runs out"
    return document(f"Stress test: {verdict}", subtitle, head + "".join(sections), style=style)


def _table(runs: Sequence[Run]) -> str:
    names = ("verdict", "scenario", "kind", "steps", "OOMs", "replayed", "sizes", "difference", "time lost", "seconds")
    looks = ("", "", "", "n wide", "n", "n wide", "n wide", "n", "n wide", "n wide")
    head = "".join(f'<th class="{look}">{name}</th>' for name, look in zip(names, looks, strict=True))
    rows = []
    for number, run in enumerate(runs):
        link = f'<a href="#run-{number + 1}">{escape(run.title).replace("_", "_<wbr>")}</a>'
        figures = (f"{len(run.steps):,}", f"{run.ooms:,}", f"{run.replayed:.1%}", sizes(run), difference(run), duration(run.time_lost))
        values = (_BADGES[run.verdict], link, *map(escape, (run.kind, *figures, f"{run.seconds:.1f}")))
        cells = "".join(f'<td class="{look}">{value}</td>' for value, look in zip(values, looks, strict=True))
        rows.append(f'<tr class="{"" if run.passed else "failed"}">{cells}</tr>')
    kinds = [f"<span><b>{escape(kind)}</b> {escape(KINDS.get(kind, ''))}</span>" for kind in dict.fromkeys(run.kind for run in runs)]
    table = f'<table class="runs"><thead><tr>{head}</tr></thead><tbody>{"".join(rows)}</tbody></table>'
    return f'<div class="scroll">{table}</div><p class="about kinds">{"".join(kinds)}</p>' if runs else ""


def _complaints(run: Run) -> str:
    if run.verdict == "not shown":
        return f'<p class="about">It shows nothing: {escape(run.unshown)}</p>'
    lines = "".join(f"<li>{escape(complaint)}</li>" for complaint in run.complaints)
    return f'<ul class="complaints">{lines}</ul>' if lines else ""
