"""The page: all runs in a table, then each with its lanes."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from importlib import resources

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


def render(runs: Sequence[Run]) -> str:
    """The runs as HTML. Everything that comes from them is escaped."""
    failed = [number for number, run in enumerate(runs) if not run.passed]
    opened = set(failed) if failed else {0}
    head = f'<section class="run overview"><dl class="tiles">{tiles(overview(runs))}</dl>{_table(runs)}</section>'
    sections = "".join(
        section(
            run_data(run), remark=f"{run.kind} · {run.model}", opened=number in opened, name=_name(number), badge=_badge(run), note=_complaints(run)
        )
        for number, run in enumerate(runs)
    )
    if failed:
        verdict = f"{len(failed)} of {len(runs)} failed"
    elif all(run.shown for run in runs):
        verdict = f"all {len(runs)} passed" if runs else "nothing was run"
    else:
        verdict = count(runs)
    style = resources.files(__package__).joinpath("page.css").read_text(encoding="utf-8")
    return document(f"Stress test: {verdict}", f"elastic_mbs {__version__} · training while memory runs out", head + sections, style=style)


def _table(runs: Sequence[Run]) -> str:
    if not runs:
        return ""
    names = (
        ("verdict", ""),
        ("scenario", ""),
        ("kind", ""),
        ("steps", "n wide"),
        ("OOMs", "n"),
        ("replayed", "n wide"),
        ("sizes", "n wide"),
        ("difference", "n"),
        ("time lost", "n wide"),
        ("seconds", "n wide"),
    )
    head = "".join(f'<th class="{look}">{name}</th>' for name, look in names)
    rows = []
    for number, run in enumerate(runs):
        values = (
            _badge(run),
            f'<a href="#{_name(number)}">{escape(run.title).replace("_", "_<wbr>")}</a>',
            escape(run.kind),
            f"{len(run.steps):,}",
            f"{run.ooms:,}",
            f"{run.replayed:.1%}",
            escape(sizes(run)),
            escape(difference(run)),
            escape(duration(run.time_lost)),
            f"{run.seconds:.1f}",
        )
        cells = "".join(f'<td class="{look}">{value}</td>' for value, (_, look) in zip(values, names, strict=True))
        rows.append(f'<tr class="{"" if run.passed else "failed"}">{cells}</tr>')
    told = [f"<span><b>{escape(kind)}</b> {escape(KINDS.get(kind, ''))}</span>" for kind in dict.fromkeys(run.kind for run in runs)]
    return (
        f'<div class="scroll"><table class="runs"><thead><tr>{head}</tr></thead><tbody>{"".join(rows)}</tbody></table></div>'
        f'<p class="about kinds">{"".join(told)}</p>'
    )


def _name(number: int) -> str:
    return f"run-{number + 1}"


def _badge(run: Run) -> str:
    if run.passed and not run.shown:
        return '<span class="badge">– not shown</span>'
    return '<span class="badge passed">✓ passed</span>' if run.passed else '<span class="badge failed">✗ FAILED</span>'


def _complaints(run: Run) -> str:
    if run.passed and not run.shown:
        return f'<p class="about">It shows nothing: {escape(run.unshown)}</p>'
    if not run.complaints:
        return ""
    return f'<ul class="complaints">{"".join(f"<li>{escape(complaint)}</li>" for complaint in run.complaints)}</ul>'
