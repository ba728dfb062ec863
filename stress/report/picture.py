"""The picture: memory and micro-batch of each run, over its steps."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from matplotlib.figure import Figure

from elastic_mbs.cli.report.scale import powers_of_two

from ..record import Run, count
from .data import available, began, run_data

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLUMNS = 3
MIB = 2**20
USED, OTHERS, LINE, FAILED, GROWN = "#3b82c4", "#d6d3cd", "#1f2933", "#d1342f", "#2a9d4a"
PASSED = "#1d7a37"
LONGER = "#9b6fc4"


def draw(runs: Sequence[Run], path: Path) -> None:
    """Writes the picture as a PNG.

    Raises:
        OSError: the file cannot be written.
    """
    columns = max(1, min(COLUMNS, len(runs)))
    rows = max(1, -(-len(runs) // columns))
    figure = Figure(figsize=(4.6 * columns, 2.9 * rows + 0.8), dpi=120, layout="constrained")
    cells = figure.subfigures(rows, columns, squeeze=False, hspace=0.03, wspace=0.02)
    entries: dict[str, object] = {}
    for run, cell in zip(runs, cells.flat, strict=False):
        memory, size = cell.subplots(2, 1, sharex=True, height_ratios=[1.5, 1])
        word = "FAILED" if not run.passed else "passed" if run.shown else "not shown"
        memory.set_title(f"{run.title} · {run.kind}", loc="left", fontsize=9.5, fontweight="bold", color=LINE)
        memory.set_title(word, loc="right", fontsize=9.5, fontweight="bold", color=PASSED if run.shown else LINE if run.passed else FAILED)
        _draw_memory(memory, run)
        _draw_sizes(size, run)
        if not run.steps:
            memory.text(0.5, 0.5, "no step was made", ha="center", va="center", fontsize=9, transform=memory.transAxes)
        for axes in (memory, size):
            axes.spines[["top", "right"]].set_visible(False)
            axes.tick_params(labelsize=7.5)
            axes.set_xlim(0, max(1, len(run.steps)))
            entries |= {str(label): handle for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)}
        if not run.passed:
            cell.set_facecolor("#fdeceb")
    failed = sum(not run.passed for run in runs)
    title = f"{failed} of {len(runs)} runs failed" if failed else f"all {len(runs)} runs passed" if all(run.shown for run in runs) else count(runs)
    figure.suptitle(f"elastic_mbs under stress: {title}", fontsize=12, fontweight="bold", x=0.01, ha="left")
    if entries:
        figure.legend(entries.values(), entries.keys(), loc="outside lower left", ncols=min(6, 2 * columns), fontsize=8.5, frameon=False)  # type: ignore[call-overload]  # it knows only handles
    figure.savefig(path, format="png")


def _draw_memory(axes: Axes, run: Run) -> None:
    steps = run.steps
    edges = list(range(len(steps) + 1))
    top = max([step.capacity or 0 for step in steps] + [step.peak for step in steps], default=0) / MIB or 1.0
    left = [available(step) for step in steps]
    limit = [math.nan if value is None else value / MIB for value in left]
    if any(value is not None for value in left):
        whole = [top if value is not None else math.nan for value in left]
        axes.stairs(whole, edges, baseline=[0.0 if math.isnan(value) else value for value in limit], fill=True, color=OTHERS, label="held by others")
        axes.stairs(limit, edges, baseline=None, color=LINE, linewidth=1.2, label="what there is for us")
    axes.stairs([step.peak / MIB for step in steps], edges, fill=True, color=USED, alpha=0.35, label="our peak")
    axes.stairs([step.live / MIB for step in steps], edges, fill=True, color=USED, label="ours after the step")
    axes.set_ylim(0, top * 1.02)
    axes.set_ylabel("MiB", fontsize=8)


def _draw_sizes(axes: Axes, run: Run) -> None:
    position = _positions(run)
    zero, lines = began(run), run_data(run).sizes
    for rank, (_, points) in enumerate(sorted(lines.items(), key=lambda item: -len(item[1]))):
        label, color, width = (("micro-batch", LINE, 1.5), ("micro-batch of samples of another length", LONGER, 3.0))[min(rank, 1)]
        x = [position(zero + t) for t, _ in points] + [float(len(run.steps))]
        y = [size or 0.0 for _, size in points]
        axes.plot(x, [*y, y[-1]], drawstyle="steps-post", color=color, linewidth=width, zorder=3 - min(rank, 1), label=label)
    for what, marker, color, label in (("oom", "v", FAILED, "out of memory, survived"), ("grow", "^", GROWN, "grown")):
        marks = [mark for mark in run.marks if mark.what == what and mark.after is not None]
        if marks:
            x, y = [position(mark.at) for mark in marks], [float(mark.after or 0) for mark in marks]
            axes.plot(x, y, marker, color=color, markersize=5.5, markeredgecolor="white", markeredgewidth=0.6, clip_on=False, zorder=5, label=label)
    axes.set_yscale("log", base=2)
    seen = [size for points in lines.values() for _, size in points if size is not None]
    seen += [float(mark.after) for mark in run.marks if mark.after]  # what was tried and failed lies lower than any step's size
    scale = powers_of_two(min(seen, default=1.0), max(seen, default=1.0))
    axes.set_yticks([tick.value for tick in scale.ticks], [tick.label for tick in scale.ticks])
    axes.minorticks_off()
    axes.set_ylim(scale.low, scale.high)
    axes.set_xlabel("step", fontsize=8)
    axes.set_ylabel("samples", fontsize=8)


def _positions(run: Run) -> Callable[[float], float]:
    """Time → place on the axis: steps have the same width, whatever they took."""
    starts = [step.at for step in run.steps]

    def position(at: float) -> float:
        index = bisect_right(starts, at) - 1
        if index < 0:
            return 0.0
        step = run.steps[index]
        return index + (min(1.0, (at - step.at) / step.seconds) if step.seconds > 0 else 0.5)

    return position
