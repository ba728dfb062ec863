"""The panel of a run, drawn with rich."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

from rich import box
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from elastic_mbs.cli.report.scale import duration, number
from elastic_mbs.cli.watch.follow import State
from elastic_mbs.events import CallDone, format_bytes

_BARS = "▁▂▃▄▅▆▇█"
_TRACKS = 4  # tracks that are shown, the last ones used
_WIDTH = 36  # characters of bars and sparklines


def panel(state: State, now: float) -> RenderableType:
    """Return one frame.

    `now` is in unix seconds: the panel shows how old the last line is.
    """
    header = state.run.header
    title = " · ".join(
        str(part)
        for part in (header.get("name", "a run without a header"), header.get("device"))
        if part
    )
    place = " · ".join(
        f"{name} {header[name]}" for name in ("host", "pid", "run") if name in header
    )
    rows = Table.grid(padding=(0, 2))
    rows.add_column(style="bold", no_wrap=True)
    for name, value in _rows(state, now):
        rows.add_row(name, value)
    happened = event_rows(state.events)
    return Group(
        Panel(
            rows,
            title=Text(printable(title)),
            subtitle=Text(printable(place)),
            title_align="left",
            subtitle_align="left",
            box=box.ROUNDED,
        ),
        Panel(happened, title=Text("last events"), title_align="left", box=box.ROUNDED),
    )


def event_rows(events: Iterable[tuple[float, str, str]]) -> RenderableType:
    """Return events, given by time, level and line, as rows."""
    rows = Table.grid(padding=(0, 2))
    rows.add_column(justify="right", style="dim", no_wrap=True)
    for t, level, line in events:
        rows.add_row(
            duration(t),
            Text(
                printable(line),
                style="yellow" if level == "WARNING" else "",
                no_wrap=True,
                overflow="ellipsis",
            ),
        )
    return rows if rows.row_count else Text("none so far", style="dim")


def printable(text: str) -> str:
    """Return text without escape sequences: what a log has must not steer the terminal."""
    return "".join(sign if sign.isprintable() else "\N{REPLACEMENT CHARACTER}" for sign in text)


def _rows(state: State, now: float) -> Iterator[tuple[str, Text]]:
    totals = state.run.totals
    for i, (key, size) in enumerate(list(totals.sizes.items())[: -_TRACKS - 1 : -1]):
        yield "" if i else "micro-batch", Text(printable(f"{size:<6,} {key}"))
    yield (
        "memory",
        Text("unknown until a call has finished")
        if state.last is None
        else memory_line(state.last),
    )
    if state.rates:
        yield (
            "throughput",
            Text(f"{sparkline(state.rates)}  {number(round(state.rates[-1], 2))} samples/s"),
        )
    if state.losses:
        yield "loss", Text(f"{sparkline(state.losses)}  {state.losses[-1]:.6g}")
    share = f" ({totals.replayed / totals.samples:.1%})" if totals.samples else ""
    lost = f" ({totals.lost / totals.ended_seconds:.1%})" if totals.ended_seconds > 0 else ""
    survived = (
        f"{state.ooms:,} OOMs, {totals.replayed:,} samples replayed{share}, "
        f"{duration(totals.lost)} lost{lost}"
    )
    yield "survived", Text(survived, style="yellow" if state.ooms else "green")
    age = max(0.0, now - totals.time) if totals.time else 0.0
    so_far = (
        f"{totals.calls:,} calls, {totals.samples:,} samples in {duration(round(totals.t, 1))}; "
        f"last line {duration(round(age))} ago"
    )
    yield "so far", Text(so_far)


def memory_line(call: CallDone) -> Text:
    """Return the memory of ours, of others, and free, as a bar and in words."""
    ours = call.reserved if call.reserved is not None else call.allocated
    peak = call.peak_reserved if call.peak_reserved is not None else call.peak_allocated
    words = [
        f"ours {format_bytes(ours)}",
        *([] if peak is None else [f"peak {format_bytes(peak)}"]),
    ]
    if call.total is None or call.held_by_others is None:
        return Text(", ".join([*words, "no reading of the device"]))
    free = call.total - call.held_by_others - (ours or 0)
    words += [f"free {format_bytes(max(0, free))}", f"others {format_bytes(call.held_by_others)}"]
    total = max(1, call.total)
    highest, mine = (
        min(_WIDTH, max(0, round(_WIDTH * (value or 0) / total)))
        for value in (max(peak or 0, ours or 0), ours)
    )
    others = min(_WIDTH - mine, max(0, round(_WIDTH * call.held_by_others / total)))
    reach = max(0, min(highest, _WIDTH - others) - mine)
    parts = (
        ("█", mine, "blue"),
        ("▓", reach, "cyan"),
        ("·", _WIDTH - mine - reach - others, "dim"),
        ("▒", others, "bright_black"),
    )
    bar = Text.assemble(*((sign * count, style) for sign, count, style in parts))
    return Text.assemble(bar, f"  {format_bytes(call.total)}\n", ", ".join(words))


def sparkline(values: Sequence[float], width: int = _WIDTH) -> str:
    """Return the last values as little bars, scaled from the lowest to the highest of them.

    A value that is not finite is a gap.
    """
    shown = list(values)[-width:]
    finite = [value for value in shown if math.isfinite(value)]
    low, high = min(finite, default=0.0), max(finite, default=0.0)

    def bar(value: float) -> str:
        if not math.isfinite(value):
            return " "
        return (
            _BARS[0]
            if high == low
            else _BARS[min(7, int(8 * (value / (high - low) - low / (high - low))))]
        )

    return "".join(bar(value) for value in shown).rjust(width)
