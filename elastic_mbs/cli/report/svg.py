"""The lanes of a run as inline SVG: which lines of `data.py` each has, and how they look.

A lane is as wide as the page and its text keeps its size: lines and areas are drawn in a nested
picture that is stretched, with strokes that are not, and text and marks are placed by percentages.
Colours are classes; the style sheet knows them in light and dark.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise
from typing import Literal

from elastic_mbs.cli.report import scale
from elastic_mbs.cli.report.data import Mark, RunData
from elastic_mbs.cli.report.scale import Point, Scale, decimate

WIDTH, HEIGHT = 10000, 1000  # units of the stretched picture
TRACKS = 5  # tracks that have a colour of their own; the rest share the last
# more failures than this have no line through all lanes: there would be nothing else to see
HAIRLINES = 150
RATES = {"eval": "rate-eval"}  # the colour of a mode that is not "train"
HUGE = 1e300  # a loss above is as good as infinite
SHARES = Scale(0.0, 1.0, (scale.Tick(0.0, "0%"), scale.Tick(0.5, "50%"), scale.Tick(1.0, "100%")))

# marks differ in shape as well as in colour
GLYPHS = {
    "oom": "M-6-5H6L0 6Z",
    "grow": "M-6 5H6L0-6Z",
    "shrink": "M-6-3.5H6L0 3.5Z",
    "thrash": "M0-7L6 0L0 7L-6 0Z",
    "note": "M-4.5-4.5H4.5V4.5H-4.5Z",
}
KINDS = {
    "oom": "out of memory",
    "grow": "grown",
    "shrink": "shrunk",
    "thrash": "thrashing",
    "note": "other events",
}


@dataclass(frozen=True)
class Line:
    """A line of a lane."""

    name: str  # in the legend and in the readout
    points: Sequence[Point]  # not yet decimated
    look: str  # class of its colour
    # how the readout writes a value; shares have an axis of their own
    unit: Literal["bytes", "size", "rate", "share", "loss"]
    # a step up to each point, from each point, or none
    shape: Literal["before", "after", "straight"] = "straight"
    area: Literal["down", "up", ""] = ""  # filled down to the axis, up to the top, or a line alone
    below: float = 0.0  # the readout shows how far a value lies below this; 0 for the value itself


@dataclass(frozen=True)
class Lane:
    """A lane."""

    name: str  # its heading, and "lane-" + its first word its class
    lines: Sequence[Line]  # those behind first
    y: Scale  # the axis on the left
    # each with its place on that axis, or None for the upper edge
    marks: Sequence[tuple[Mark, float | None]] = ()
    chips: Sequence[tuple[str, str]] = ()  # legend entries that are no lines, as (class, text)
    empty: str = ""  # the text where there is nothing to draw

    @property
    def legend(self) -> list[Line]:
        """The lines from front to back."""
        return list(self.lines)[::-1]


def lanes(run: RunData) -> list[Lane]:
    """Return the lanes of a run; of a job, memory has one for each rank."""
    memory = [_memory(each, f"Memory of {name}") for name, each in run.ranks.items()] or [
        _memory(run, "Memory")
    ]
    return [*memory, _sizes(run), _throughput(run), _loss(run)]


def _memory(run: RunData, name: str) -> Lane:
    memory = run.memory
    lines = [
        Line(
            "held by others", memory.capacity, "others", "bytes", "after", "up", below=memory.total
        ),
        Line("ours, at its peak", memory.peak, "peak", "bytes", "before", "down"),
        Line("ours, reserved", memory.reserved, "reserved", "bytes", "before", "down"),
        Line("ours, allocated", memory.allocated, "allocated", "bytes", "before", "down"),
        Line("growth stops here (margin)", memory.margin, "margin", "bytes", "after"),
    ]
    notes = [(mark, None) for mark in run.marks if mark.size is None or not mark.key]
    chips = [("free", "free")] if _drawn(memory.capacity) else []
    shown = [line for line in lines if _drawn(line.points)]
    return Lane(
        name,
        shown,
        scale.bytes_from_zero(memory.total),
        notes,
        chips,
        "no call has reported its memory",
    )


def _sizes(run: RunData) -> Lane:
    values = [value for points in run.sizes.values() for _, value in points if value is not None]
    by_use = sorted(run.sizes.items(), key=lambda item: -len(item[1]))
    lines = [
        Line(key, points, f"track-{min(i, TRACKS - 1)}", "size", "after")
        for i, (key, points) in enumerate(by_use)
    ]
    marks = [(mark, float(mark.size)) for mark in run.marks if mark.size is not None and mark.key]
    kinds = {mark.kind for mark in run.marks}
    chips = [(f"mark-{kind}", text) for kind, text in KINDS.items() if kind in kinds]
    y = scale.powers(2.0, max(1.0, min(values, default=1.0)), max(values, default=1.0))
    # the most used track lies on top
    return Lane("Micro-batch size", lines[::-1], y, marks, chips, "no call has finished")


def _throughput(run: RunData) -> Lane:
    rates = [value for points in run.rates.values() for _, value in points if value is not None]
    lines = [
        Line(f"time lost to replays{who}", lost, "lost", "share", "before", "down")
        for who, lost in (
            [(f", {name}", each.lost) for name, each in run.ranks.items()] or [("", run.lost)]
        )
        if any(share for _, share in lost)
    ]
    lines += [
        Line(
            f"samples per second, {mode}",
            points,
            f"track-{min(i, TRACKS - 1)}" if run.ranks else RATES.get(mode, "rate-train"),
            "rate",
            "before",
        )
        for i, (mode, points) in reversed(list(enumerate(run.rates.items())))
        if _drawn(points)
    ]
    return Lane(
        "Throughput",
        lines,
        scale.linear(0.0, max(rates, default=1.0), count=4),
        empty="no call has reported its time",
    )


def _loss(run: RunData) -> Lane:
    points, reference = (
        [(t, value if value is not None and abs(value) < HUGE else None) for t, value in line]
        for line in (run.loss, run.reference)
    )
    values = [value for _, value in [*points, *reference] if value is not None]
    low, high = min(values, default=0.0), max(values, default=1.0)
    y = (
        scale.powers(10.0, low, high)
        if low > 0 and high / low > 100
        else scale.linear(low, high, count=4)
    )
    broken = sum(value is not None for _, value in run.loss) - sum(
        value is not None for _, value in points
    )
    chips = [("nothing", f"{broken:,} not finite")] if broken else []
    named = [
        ("the same without limits", reference, "reference"),
        ("loss of the whole batch", points, "loss"),
    ]
    lines = [Line(name, line, look, "loss") for name, line, look in named if _drawn(line)]
    return Lane("Loss", lines, y, (), chips, "no call has reported its loss")


def _drawn(points: Sequence[Point]) -> bool:
    return any(value is not None for _, value in points)


def plot(lane: Lane, x: Scale, failures: Sequence[float]) -> str:
    """Return the picture of a lane, without its axes' labels.

    `failures` are times that have a line through all lanes.
    """
    parts = [
        f'<line class="grid" x1="{at}" x2="{at}" y2="100%"/>'
        for at in (percent(x.place(tick.value)) for tick in x.ticks)
    ]
    parts += [
        f'<line class="grid" x2="100%" y1="{at}" y2="{at}"/>'
        for at in (percent(1 - lane.y.place(tick.value)) for tick in lane.y.ticks)
    ]
    parts.append(
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" preserveAspectRatio="none" width="100%" '
        'height="100%">'
    )
    parts += [draw(line, x, SHARES if line.unit == "share" else lane.y) for line in lane.lines]
    parts.append("</svg>")
    if len(failures) <= HAIRLINES:
        parts += [
            f'<line class="failure" x1="{at}" x2="{at}" y2="100%"/>'
            for at in (percent(x.place(t)) for t in failures)
        ]
    parts += [
        _glyph(mark, x.place(mark.t), 0.0 if value is None else 1 - lane.y.place(value))
        for mark, value in lane.marks
    ]
    if not lane.lines:
        parts.append(f'<text class="empty" x="50%" y="50%">{escape(lane.empty)}</text>')
    label = f"{escape(lane.name, quote=True)} over time"
    return f'<svg class="plot" role="img" aria-label="{label}">{"".join(parts)}</svg>'


def draw(line: Line, x: Scale, y: Scale) -> str:
    """Return a line, and the area behind it."""
    drawn = []
    for stretch in stretches(decimate(line.points)):
        corners = _corners(
            [(x.place(t) * WIDTH, (1 - y.place(value)) * HEIGHT) for t, value in stretch],
            line.shape,
        )
        if line.shape == "after" and stretch[-1] == line.points[-1]:
            corners.append((float(WIDTH), corners[-1][1]))  # it holds until the run ends
        if len(corners) == 1:  # a dash that can be seen
            (at, height), half = corners[0], WIDTH / 400
            corners = [(max(0.0, at - half), height), (min(float(WIDTH), at + half), height)]
        path = "M" + "L".join(f"{_short(at)} {_short(height)}" for at, height in corners)
        if line.area:
            drawn.append(
                f'<path class="area {line.look}" '
                f'd="{path}V{HEIGHT if line.area == "down" else 0}H{_short(corners[0][0])}Z"/>'
            )
        drawn.append(f'<path class="line {line.look}" d="{path}"/>')
    return "".join(drawn)


def stretches(points: Iterable[Point]) -> list[list[tuple[float, float]]]:
    """Return the parts of a line between its gaps."""
    found: list[list[tuple[float, float]]] = [[]]
    for t, value in points:
        if value is not None:
            found[-1].append((t, value))
        elif found[-1]:
            found.append([])
    return [stretch for stretch in found if stretch]


def _corners(points: Sequence[tuple[float, float]], shape: str) -> list[tuple[float, float]]:
    corners = [points[0]]
    for before, here in pairwise(points):
        if shape != "straight":
            corners.append((before[0], here[1]) if shape == "before" else (here[0], before[1]))
        corners.append(here)
    return corners


def _glyph(mark: Mark, x: float, y: float) -> str:
    tip = "\n".join(
        [
            mark.title,
            f"when: {scale.duration(mark.t)}",
            *(f"{name}: {value}" for name, value in mark.facts),
        ]
    )
    return (
        f'<svg class="at" x="{percent(x)}" y="{percent(y)}"><path class="mark mark-{mark.kind}" '
        f'd="{GLYPHS[mark.kind]}" '
        'role="img" '
        f'aria-label="{escape(mark.title, quote=True)}"><title>{escape(tip)}</title></path></svg>'
    )


def y_axis(axis: Scale, look: str, place: str) -> str:
    """Return the labels of a lane's axis."""
    labels = "".join(
        f'<text {place} y="{percent(1 - axis.place(tick.value))}">{escape(tick.label)}</text>'
        for tick in axis.ticks
    )
    return f'<svg class="{look}" aria-hidden="true">{labels}</svg>'


def x_axis(x: Scale) -> str:
    """Return the labels below all lanes; a narrow page leaves out every second."""
    labels = "".join(
        f'<text class="{"minor" if i % 2 else "major"}" x="{percent(x.place(tick.value))}" '
        f'y="14">{escape(tick.label)}</text>'
        for i, tick in enumerate(x.ticks)
    )
    return f'<svg class="x-axis" aria-hidden="true">{labels}</svg>'


def percent(fraction: float) -> str:
    return f"{_short(fraction * 100, 3)}%"


def _short(value: float, digits: int = 1) -> str:
    return f"{value:.{digits}f}".rstrip("0").rstrip(".")
