"""HTML for notebooks: a runtime and a result as small, self-contained pictures in words and SVG."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape

from elastic_mbs.events import format_bytes

WIDTH = 480  # of a picture, in pixels
HEIGHT = 64
MOST_BARS = 200  # pieces that are drawn one by one
BLUE, RED, GREY, GREEN = "#4878a8", "#c0392b", "#8c8c8c", "#5a9a5a"


def runtime_html(
    title: str, facts: Mapping[str, object], sizes: Sequence[tuple[int, int]], memory: str
) -> str:
    """Return a runtime's figures, its sizes over time with their errors, and its memory.

    Args:
        title: one line about the runtime.
        facts: figures by name.
        sizes: for each call its micro-batch size at the end and its out-of-memory errors.
        memory: HTML of `memory_bar`, or of a sentence.
    """
    parts = [f"<b>{escape(title)}</b>", _table(facts), memory]
    if sizes:
        parts.insert(2, _sizes(sizes))
    return _block(parts)


def result_html(facts: Mapping[str, object], partition: Sequence[tuple[int, int]]) -> str:
    """Return a result's figures and how its batch was split."""
    parts = [_table(facts)]
    if 0 < len(partition) <= MOST_BARS:
        lengths = [(f"samples {start}:{stop}", stop - start, BLUE) for start, stop in partition]
        parts.append(_bar(lengths))
    return _block(parts)


def memory_bar(others: int, own: int, free: int) -> str:
    """Return a bar of the device's memory: held by others, by this process, and free."""
    parts = [("others", others, GREY), ("this process", own, BLUE), ("free", free, GREEN)]
    words = ", ".join(f"{name} {format_bytes(size)}" for name, size, _ in parts)
    bar = _bar((f"{name}: {format_bytes(size)}", size, colour) for name, size, colour in parts)
    return f"<div>memory: {words}</div>{bar}"


def sentence(text: str) -> str:
    """Return a line of text."""
    return f"<div>{escape(text)}</div>"


def _block(parts: Iterable[str]) -> str:
    return f'<div style="font-family:sans-serif;font-size:13px">{"".join(parts)}</div>'


def _table(facts: Mapping[str, object]) -> str:
    cells = "".join(
        f'<span style="margin-right:1.5em">{escape(name)} <b>{escape(str(value))}</b></span>'
        for name, value in facts.items()
    )
    return f"<div>{cells}</div>"


def _bar(parts: Iterable[tuple[str, int, str]]) -> str:
    """Return a horizontal bar whose parts are as wide as their sizes."""
    drawn = [part for part in parts if part[1] > 0]
    scale = WIDTH / max(1, sum(size for _, size, _ in drawn))
    x = 0.0
    boxes = []
    for name, size, colour in drawn:
        boxes.append(
            f'<rect x="{x:.1f}" y="0" width="{max(0.5, size * scale - 1):.1f}" height="14" '
            f'fill="{colour}"><title>{escape(name)}</title></rect>'
        )
        x += size * scale
    return f'<svg width="{WIDTH}" height="14" role="img">{"".join(boxes)}</svg>'


def _sizes(sizes: Sequence[tuple[int, int]]) -> str:
    """Return the micro-batch size of each call as a line; calls with errors have a dot."""
    highest = max(size for size, _ in sizes)
    step = WIDTH / max(1, len(sizes) - 1)
    points = [
        (at * step, HEIGHT - 4 - (HEIGHT - 8) * size / highest)
        for at, (size, _) in enumerate(sizes)
    ]
    if len(points) == 1:
        points.append((float(WIDTH), points[0][1]))
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    dots = "".join(
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{RED}"><title>{ooms} out of memory</title>'
        "</circle>"
        for (x, y), (_, ooms) in zip(points, sizes, strict=False)
        if ooms
    )
    words = (
        f"micro-batch size over the last {len(sizes)} calls, up to {highest}; "
        "red: out-of-memory errors survived"
    )
    return (
        f"<div>{words}</div>"
        f'<svg width="{WIDTH}" height="{HEIGHT}" role="img" style="overflow:visible">'
        f'<polyline points="{line}" fill="none" stroke="{BLUE}" stroke-width="1.5"/>{dots}</svg>'
    )
