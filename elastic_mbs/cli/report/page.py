"""The HTML around the lanes: one file that needs nothing else.

The lines in them are in `data.py` (points) and `svg.py` (look).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from html import escape
from importlib import resources

from elastic_mbs.cli.report import scale, svg
from elastic_mbs.cli.report.data import RunData


def page(runs: Sequence[RunData], source: str) -> str:
    """Return the report of one log, named `source`; its last run is shown open.

    Everything that comes from the log is escaped.
    """
    sections = [
        section(
            run, remark=dict(run.about).get("began", f"run {number}"), opened=number == len(runs)
        )
        for number, run in enumerate(runs, start=1)
    ]
    return document(
        source,
        f"elastic_mbs run report · {len(runs)} run{'' if len(runs) == 1 else 's'}",
        "".join(sections),
    )


def document(title: str, subtitle: str, main: str, *, style: str = "") -> str:
    """Return a page around its content.

    Heading and subtitle are text, `main` is HTML; `style` is added to the style sheet of the lanes.
    """
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)} · elastic_mbs</title>
<style>{_asset("page.css")}{style}</style>
</head>
<body>
<header class="top"><div><h1>{escape(title)}</h1><p>{escape(subtitle)}</p></div>
<button id="theme" type="button" aria-label="switch between light and dark">◐</button></header>
<main>{main}</main>
<script>{_asset("page.js")}</script>
</body>
</html>
"""


def tiles(figures: Iterable[tuple[str, str, str]]) -> str:
    """Return figures as tiles: name, value, and a remark."""
    return "".join(
        f'<div class="tile"><dt>{escape(name)}</dt><dd>{escape(value)}</dd><dd '
        f'class="remark">{escape(remark)}</dd></div>'
        for name, value, remark in figures
    )


def section(
    run: RunData, *, remark: str, opened: bool, name: str = "", badge: str = "", note: str = ""
) -> str:
    """Return a run: its figures, its lanes, and its events.

    Next to its title is a remark (text), before it a badge (HTML), above its figures a note (HTML);
    `name` is its anchor in the page.
    """
    x = scale.seconds(run.seconds)
    drawn = svg.lanes(run)
    failures = [mark.t for mark in run.marks if mark.kind == "oom"]
    about = "".join(
        f"<span><b>{escape(name)}</b> {escape(value)}</span>" for name, value in run.about
    )
    lanes = "".join(_lane(lane, x, failures) for lane in drawn)
    values = _embedded([[_values(line, x) for line in lane.legend] for lane in drawn])
    anchor = f' id="{escape(name, quote=True)}"' if name else ""
    return f"""<details class="run"{anchor}{" open" if opened else ""}>
<summary>{badge}<h2>{escape(run.title)}</h2> <span class="when">{escape(remark)}</span></summary>
<p class="about">{about}</p>{note}
<dl class="tiles">{tiles(run.tiles)}</dl>
<div class="lanes" data-seconds="{x.high}">{lanes}
<div class="row"><span></span>{svg.x_axis(x)}<span></span></div>
<div class="hair" hidden></div>
<script type="application/json">{values}</script>
</div>
{_events(run)}
</details>
"""


def _lane(lane: svg.Lane, x: scale.Scale, failures: Sequence[float]) -> str:
    chips = [(line.look, line.name) for line in lane.legend] + list(lane.chips)
    legend = "".join(f"<li>{_swatch(look)}{escape(text)}</li>" for look, text in chips)
    left = svg.y_axis(lane.y, "y-axis", 'x="100%" dx="-8"')
    right = (
        svg.y_axis(svg.SHARES, "share-axis", 'x="0" dx="6"')
        if any(line.unit == "share" for line in lane.lines)
        else "<span></span>"
    )
    return f"""
<section class="lane lane-{lane.name.split()[0].lower()}">
<header><h3>{escape(lane.name)}</h3><ul class="legend">{legend}</ul><p class="readout"></p></header>
<div class="row">{left}{svg.plot(lane, x, failures)}{right}</div>
</section>"""


def _swatch(look: str) -> str:
    if look == "nothing":
        return ""
    if look.startswith("mark-"):
        glyph = svg.GLYPHS[look.removeprefix("mark-")]
        mark = f'<path class="mark {look}" d="{glyph}"/>'
        return f'<svg class="swatch" viewBox="-8 -8 16 16">{mark}</svg>'
    area = f'<rect class="chip area {look}" width="16" height="16" rx="3"/>'
    line = f'<path class="line {look}" d="M1 8H15"/>'
    return f'<svg class="swatch" viewBox="0 0 16 16">{area}{line}</svg>'


def _values(line: svg.Line, x: scale.Scale) -> dict[str, object]:
    """Return a line for the readout: name, unit, shape, points and values.

    Points are fractions of the width.
    """
    points = scale.decimate(line.points)
    return {
        "name": line.name,
        "unit": line.unit,
        "after": line.shape == "after",
        "x": [round(x.place(t), 5) for t, _ in points],
        "y": [
            None if value is None else float(f"{line.below - value if line.below else value:.6g}")
            for _, value in points
        ],
    }


def _embedded(value: object) -> str:
    """Return JSON that cannot end the script element around it."""
    return (
        json.dumps(value, separators=(",", ":"), allow_nan=False)
        .replace("<", "\\u003c")
        .replace(">", "\\u003e")
        .replace("&", "\\u0026")
    )


def _events(run: RunData) -> str:
    if not run.marks:
        return '<p class="quiet">Nothing happened but calls.</p>'
    rows = "".join(
        f"<tr><td>{escape(scale.duration(mark.t))}</td>"
        f"<td>{_swatch(f'mark-{mark.kind}')}</td>"
        f"<td>{escape(mark.line)}</td></tr>"
        for mark in run.marks
    )
    shown = f", {len(run.marks):,} of them shown" if run.events > len(run.marks) else ""
    summary = f"<summary>{max(run.events, len(run.marks)):,} events{shown}</summary>"
    return f'<details class="events">{summary}<table>{rows}</table></details>'


def _asset(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")
