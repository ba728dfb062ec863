"""A picture of a plan's table."""

from __future__ import annotations

from pathlib import Path

from elastic_mbs import PlanReport
from elastic_mbs.errors import UsageError


def draw(report: PlanReport, path: Path) -> None:
    """Draw the parts of the peak by size, and the memory that is there."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UsageError("--plot needs matplotlib: pip install 'elastic-mbs[plot]'") from error
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot(xlabel="micro-batch (samples)", ylabel="peak memory (GiB)")
    sizes = report.sizes[::-1]
    base = [0.0] * len(sizes)
    for part in ("parameters", "optimizer", "other", "gradients", "activations"):
        heights = [getattr(planned, part) / 2**30 for planned in sizes]
        axes.bar([str(planned.size) for planned in sizes], heights, bottom=base, label=part)
        base = [low + height for low, height in zip(base, heights, strict=True)]
    lines = (
        ("what there is", report.capacity, "-"),
        ("without the margin", report.usable, "--"),
        ("optimizer's step", report.step or None, ":"),
    )
    for label, figure_of, style in lines:
        if figure_of is not None:
            axes.axhline(figure_of / 2**30, label=label, linestyle=style, color="black")
    axes.legend()
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:  # no such folder, or no format of that name
        raise UsageError(f"--plot {path}: {error}") from error
