"""Page of a stress run: all runs in a table, then each with the lanes of the report."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from importlib import resources

from elastic_mbs import __version__
from elastic_mbs.cli.report.page import document, section
from elastic_mbs.cli.report.scale import duration

from ..record import Run, count
from .data import difference, run_data, sizes

_BADGES = {
    "ok": '<span class="badge passed">✓ passed</span>',
    "not shown": '<span class="badge">– not shown</span>',
    "FAILED": '<span class="badge failed">✗ FAILED</span>',
}
_COLUMNS = (
    "verdict",
    "scenario",
    "kind",
    "steps",
    "OOMs",
    "replayed",
    "sizes",
    "difference",
    "time lost",
    "seconds",
)


def render(runs: Sequence[Run]) -> str:
    """Return the runs as one HTML file that needs nothing else.

    All text that comes from them is escaped.
    """
    failed = [number for number, run in enumerate(runs) if not run.passed]
    page = f'<section class="run overview">{_table(runs)}</section>'
    for number, run in enumerate(runs):
        head = {
            "remark": f"{run.kind} · {run.model}",
            "name": f"run-{number + 1}",
            "badge": _BADGES[run.verdict],
            "note": _complaints(run),
        }
        page += section(run_data(run), opened=number in (failed or [0]), **head)
    verdict = (
        f"{len(failed)} of {len(runs)} failed"
        if failed
        else count(runs)
        if runs
        else "nothing was run"
    )
    style = resources.files(__package__).joinpath("page.css").read_text(encoding="utf-8")
    return document(
        f"Stress test: {verdict}",
        f"elastic_mbs {__version__} · training while memory runs out",
        page,
        style=style,
    )


def _table(runs: Sequence[Run]) -> str:
    head = "".join(f"<th>{name}</th>" for name in _COLUMNS)
    rows = []
    for number, run in enumerate(runs):
        link = f'<a href="#run-{number + 1}">{escape(run.title).replace("_", "_<wbr>")}</a>'
        figures = (
            f"{len(run.steps):,}",
            f"{run.ooms:,}",
            f"{run.replayed:.1%}",
            sizes(run),
            difference(run),
            duration(run.time_lost),
        )
        values = (
            _BADGES[run.verdict],
            link,
            *map(escape, (run.kind, *figures, f"{run.seconds:.1f}")),
        )
        cells = "".join(f"<td>{value}</td>" for value in values)
        rows.append(f'<tr class="{"" if run.passed else "failed"}">{cells}</tr>')
    return (
        '<div class="scroll"><table '
        f'class="runs"><thead><tr>{head}</tr></thead><tbody>{"".join(rows)}</tbody></table></div>'
        if runs
        else ""
    )


def _complaints(run: Run) -> str:
    if run.verdict == "not shown":
        return f'<p class="about">It shows nothing: {escape(run.unshown)}</p>'
    lines = "".join(f"<li>{escape(complaint)}</li>" for complaint in run.complaints)
    return f'<ul class="complaints">{lines}</ul>' if lines else ""
