"""What is measured over a long run, and whether it is flat."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import median

import psutil
from torch import nn

from ..reference.state import hooks_on

LEAST = 8  # samples of the second half that a trend needs


@dataclass(frozen=True)
class Sample:
    """What was measured at one moment, every runtime closed and every gradient gone."""

    at: float  # seconds since the start
    live: int  # bytes of tensors, as the memory limit counts them
    resident: int  # bytes of the process that are in memory
    data: int  # bytes of its data segments; 0 where the system does not tell
    threads: int
    files: int  # descriptors that are open
    objects: int  # that Python's garbage collector follows
    hooks: int  # on the modules and leaves of the model
    ratio: float  # time of a step without an event, beside a loop written by hand with the same pieces


def measured(at: float, live: int, model: nn.Module, ratio: float) -> Sample:
    """The process now."""
    gc.collect()
    process = psutil.Process()
    hooks = hooks_on(model, model.parameters())
    files = process.num_fds() if hasattr(process, "num_fds") else 0
    memory = process.memory_info()
    return Sample(at, live, memory.rss, getattr(memory, "data", 0), process.num_threads(), files, len(gc.get_objects()), hooks, ratio)


MIB = 1 << 20
LIMITS: dict[str, tuple[float, float]] = {
    "live": (0.0, 0.0),
    "resident": (8 * MIB, 0.02),
    "data": (8 * MIB, 0.02),
    "threads": (0.5, 0.0),
    "files": (0.5, 0.0),
    "objects": (200.0, 0.01),
    "hooks": (0.0, 0.0),
    "ratio": (0.05, 0.0),
}
"""How much each may rise over the second half: so much in its own unit, or this part of its median where that is more."""


def slope(xs: Sequence[float], ys: Sequence[float]) -> float:
    """The median of the slopes between all pairs of points (Theil–Sen): up to 29 % of the points may be far off without a change of it."""
    slopes = [(y2 - y1) / (x2 - x1) for (x1, y1), (x2, y2) in combinations(zip(xs, ys, strict=True), 2) if x2 != x1]
    return median(slopes) if slopes else 0.0


def trends(samples: Sequence[Sample]) -> Iterator[tuple[str, float, float]]:
    """Each figure with how much it has risen over the second half of the samples, by its slope, and how much it may have."""
    half = samples[len(samples) // 2 :]
    xs = [sample.at for sample in half]
    for name, (least, share) in LIMITS.items():
        ys = [float(getattr(sample, name)) for sample in half]
        yield name, slope(xs, ys) * (xs[-1] - xs[0]), max(least, share * median(ys))


def complaints(samples: Sequence[Sample]) -> list[str]:
    """What is not flat, in words with numbers; a run that is too short to tell says so."""
    if len(samples) // 2 < LEAST:
        return [f"{len(samples)} samples are too few for a trend: it takes {2 * LEAST}; run longer"]
    minutes = (samples[-1].at - samples[len(samples) // 2].at) / 60
    how = f"in the last {minutes:.1f} min"
    found = [f"{name} has risen by {rise:.4g} {how}, and {limit:.4g} is allowed" for name, rise, limit in trends(samples) if rise > limit]
    hooks = max(sample.hooks for sample in samples)
    return [*found, f"{hooks} hooks were left on the model by closed runtimes"] if hooks else found
