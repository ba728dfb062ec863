"""A run under stress, as the report of a run log shows runs: lines over time, marks, figures. Nothing of how it looks."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from elastic_mbs.cli.report.data import Mark, Memory, RunData
from elastic_mbs.cli.report.decimate import Point
from elastic_mbs.cli.report.scale import duration, number
from elastic_mbs.events import format_bytes

from .. import record
from ..record import Run, Step

COUNTED = "budget"
"""The kind whose memory is counted; in all others an allocator fails."""

MOVES = 8
"""More moves of the limit than these have no marks: the lane of the memory shows them."""

_KINDS = {"oom": "oom", "optimizer": "oom", "grow": "grow", "shrink": "shrink"}
_TITLES = {
    "oom": "out of memory",
    "optimizer": "out of memory in the optimizer's step",
    "grow": "grown",
    "shrink": "shrunk",
    "sensor_lost": "no memory reading",
    "sensor_back": "memory readings are back",
    "waiting": "waiting for memory",
    "eval": "evaluation",
    "killed": "killed",
    "resumed": "resumed",
}


def run_data(run: Run) -> RunData:
    """The run as lines, marks and figures; time begins with its first step."""
    zero = began(run)
    tracks = _tracks(run.steps)
    moves = sum(mark.what == "move" for mark in run.marks)
    told = [mark for mark in run.marks if mark.what != "move" or moves <= MOVES]
    marks = [_mark(mark, zero, tracks) for mark in sorted(told, key=lambda mark: mark.at)]
    ends = [step.at + step.seconds - zero for step in run.steps] + [mark.t for mark in marks]
    return RunData(
        title=run.title,
        about=_about(run),
        tiles=_tiles(run),
        seconds=max(ends, default=0.0),
        memory=_memory(run.steps, zero),
        sizes=_sizes(run, zero, tracks),
        rates={"train": _per_step(run.steps, zero, [_ratio(step.samples, step.seconds) for step in run.steps])},
        lost=_per_step(run.steps, zero, [_share(step) for step in run.steps]),
        loss=[(step.at + step.seconds - zero, step.loss if math.isfinite(step.loss) else None) for step in run.steps],
        marks=marks,
    )


def began(run: Run) -> float:
    """When its first step began, or what happened before that."""
    return min([step.at for step in run.steps] + [mark.at for mark in run.marks], default=0.0)


def overview(runs: Sequence[Run]) -> tuple[tuple[str, str, str], ...]:
    """The figures of all runs together: name, value, remark."""
    shown = sum(run.shown for run in runs)
    steps = sum(len(run.steps) for run in runs)
    real = sum(run.end.failures or 0 for run in runs if run.end is not None and run.kind != COUNTED)
    replayed = sum(step.replayed for run in runs for step in run.steps)
    samples = sum(step.samples for run in runs for step in run.steps)
    worst = max((run for run in runs if run.differences is not None), key=_largest, default=None)
    kinds = Counter(run.kind for run in runs)
    return (
        ("runs passed", f"{shown} of {len(runs)}", ", ".join(f"{kind} {count}" for kind, count in kinds.items())),
        ("steps", f"{steps:,}", f"{samples:,} samples"),
        ("OOMs survived", f"{sum(run.ooms for run in runs):,}", ""),
        ("allocator failures", f"{real:,}", "real ones, not counted memory" if real else "memory was counted only"),
        ("samples replayed", f"{replayed:,}", f"{replayed / samples:.2%} of all" if samples else ""),
        ("largest difference", difference(worst) if worst is not None else "none", worst.title + " · " + worst.kind if worst is not None else ""),
        ("time", duration(sum(run.seconds for run in runs)), f"{duration(sum(run.time_lost for run in runs))} lost to replays"),
    )


def difference(run: Run) -> str:
    """The largest relative difference from the reference, in words."""
    return "" if run.differences is None else f"{run.differences.largest:.1e}" if run.differences.largest else "0"


def sizes(run: Run) -> str:
    """The micro-batch sizes of a run, from the smallest to the largest."""
    if not run.sizes:
        return ""
    return f"{run.sizes[0]:,}" if len(run.sizes) == 1 else f"{run.sizes[0]:,}–{run.sizes[-1]:,}"


def available(step: Step) -> float | None:
    """Bytes that a step had at its end; None without a limit."""
    return None if math.isinf(step.available) else max(0.0, float(step.available))


def _largest(run: Run) -> float:
    if run.differences is None:
        return -1.0
    return math.inf if math.isnan(run.differences.largest) else run.differences.largest


# ---------------------------------------------------------------------- lines


def _memory(steps: Sequence[Step], zero: float) -> Memory:
    capacity: list[Point] = []
    for step in steps:
        left = available(step)
        if left is not None and step.lowest is not None and step.lowest < left:
            capacity += [(step.at - zero, max(0.0, float(step.lowest))), (step.at + step.seconds - zero, left)]
        else:
            capacity.append((step.at - zero, left))
    limits = [step.capacity for step in steps if step.capacity is not None]
    return Memory(
        total=float(max([*limits, *(step.peak for step in steps), *(step.live for step in steps)], default=0)),
        allocated=_per_step(steps, zero, [float(step.live) for step in steps]),
        reserved=[],
        peak=_per_step(steps, zero, [float(step.peak) for step in steps]),
        capacity=capacity,
        margin=[],
    )


def _tracks(steps: Sequence[Step]) -> dict[int, str]:
    """The name of each step's track: inputs of another length have sizes of their own."""
    lengths = sorted({step.elements for step in steps})
    if len(lengths) <= 1:
        return dict.fromkeys((step.step for step in steps), "micro-batch")
    return {step.step: f"samples of {step.elements:,} numbers" for step in steps}


def _sizes(run: Run, zero: float, tracks: dict[int, str]) -> dict[str, list[Point]]:
    found: dict[str, list[Point]] = {}
    moved: dict[int, list[record.Mark]] = {}
    for mark in sorted(run.marks, key=lambda mark: mark.at):
        if mark.after is not None:
            moved.setdefault(mark.step, []).append(mark)
    for step in run.steps:
        line = found.setdefault(tracks[step.step], [])
        moves = moved.get(step.step, [])
        # what a step began with: the size before its first move, or, without one, the size it ended with
        first = moves[0].before if moves else step.size
        line.append((step.at - zero, first if first is not None else line[-1][1] if line else step.size))
        line += [(mark.at - zero, mark.after) for mark in moves]
        # a growth at its boundary is told before the step is over, and belongs to the next one
        last = moves[-1] if moves else None
        line.append((max(step.at + step.seconds, last.at if last else 0.0) - zero, last.after if last else step.size))
    return {name: sorted(line, key=lambda point: point[0]) for name, line in found.items()}


def _per_step(steps: Sequence[Step], zero: float, values: Sequence[float | None]) -> list[Point]:
    """A figure of each step, which holds from the step before it; that of the first one from its own beginning."""
    points = [(step.at + step.seconds - zero, value) for step, value in zip(steps, values, strict=True)]
    return [(steps[0].at - zero, values[0]), *points] if points else []


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole > 0 else None


def _share(step: Step) -> float | None:
    share = _ratio(step.time_lost, step.seconds)
    return None if share is None else min(1.0, max(0.0, share))


# ---------------------------------------------------------------------- figures and marks


def _about(run: Run) -> tuple[tuple[str, str], ...]:
    needs = run.needs
    told = (
        ("model", f"{run.model}, {run.dtype}"),
        ("seed", str(run.seed)),
        ("at rest", format_bytes(needs.rest)),
        (f"{needs.sizes[0]} of {needs.samples} samples" if needs.sizes else "", format_bytes(needs.one) if needs.peaks else ""),
        ("the whole batch", format_bytes(needs.whole) if needs.peaks else ""),
        (
            "rounding",
            f"{run.differences.tolerance_loss:.0e} in a loss, {run.differences.tolerance_weight:.0e} in a weight" if run.differences else "",
        ),
    )
    return tuple((name, value) for name, value in told if name and value)


def _tiles(run: Run) -> tuple[tuple[str, str, str], ...]:
    steps, end = run.steps, run.end
    busy = sum(step.seconds for step in steps)
    ended = (("ended by", end.error.partition(":")[0], end.error.partition(":")[2].strip()[:100]),) if end is not None and end.error else ()
    held = "" if end is None else f"{format_bytes(end.expected)} expected"
    return (
        *ended,
        ("steps", f"{len(steps):,}", duration(busy)),
        ("OOMs survived", f"{run.ooms:,}", "" if end is None or end.failures is None else f"{end.failures:,} allocations refused"),
        ("samples replayed", f"{sum(step.replayed for step in steps):,}", f"{run.replayed:.2%} of all"),
        ("time lost", f"{run.time_lost / busy:.2%}" if busy > 0 else "0 %", duration(run.time_lost)),
        ("micro-batch", sizes(run) or "none", f"{number(steps[-1].size)} at the end" if steps else ""),
        ("largest difference", difference(run) or "none", "from training without limits" if run.differences else "there was nothing to compare"),
        ("held at the end", "unknown" if end is None else format_bytes(end.held), held),
    )


def _mark(mark: record.Mark, zero: float, tracks: dict[int, str]) -> Mark:
    kind = _KINDS.get(mark.what, "note")
    facts = [("step", str(mark.step)), ("what", mark.text)]
    if mark.before is not None and mark.after is not None:
        facts.append(("action", f"micro-batch {mark.before} → {mark.after}"))
    title = _TITLES.get(mark.what, mark.what.replace("_", " "))
    key = tracks.get(mark.step, "") if mark.after is not None else ""
    return Mark(mark.at - zero, kind, title, tuple(facts), f"step {mark.step}: {mark.text}", key, mark.after)
