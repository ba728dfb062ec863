"""Compute the time of a global batch on ranks of unequal speed, divided by `ShareSampler`.

All ranks wait for the slowest one. The ideal division lets all of them end at the same moment, and
takes the batch's samples over the sum of the speeds. Each rank's sampler runs as in a job. The
seconds of a rank's part are computed: its samples over its speed, times a random factor for the
noise of a measurement, plus a fixed cost of each step, which is the same part of an ideal step on
all ranks.

    python -m benchmarks.unequal_ranks [SPEED …] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from elastic_mbs.recipes import ShareSampler


class Times(NamedTuple):
    """Seconds of a global batch, relative to the ideal division.

    Attributes:
        equal: with equal parts.
        shared: by `ShareSampler`, mean over the batches after its first change.
        worst: the longest of these.
    """

    equal: float
    shared: float
    worst: float


def simulate(
    speeds: Sequence[float],
    *,
    batch: int = 256,
    noise: float = 0.05,
    fixed: float = 0.05,
    every: int = 20,
    batches: int = 200,
    seed: int = 0,
) -> Times:
    """Return the times of a global batch of a job.

    Args:
        speeds: of the ranks, in samples per second.
        batch: samples of a global batch.
        noise: standard deviation of a measurement, relative.
        fixed: cost of a step beside its samples, of an ideal step.
        every: batches after which shares follow.
        batches: of the run.
        seed: of the noise.
    """
    rng = random.Random(seed)
    ranks = len(speeds)
    samplers = [
        ShareSampler(batch * batches, batch, rank=rank, ranks=ranks, every=every)
        for rank in range(ranks)
    ]
    ideal = batch / sum(speeds)
    ends = []
    for parts in zip(*samplers, strict=True):
        sizes = list(map(len, parts))
        assert sum(sizes) == batch
        assert len(set().union(*parts)) == batch
        took = [size / speed + fixed * ideal for size, speed in zip(sizes, speeds, strict=True)]
        ends.append(max(took) / (ideal + fixed * ideal))
        measured = [
            size / (seconds * rng.lognormvariate(0, noise))
            for size, seconds in zip(sizes, took, strict=True)
        ]
        for sampler in samplers:
            sampler.follow(measured)
    return Times(ends[0], statistics.mean(ends[every:]), max(ends[every:]))


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a line for each amount of noise and of fixed cost."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "speeds", nargs="*", type=float, metavar="SPEED", default=[1.0, 2.0], help="default 1 2"
    )
    parser.add_argument("--batch", type=int, default=256, help="samples (default %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    options = parser.parse_args(arguments)
    rows = []
    for noise in (0.0, 0.05, 0.2):
        for fixed in (0.0, 0.05, 0.2):
            found = simulate(options.speeds, batch=options.batch, noise=noise, fixed=fixed)
            rows.append({"noise": noise, "fixed": fixed, **found._asdict()})
            print(
                f"noise {noise:4.0%}, fixed cost {fixed:4.0%}: equal parts {found.equal:.3f}, "
                f"shared {found.shared:.3f}, worst {found.worst:.3f} of the ideal division"
            )
    if options.json is not None:
        report = {"speeds": options.speeds, "batch": options.batch, "rows": rows}
        options.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
