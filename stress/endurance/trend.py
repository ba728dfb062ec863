"""What is measured over a long run, and whether it is flat."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import combinations
from statistics import median

import psutil
from torch import nn

LEAST = 8
"""Samples of the second half that a trend needs."""


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
    hooks = sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules())
    hooks += sum(len(leaf._post_accumulate_grad_hooks or ()) + len(leaf._backward_hooks or ()) for leaf in model.parameters())
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


def rise(samples: Sequence[Sample], name: str) -> float:
    """How much a figure has risen over the second half of the samples, by its trend."""
    half = samples[len(samples) // 2 :]
    xs = [sample.at for sample in half]
    return slope(xs, [float(getattr(sample, name)) for sample in half]) * (xs[-1] - xs[0])


def allowed(samples: Sequence[Sample], name: str) -> float:
    """How much it may have risen."""
    least, share = LIMITS[name]
    half = [float(getattr(sample, name)) for sample in samples[len(samples) // 2 :]]
    return max(least, share * median(half))


def complaints(samples: Sequence[Sample]) -> list[str]:
    """What is not flat, in words with numbers; a run that is too short to tell says so."""
    if len(samples) // 2 < LEAST:
        return [f"{len(samples)} samples are too few for a trend: it takes {2 * LEAST}; run longer"]
    found = []
    for each in fields(Sample):
        if each.name == "at":
            continue
        risen, limit = rise(samples, each.name), allowed(samples, each.name)
        if risen > limit:
            minutes = (samples[-1].at - samples[len(samples) // 2].at) / 60
            found.append(f"{each.name} has risen by {risen:.4g} in the last {minutes:.1f} min, and {limit:.4g} is allowed")
    hooks = max(sample.hooks for sample in samples)
    if hooks:
        found.append(f"{hooks} hooks were left on the model by closed runtimes")
    return found
