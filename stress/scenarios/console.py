"""What a run of scenarios prints: a line for each that rewrites itself, and a table at the end."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ..progress import Progress as Line
from ..record import Run, Step, count
from .catalogue import Order


class Progress:
    """One line per scenario. On a terminal it is rewritten in place while training runs."""

    def __init__(self, orders: Sequence[Order]) -> None:
        self._line, self._count, self._done = Line(piped=math.inf), len(orders), 0
        self._wide = max((len(order.scenario) for order in orders), default=0) + 4

    def begin(self, order: Order) -> None:
        self._order = order
        self._done += 1
        self._line.tell(f"{self._head(order.scenario)} measuring")

    def step(self, step: Step) -> None:
        where = f"step {step.step + 1}/{self._order.steps}"
        self._line.tell(f"{self._head(self._order.scenario)} {where}, micro-batch {step.size}, loss {step.loss:.4g}")

    def end(self, runs: Sequence[Run]) -> None:
        self._line.clear()
        for run in runs:
            sizes = f"micro-batch {run.sizes[0]}–{run.sizes[-1]}" if run.sizes else "no step"
            figures = f"{len(run.steps)} steps, {sizes}, {run.ooms} OOMs, {run.seconds:.1f} s"
            print(f"{self._head(run.title)} {run.verdict:<6} {figures}", flush=True)

    def _head(self, title: str) -> str:
        return f"[{self._done:>{len(str(self._count))}}/{self._count}] {title:<{self._wide}} {self._order.kind:<6}"


def table(runs: Sequence[Run]) -> str:
    """A row per record."""
    rows = [("scenario", "kind", "model", "steps", "OOMs", "replayed", "sizes", "difference", "seconds", "verdict"), *map(_row, runs)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    align = "<<<>>><>><"  # of each column
    return "\n".join("  ".join(f"{cell:{side}{width}}" for cell, side, width in zip(row, align, widths, strict=True)).rstrip() for row in rows)


def _row(run: Run) -> tuple[str, ...]:
    difference = "–" if run.differences is None else f"{run.differences.largest:.1e}"
    sizes = [str(size) for size in run.sizes]
    short = " ".join(sizes if len(sizes) <= 6 else [*sizes[:3], "…", *sizes[-2:]])
    figures = str(len(run.steps)), str(run.ooms), f"{run.replayed:.1%}", short, difference, f"{run.seconds:.1f}"
    return (run.title, run.kind, run.model, *figures, run.verdict)


def summary(runs: Sequence[Run]) -> str:
    """The last lines: what went wrong, in words, and the count."""
    lines = [f"{run.title} on {run.kind}: {complaint}" for run in runs for complaint in run.complaints]
    lines += [f"{run.title} on {run.kind} shows nothing: {run.unshown}" for run in runs if run.passed and run.unshown]
    rounding = sorted({f"{d.tolerance_loss:.0e} of a loss, {d.tolerance_weight:.0e} of a weight in {r.dtype}" for r in runs if (d := r.differences)})
    if rounding:
        lines.append(f"counts as rounding: up to {'; '.join(rounding)}")
    return "\n".join([*lines, f"{count(runs)}; {sum(run.ooms for run in runs)} out-of-memory errors survived"])
