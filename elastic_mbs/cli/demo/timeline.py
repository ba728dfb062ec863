"""The picture: memory against budget, the micro-batch, and both loss curves, over the steps."""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from elastic_mbs.cli.demo.compare import Outcome, Setting
from elastic_mbs.cli.demo.record import Record, Step
from elastic_mbs.controller.controller import shape_class
from elastic_mbs.events import OutOfMemory, Resized, format_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MIB = 2**20
USED, OTHERS, LINE, FAILED, GROWN, REFERENCE = "#3b82c4", "#d6d3cd", "#1f2933", "#d1342f", "#2a9d4a", "#f2a93b"
SHAPES = LINE, "#b795d6", "#e0bd8b"
Position = Callable[[float], float]


def draw(outcome: Outcome, setting: Setting, path: Path) -> None:
    """Writes the picture as a PNG of 1800 × 1300 pixels, to be shown at half of that.

    Raises:
        ImportError: matplotlib is not installed.
        OSError: the file cannot be written.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 6.6), dpi=200, layout="constrained")
    memory, sizes, loss = figure.subplots(3, 1, sharex=True, height_ratios=[3, 2.4, 1.8])
    whole, budget = format_bytes(setting.needs.whole), format_bytes(setting.budget)
    title = f"{setting.options.batch} documents per step need {whole}, in {budget} shared with a co-tenant"
    figure.suptitle(title, fontsize=13, fontweight="bold", x=0.01, ha="left")
    position = _positions(outcome.record)
    _draw_memory(memory, outcome.record, setting, position)
    _draw_sizes(sizes, outcome.record, setting, position)
    _draw_loss(loss, outcome)
    for axes in (memory, sizes, loss):
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(labelsize=9)
        axes.margins(x=0)
    loss.set_xlabel("step", fontsize=10)
    loss.set_xlim(0, len(outcome.steps))
    figure.savefig(path, format="png")


def _positions(record: Record) -> Position:
    """Time → place on the axis: steps have the same width, whatever they took."""
    steps = record.steps

    def position(at: float) -> float:
        step = next((step for step in steps if at <= step.ended), steps[-1])
        return step.index + min(1.0, max(0.0, (at - step.began) / (step.ended - step.began)))

    return position


def _draw_memory(axes: Axes, record: Record, setting: Setting, position: Position) -> None:
    samples = sorted(record.samples, key=lambda sample: sample.at)
    x, used, limit = (
        [position(sample.at) for sample in samples],
        [sample.used / MIB for sample in samples],
        [sample.limit / MIB for sample in samples],
    )
    top = setting.budget / MIB
    axes.fill_between(x, limit, top, step="post", color=OTHERS, linewidth=0, label="held by the co-tenant")
    axes.fill_between(x, _running_maximum(x, used), color=USED, alpha=0.25, linewidth=0)
    axes.fill_between(x, used, color=USED, linewidth=0, label="our live tensors")
    axes.plot(x, limit, drawstyle="steps-post", color=LINE, linewidth=1.4, label="what there is for us")
    times = [sample.at for sample in samples]
    ooms = [(position(at), limit[bisect_right(times, at) - 1]) for at, event in _events(record) if isinstance(event, OutOfMemory)]
    _mark(axes, ooms, "X", FAILED, "out of memory, survived")
    for (at, move), side in zip(record.moves, ("left", "right", "left"), strict=False):  # the second and the third come soon after each other
        axes.annotate(move.what, (position(at), top), xytext=(0, 4), textcoords="offset points", fontsize=8.5, color="#444444", ha=side)
    axes.set_ylim(0, top)
    axes.set_ylabel("memory (MiB)", fontsize=10)
    axes.legend(loc="upper left", ncols=4, fontsize=8.5, frameon=False, bbox_to_anchor=(0, 1.22), borderaxespad=0)


def _running_maximum(x: list[float], y: list[float], reach: float = 0.15) -> list[float]:
    """The highest y within `reach` of each x, which is sorted."""
    window: deque[tuple[float, float]] = deque()
    highest, ahead = [], 0
    for here in x:
        while ahead < len(x) and x[ahead] <= here + reach:
            while window and window[-1][1] <= y[ahead]:
                window.pop()
            window.append((x[ahead], y[ahead]))
            ahead += 1
        while window[0][0] < here - reach:
            window.popleft()
        highest.append(window[0][1])
    return highest


def _mark(axes: Axes, points: Sequence[tuple[float, float]], marker: str, color: str, label: str) -> None:
    x, y = [at for at, _ in points], [value for _, value in points]
    axes.plot(x, y, marker, color=color, markersize=8, markeredgecolor="white", clip_on=False, zorder=5, label=label)


def _draw_sizes(axes: Axes, record: Record, setting: Setting, position: Position) -> None:
    shapes = sorted({_shape(step) for step in record.steps}, reverse=True)
    for rank, shape in enumerate(shapes):
        steps = [step for step in record.steps if _shape(step) == shape]
        low, high = min(step.length for step in steps), max(step.length for step in steps)
        points = [(position(at), size) for step in steps for at, size in step.sizes]
        points.append((len(record.steps), points[-1][1]))
        tokens = f"{low}–{high}" if low < high else str(low)
        color, width = SHAPES[min(rank, len(SHAPES) - 1)], 1.5 if rank == 0 else 3.6  # wider below narrower: both show where they meet
        axes.plot(
            *zip(*points, strict=True), drawstyle="steps-post", color=color, linewidth=width, zorder=3 - rank, label=f"batches of {tokens} tokens"
        )
    failed = [(position(at), event.size_after) for at, event in _events(record) if isinstance(event, OutOfMemory)]
    grown = [(position(at), event.after) for at, event in _events(record) if isinstance(event, Resized) and event.after > event.before]
    _mark(axes, failed, "v", FAILED, "out of memory: halved")
    _mark(axes, grown, "^", GROWN, "grown")
    axes.set_yscale("log", base=2)
    ticks = [2**i for i in range(setting.options.batch.bit_length()) if 2**i <= 2 * max(size for step in record.steps for _, size in step.sizes)]
    axes.set_yticks(ticks, [str(tick) for tick in ticks])
    axes.set_ylabel("micro-batch", fontsize=10)
    axes.legend(loc="upper left", ncols=4, fontsize=8.5, frameon=False, bbox_to_anchor=(0, 1.2), borderaxespad=0)


def _events(record: Record) -> Iterator[tuple[float, object]]:
    return (noted for step in record.steps for noted in step.events)


def _shape(step: Step) -> int:
    return shape_class(2 * step.length)


def _draw_loss(axes: Axes, outcome: Outcome) -> None:
    x = [step.index + 0.5 for step in outcome.steps]
    axes.plot(x, outcome.reference, color=REFERENCE, linewidth=5, solid_capstyle="round", label="whole batch, no limit, plain PyTorch")
    axes.plot(x, [step.loss for step in outcome.steps], color=LINE, linewidth=1.4, label="elastic_mbs, within the budget")
    axes.annotate(
        f"largest relative difference {max(outcome.differences):.0e}",
        (0.99, 0.62),
        xycoords="axes fraction",
        ha="right",
        fontsize=9.5,
        fontweight="bold",
    )
    axes.set_ylabel("loss", fontsize=10)
    axes.legend(loc="upper right", ncols=2, fontsize=8.5, frameon=False)
