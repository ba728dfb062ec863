"""The panel of a job of several ranks: a row for each, drawn with rich."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from rich import box
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from elastic_mbs.cli.report.scale import duration, number
from elastic_mbs.cli.watch.follow import EVENTS, State
from elastic_mbs.cli.watch.panel import event_rows, printable, sparkline
from elastic_mbs.events import CallDone, format_bytes

_COLUMNS = (
    "rank",
    "host, process",
    "micro-batch",
    "ours, peak",
    "samples/s",
    "OOMs",
    "lost",
    "last line",
)


def job_panel(states: Sequence[State], now: float) -> RenderableType:
    """Return one frame. The loss is that of the global batch, the same on all ranks.

    Args:
        states: of the ranks that have written a log, in order.
        now: unix seconds.
    """
    first = states[0]
    rows = Table(box=None, padding=(0, 2), pad_edge=False)
    for name in _COLUMNS:
        rows.add_column(name, justify="left" if name == "host, process" else "right")
    for state in states:
        rows.add_row(*(Text(printable(text)) for text in _row(state, now)))
    head = first.run.header
    title = f"{head.get('name', 'elastic_mbs')} · {len(states)} of {head.get('ranks', '?')} ranks"
    loss = Text("loss  ", style="bold")
    if first.losses:
        loss.append(f"{sparkline(first.losses)}  {first.losses[-1]:.6g}", style="not bold")
    latest = heapq.nlargest(
        EVENTS,
        (
            (state.run.totals.time - state.run.totals.t + t, level, f"{_name(state)}: {line}")
            for state in states
            for t, level, line in state.events
        ),
    )
    began = min(state.run.totals.time - state.run.totals.t for state in states)
    happened = event_rows([(at - began, level, line) for at, level, line in reversed(latest)])
    return Group(
        Panel(
            Group(rows, Text(), loss),
            title=Text(printable(title)),
            title_align="left",
            box=box.ROUNDED,
        ),
        Panel(happened, title=Text("last events"), title_align="left", box=box.ROUNDED),
    )


def _name(state: State) -> str:
    return f"rank {state.run.header.get('rank', '?')}"


def _row(state: State, now: float) -> tuple[str, ...]:
    """Return what a job's table says of a rank."""
    header, totals, last = state.run.header, state.run.totals, state.last
    size = next(reversed(totals.sizes.values()), None)
    return (
        str(header.get("rank", "?")),
        f"{header.get('host', '?')}, {header.get('pid', '?')}",
        "" if size is None else f"{size:,}",
        "" if last is None else _memory(last),
        number(round(state.rates[-1], 2)) if state.rates else "",
        f"{state.ooms:,}",
        duration(totals.lost),
        f"{duration(round(max(0.0, now - totals.time)))} ago" if totals.time else "",
    )


def _memory(call: CallDone) -> str:
    ours = call.reserved if call.reserved is not None else call.allocated
    peak = call.peak_reserved if call.peak_reserved is not None else call.peak_allocated
    return f"{format_bytes(ours)}, {format_bytes(peak)}"
