"""The lanes of a run as inline SVG.

A lane is as wide as the page and its text keeps its size: lines and areas are drawn in a nested picture that is stretched, with strokes that are not,
and text and marks are placed by percentages beside it. Colours are classes; the style sheet knows them in light and dark.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from html import escape
from itertools import pairwise

from elastic_mbs.cli.report import scale
from elastic_mbs.cli.report.data import Mark, Memory, RunData
from elastic_mbs.cli.report.decimate import Point, decimate
from elastic_mbs.cli.report.scale import Scale

WIDTH, HEIGHT = 10000, 1000
"""Units of the stretched picture."""

TRACKS = 5
"""Tracks that have a colour of their own; the rest share the last."""

HAIRLINES = 150
"""More failures than this have no line through all lanes: there would be nothing else to see."""

GLYPHS = {
    "oom": "M-6-5H6L0 6Z",
    "grow": "M-6 5H6L0-6Z",
    "shrink": "M-6-3.5H6L0 3.5Z",
    "thrash": "M0-7L6 0L0 7L-6 0Z",
    "note": "M-4.5-4.5H4.5V4.5H-4.5Z",
}
"""Marks differ in shape as well as in colour."""

KINDS = {"oom": "out of memory", "grow": "grown", "shrink": "shrunk", "thrash": "thrashing", "note": "other events"}


@dataclass(frozen=True)
class Line:
    """A line of a lane.

    Attributes:
        name: in the legend and beside the pointer.
        points: not yet decimated.
        look: class of its colour.
        unit: how a value is written beside the pointer: "bytes", "size", "rate", "share" or "loss".
        shape: "before" (a step up to each point), "after" (a step from each point) or "straight".
        area: down to the axis ("down"), up to the top ("up"), or "" for a line alone.
        part: whether its scale is that of shares, 0 to 1.
        below: told beside the pointer is how far a value lies below this; 0 to tell the value itself.
    """

    name: str
    points: Sequence[Point]
    look: str
    unit: str
    shape: str = "straight"
    area: str = ""
    part: bool = False
    below: float = 0.0


@dataclass(frozen=True)
class Lane:
    """A lane.

    Attributes:
        name: its heading, and "lane-" + its first word its class.
        lines: those behind first.
        y: the axis on the left.
        marks: each with its place on that axis, or None for the upper edge.
        shares: whether there is an axis of shares on the right.
        chips: legend entries beside the lines, as (class, text).
        empty: what to say where there is nothing to draw.
    """

    name: str
    lines: Sequence[Line]
    y: Scale
    marks: Sequence[tuple[Mark, float | None]] = ()
    shares: bool = False
    chips: Sequence[tuple[str, str]] = field(default_factory=tuple)
    empty: str = ""

    @property
    def legend(self) -> list[Line]:
        """The lines from front to back, and a limit after what it limits."""
        front = list(reversed(self.lines))
        return [line for line in front if line.look != "margin"] + [line for line in front if line.look == "margin"]


def lanes(run: RunData) -> list[Lane]:
    """The four lanes of a run."""
    return [_memory(run.memory, run.marks), _sizes(run), _throughput(run), _loss(run)]


def _memory(memory: Memory, marks: Iterable[Mark]) -> Lane:
    lines = [
        Line("held by others", memory.capacity, "others", "bytes", "after", "up", below=memory.total),
        Line("ours, at its peak", memory.peak, "peak", "bytes", "before", "down"),
        Line("ours, reserved", memory.reserved, "reserved", "bytes", "before", "down"),
        Line("ours, allocated", memory.allocated, "allocated", "bytes", "before", "down"),
        Line("growth stops here (margin)", memory.margin, "margin", "bytes", "after"),
    ]
    lines = [line for line in lines if _drawn(line.points)]
    notes = [(mark, None) for mark in marks if mark.size is None or not mark.key]
    chips = (("free", "free"),) if _drawn(memory.capacity) else ()
    return Lane("Memory", lines, scale.bytes_from_zero(memory.total), notes, chips=chips, empty="no call has told of its memory")


def _sizes(run: RunData) -> Lane:
    values = [value for points in run.sizes.values() for _, value in points if value is not None]
    lines = [
        Line(key, points, f"track-{min(number, TRACKS - 1)}", "size", "after")
        for number, (key, points) in enumerate(sorted(run.sizes.items(), key=lambda item: -len(item[1])))
    ]
    marks = [(mark, float(mark.size)) for mark in run.marks if mark.size is not None and mark.key]
    kinds = {mark.kind for mark in run.marks}
    chips = [(f"mark-{kind}", text) for kind, text in KINDS.items() if kind in kinds]
    # behind goes what is drawn first: the most used track lies on top
    y = scale.powers_of_two(min(values, default=1.0), max(values, default=1.0))
    return Lane("Micro-batch size", lines[::-1], y, marks, chips=chips, empty="no call has finished")


def _throughput(run: RunData) -> Lane:
    rates = [value for points in run.rates.values() for _, value in points if value is not None]
    lines = [Line("time lost to replays", run.lost, "lost", "share", "before", "down", part=True)] if any(share for _, share in run.lost) else []
    names = {"train": "samples per second", "eval": "samples per second, eval"}
    lines += [
        Line(names.get(mode, mode), points, "rate-eval" if mode == "eval" else "rate-train", "rate", "before")
        for mode, points in run.rates.items()
        if _drawn(points)
    ]
    chips = () if lines and lines[0].part else (("nothing", "no time lost to replays"),)
    y = scale.linear(0.0, max(rates, default=1.0), count=4)
    return Lane("Throughput", lines, y, shares=bool(lines) and lines[0].part, chips=chips, empty="no call has told of its time")


def _loss(run: RunData) -> Lane:
    values = [value for _, value in run.loss if value is not None and abs(value) < 1e300]
    points = [(t, value if value is not None and abs(value) < 1e300 else None) for t, value in run.loss]
    low, high = min(values, default=0.0), max(values, default=1.0)
    y = scale.powers_of_ten(low, high) if low > 0 and high / low > 100 else scale.linear(low, high, count=4)
    broken = sum(value is not None for _, value in run.loss) - len(values)
    chips = (("nothing", f"{broken:,} not finite"),) if broken else ()
    lines = [Line("loss of the whole batch", points, "loss", "loss")] if values else []
    return Lane("Loss", lines, y, chips=chips, empty="no call has told of its loss")


def _drawn(points: Sequence[Point]) -> bool:
    return any(value is not None for _, value in points)


# ---------------------------------------------------------------------- drawing


def plot(lane: Lane, x: Scale, failures: Sequence[float]) -> str:
    """The picture of a lane, without its axes' labels.

    Args:
        lane: what to draw.
        x: the time.
        failures: times of failures, which have a line through all lanes.
    """
    ticks = _major(x)
    parts = [f'<line class="grid" x1="{percent(x.place(tick.value))}" x2="{percent(x.place(tick.value))}" y2="100%"/>' for tick, _ in ticks]
    for tick in lane.y.ticks:
        y = percent(1 - lane.y.place(tick.value))
        parts.append(f'<line class="grid" x2="100%" y1="{y}" y2="{y}"/>')
    parts.append(f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" preserveAspectRatio="none" width="100%" height="100%">')
    parts += [draw(line, x, scale.Scale(0.0, 1.0, ()) if line.part else lane.y) for line in lane.lines]
    parts.append("</svg>")
    if len(failures) <= HAIRLINES:
        parts += [f'<line class="failure" x1="{percent(x.place(t))}" x2="{percent(x.place(t))}" y2="100%"/>' for t in failures]
    parts += [_glyph(mark, x.place(mark.t), 0.0 if value is None else 1 - lane.y.place(value)) for mark, value in lane.marks]
    if not lane.lines:
        parts.append(f'<text class="empty" x="50%" y="50%">{escape(lane.empty)}</text>')
    return f'<svg class="plot" role="img" aria-label="{escape(lane.name, quote=True)} over time">{"".join(parts)}</svg>'


def draw(line: Line, x: Scale, y: Scale) -> str:
    """A line, and the area behind it."""
    drawn = []
    for stretch in stretches(decimate(line.points)):
        corners = _corners([(x.place(t) * WIDTH, (1 - y.place(value)) * HEIGHT) for t, value in stretch], line.shape)
        if line.shape == "after" and stretch[-1] == line.points[-1]:
            corners.append((float(WIDTH), corners[-1][1]))  # it holds until the run ends
        path = _path(corners)
        if line.area:
            edge = HEIGHT if line.area == "down" else 0
            drawn.append(f'<path class="area {line.look}" d="{path}V{edge}H{_short(corners[0][0])}Z"/>')
        drawn.append(f'<path class="line {line.look}" d="{path}"/>')
    return "".join(drawn)


def stretches(points: Iterable[Point]) -> list[list[tuple[float, float]]]:
    """The parts of a line between its gaps."""
    found: list[list[tuple[float, float]]] = []
    whole = False
    for t, value in points:
        if value is not None:
            if not whole:
                found.append([])
            found[-1].append((t, value))
        whole = value is not None
    return found


def _corners(points: Sequence[tuple[float, float]], shape: str) -> list[tuple[float, float]]:
    corners = [points[0]]
    for before, here in pairwise(points):
        if shape == "before":
            corners.append((before[0], here[1]))
        elif shape == "after":
            corners.append((here[0], before[1]))
        corners.append(here)
    return corners


def _path(corners: Sequence[tuple[float, float]]) -> str:
    """A path through the corners. A single one becomes a dash that can be seen."""
    if len(corners) == 1:
        (x, y), half = corners[0], WIDTH / 400
        corners = [(max(0.0, x - half), y), (min(float(WIDTH), x + half), y)]
    return "M" + "L".join(f"{_short(x)} {_short(y)}" for x, y in corners)


def _glyph(mark: Mark, x: float, y: float) -> str:
    tip = "\n".join([mark.title, f"when: {scale.duration(mark.t)}", *(f"{name}: {value}" for name, value in mark.facts)])
    return (
        f'<svg class="at" x="{percent(x)}" y="{percent(y)}"><path class="mark mark-{mark.kind}" d="{GLYPHS[mark.kind]}" '
        f'role="img" aria-label="{escape(mark.title, quote=True)}" data-tip="{escape(tip, quote=True)}"/></svg>'
    )


def y_axis(lane: Lane) -> str:
    """The labels on the left of a lane."""
    labels = "".join(f'<text x="100%" dx="-8" y="{percent(1 - lane.y.place(tick.value))}">{escape(tick.label)}</text>' for tick in lane.y.ticks)
    return f'<svg class="y-axis" aria-hidden="true">{labels}</svg>'


def share_axis(lane: Lane) -> str:
    """The labels on the right of a lane that has shares."""
    shares = ((0.0, "0%"), (0.5, "50%"), (1.0, "100%")) if lane.shares else ()
    return (
        '<svg class="share-axis" aria-hidden="true">' + "".join(f'<text x="0" dx="6" y="{percent(1 - y)}">{t}</text>' for y, t in shares) + "</svg>"
    )


def x_axis(x: Scale) -> str:
    """The labels below all lanes; a narrow page leaves out every second."""
    labels = "".join(
        f'<text{"" if major else " class=" + chr(34) + "minor" + chr(34)} x="{percent(x.place(tick.value))}" y="14">{escape(tick.label)}</text>'
        for tick, major in _major(x)
    )
    return f'<svg class="x-axis" aria-hidden="true">{labels}</svg>'


def _major(x: Scale) -> list[tuple[scale.Tick, bool]]:
    return [(tick, number % 2 == 0) for number, tick in enumerate(x.ticks)]


def percent(fraction: float) -> str:
    """A fraction as SVG has it: `12.34%`."""
    return f"{_short(fraction * 100, 3)}%"


def _short(value: float, digits: int = 1) -> str:
    return f"{value:.{digits}f}".rstrip("0").rstrip(".")
