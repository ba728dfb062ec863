"""Time and memory of each fixed size.

An expert picks from this table, and the oracle knows each step's best from it.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.bench.job import Job, Task
from benchmarks.workloads import Workload, wait
from stress.limits import simcuda

MOST = 12
AMPLE = 2**40
SETTLED = 3
"""Steps after which a device's allocator has cached the blocks that steps of one size need."""
SPARE = 8 * 2**20
"""Bytes that a device has to have beyond that.

The place of small tensors depends on earlier runs, and they take blocks of 2 MiB.
"""


@dataclass(frozen=True)
class Fixed:
    """A size.

    Attributes:
        size: samples of the longest piece.
        pieces: of a batch.
        seconds: of a step, median.
        peak: bytes of live tensors, the highest seen in a step with its optimizer's; on a device,
            bytes reserved for them, and some.
    """

    size: int
    pieces: int
    seconds: float
    peak: int


class Sweep:
    """The sizes that cut a batch into 1 to `most` pieces, measured in turns.

    Other sizes need as many pieces as one of these, and more memory.

    Args:
        make: the workload.
        rounds: steps of each size that count.
        most: pieces.
    """

    def __init__(self, make: Callable[[], Workload], rounds: int, most: int = MOST) -> None:
        job = Job(Task(make, [AMPLE], turn=0), lambda: None)
        sizes = sorted(
            {-(-job.samples // pieces) for pieces in range(1, min(most, job.samples) + 1)},
            reverse=True,
        )
        seconds: dict[int, list[float]] = {size: [] for size in sizes}
        peaks = dict.fromkeys(sizes, 0)
        in_a_row, spare = (1, 0) if job.device.type == "cpu" else (SETTLED, SPARE)
        for index in range(rounds + 1):
            for size in sizes:
                batch = job.batch(index)
                with job.budget:
                    job.budget.reset_peak()
                    for _ in range(in_a_row):
                        began = time.perf_counter()
                        job.train(batch, size)
                        wait(job.device)
                        seconds[size].append(time.perf_counter() - began)
                    peaks[size] = max(peaks[size], job.budget.peak)
        job.end()
        self.samples = job.samples
        self.sizes = [
            Fixed(
                size,
                -(-job.samples // size),
                statistics.median(seconds[size][1:]),
                peaks[size] + spare,
            )
            for size in sizes
        ]

    def best(self, limit: int) -> Fixed:
        """Return the fastest size that fits under a limit.

        On a simulated device, where time means nothing, it is the largest one.
        """
        fitting = [each for each in self.sizes if each.peak <= limit]
        return min(fitting, key=lambda each: each.pieces if simcuda.inside() else each.seconds)

    def limit_for(self, pieces: int) -> int:
        """Return the bytes under which a batch must be cut into so many pieces, with some to spare.

        They are half-way to the need of fewer pieces.
        """
        at = next(index for index, each in enumerate(self.sizes) if each.pieces >= pieces)
        return (
            self.sizes[0].peak * 5 // 4
            if at == 0
            else (self.sizes[at].peak + self.sizes[at - 1].peak) // 2
        )
