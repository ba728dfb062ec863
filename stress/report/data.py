"""A run under stress as a run log's report shows runs: lines over time, marks, figures."""

from __future__ import annotations

import math
from collections.abc import Sequence

from elastic_mbs.cli.report.data import Mark, Memory, RunData
from elastic_mbs.cli.report.scale import Point, duration
from elastic_mbs.events import format_bytes

from .. import record
from ..record import Run, Step

_LOOKS = {"oom": "oom", "optimizer": "oom", "grow": "grow", "shrink": "shrink"}
Tile = tuple[str, str, str]
"""Name, value, remark."""


def run_data(run: Run) -> RunData:
    """Return the run as lines, marks and figures; time begins with its first step.

    The memory's lane shows its moves.
    """
    steps = run.steps
    zero = min([step.at for step in steps] + [mark.at for mark in run.marks], default=0.0)
    lengths = {step.elements for step in steps}
    # Inputs of another length have sizes of their own.
    tracks = {
        step.step: "micro-batch" if len(lengths) == 1 else f"samples of {step.elements:,} numbers"
        for step in steps
    }
    marks = [
        _mark(mark, zero, tracks)
        for mark in sorted(run.marks, key=lambda mark: mark.at)
        if mark.what != "move"
    ]
    ends = [step.at + step.seconds - zero for step in steps]
    return RunData(
        title=run.title,
        about=_about(run),
        tiles=_tiles(run),
        seconds=max([*ends, *(mark.t for mark in marks)], default=0.0),
        memory=_memory(steps, zero),
        sizes=_sizes(run, zero, tracks),
        rates={
            "train": _per_step(
                steps,
                zero,
                [step.samples / step.seconds if step.seconds > 0 else None for step in steps],
            )
        },
        lost=_per_step(
            steps,
            zero,
            [
                min(1.0, step.time_lost / step.seconds) if step.seconds > 0 else None
                for step in steps
            ],
        ),
        loss=[
            (end, step.loss if math.isfinite(step.loss) else None)
            for end, step in zip(ends, steps, strict=True)
        ],
        marks=marks,
        events=len(marks),
    )


def difference(run: Run) -> str:
    """Return the largest relative difference from the reference, in words."""
    return (
        ""
        if run.differences is None
        else f"{run.differences.largest:.1e}"
        if run.differences.largest
        else "0"
    )


def sizes(run: Run) -> str:
    """Return the micro-batch sizes of a run, from the smallest to the largest."""
    return "–".join(f"{size:,}" for size in dict.fromkeys((*run.sizes[:1], *run.sizes[-1:])))


def _memory(steps: Sequence[Step], zero: float) -> Memory:
    capacity: list[Point] = []
    for step in steps:
        left = None if math.isinf(step.available) else max(0.0, float(step.available))
        if left is not None and step.lowest is not None and step.lowest < left:
            capacity += [
                (step.at - zero, max(0.0, float(step.lowest))),
                (step.at + step.seconds - zero, left),
            ]
        else:
            capacity.append((step.at - zero, left))
    live, peak = (
        _per_step(steps, zero, [float(getattr(step, name)) for step in steps])
        for name in ("live", "peak")
    )
    total = float(
        max(
            (each for step in steps for each in (step.capacity or 0, step.peak, step.live)),
            default=0,
        )
    )
    return Memory(total, allocated=live, reserved=[], peak=peak, capacity=capacity, margin=[])


def _sizes(run: Run, zero: float, tracks: dict[int, str]) -> dict[str, list[Point]]:
    found: dict[str, list[Point]] = {}
    for step in run.steps:
        line = found.setdefault(tracks[step.step], [])
        moves = sorted(
            (mark for mark in run.marks if mark.step == step.step and mark.after is not None),
            key=lambda mark: mark.at,
        )
        # A step began with the size before its first move, or, without one, with the size it ended
        # with.
        first = moves[0].before if moves else step.size
        line.append(
            (step.at - zero, first if first is not None else line[-1][1] if line else step.size)
        )
        line += [(mark.at - zero, mark.after) for mark in moves]
        # A growth at its boundary is reported before the step is over, and belongs to the next one.
        end, size = (moves[-1].at, moves[-1].after) if moves else (0.0, step.size)
        line.append((max(step.at + step.seconds, end) - zero, size))
    return {name: sorted(line, key=lambda point: point[0]) for name, line in found.items()}


def _per_step(steps: Sequence[Step], zero: float, values: Sequence[float | None]) -> list[Point]:
    """Return a figure of each step as points.

    A value holds from the end of the step before; the first one, from its own step's start.
    """
    points = [
        (step.at + step.seconds - zero, value) for step, value in zip(steps, values, strict=True)
    ]
    return [(steps[0].at - zero, values[0]), *points] if points else []


def _about(run: Run) -> tuple[tuple[str, str], ...]:
    needs = run.needs
    peaks = zip(needs.sizes, needs.peaks, strict=True)
    facts = [
        ("model", f"{run.model}, {run.dtype}"),
        ("seed", str(run.seed)),
        ("at rest", format_bytes(needs.rest)),
    ]
    return (
        *facts,
        *((f"{size} of {needs.samples} samples", format_bytes(peak)) for size, peak in peaks),
    )


def _tiles(run: Run) -> tuple[Tile, ...]:
    steps = run.steps
    end = run.end
    error, _, text = (end.error or "" if end is not None else "").partition(": ")
    return (
        *([("ended by", error, text[:100])] if error else []),
        ("steps", f"{len(steps):,}", duration(sum(step.seconds for step in steps))),
        (
            "OOMs survived",
            f"{run.ooms:,}",
            "" if end is None or end.failures is None else f"{end.failures:,} allocations refused",
        ),
        (
            "samples replayed",
            f"{sum(step.replayed for step in steps):,}",
            f"{run.replayed:.2%} of all",
        ),
        ("time lost", duration(run.time_lost), ""),
        ("micro-batch", sizes(run) or "none", f"{steps[-1].size:,} at the end" if steps else ""),
        (
            "largest difference",
            difference(run) or "none",
            "from training without limits" if run.differences else "there was nothing to compare",
        ),
        (
            "held at the end",
            *(
                ("unknown", "")
                if end is None
                else (format_bytes(end.held), f"{format_bytes(end.expected)} expected")
            ),
        ),
    )


def _mark(mark: record.Mark, zero: float, tracks: dict[int, str]) -> Mark:
    facts = [("step", str(mark.step)), ("what", mark.text)]
    if mark.before is not None and mark.after is not None:
        facts.append(("action", f"micro-batch {mark.before} → {mark.after}"))
    key = tracks.get(mark.step, "") if mark.after is not None else ""
    title = "out of memory" if mark.what == "oom" else mark.what.replace("_", " ")
    return Mark(
        mark.at - zero,
        _LOOKS.get(mark.what, "note"),
        title,
        tuple(facts),
        f"step {mark.step}: {mark.text}",
        key,
        mark.after,
    )
