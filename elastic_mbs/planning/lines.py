"""From traces at a few sizes to the lines of a `PeakModel`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple

from elastic_mbs.controller.peak import Line
from elastic_mbs.planning.timeline import Point, TooLong


class Trace(NamedTuple):
    """The forward and backward of a piece."""

    # in samples, of a batch whose samples differ in the largest of them: then it has a fraction
    size: float
    operations: Sequence[object]
    points: Sequence[Point]  # one for each operation
    flops: int = 0  # of matmuls and convolutions, if they were counted
    moved: int = 0  # bytes of saved tensors kept on the host

    @property
    def gradients(self) -> int:
        """Bytes of the gradients at its end."""
        return self.points[-1].gradients


class Lines(NamedTuple):
    """The memory of pieces by operation or, where that is not possible, by traced size."""

    lines: list[Line]  # their fixed part is the gradients made by then
    gradients: int  # bytes at the end
    reach: int | None  # the largest size in elements that they hold for; None without a limit
    largest: Trace  # the largest piece traced


def lines_of(trace: Callable[[int], Trace], floor: int, samples: int, elements: int) -> Lines:
    """Return lines through traces of a small piece and of the whole batch.

    If their operations differ (a loop over samples, another kernel for larger ones), sizes between
    are traced, each the double of the one before.
    """
    small = min(samples, max(floor, min(2, samples // 2)))
    traces = {small: trace(small)}
    for size in (
        samples,
        *(small << k for k in range(1, samples.bit_length()) if small << k < samples),
    ):
        try:
            traces[size] = traces.get(size) or trace(size)
        except TooLong:
            if size == samples:
                continue  # smaller sizes may still be traced
            break
        if size != small and traces[size].operations == traces[small].operations:
            return Lines(
                by_operation(traces[small], traces[size], elements),
                traces[small].gradients,
                None if size == samples else 2 * size * elements,
                traces[size],
            )
    known = [traces[size] for size in sorted(traces)]
    return Lines(
        by_peak(known, elements),
        known[-1].gradients,
        int(known[-1].size * elements) * (2 if len(known) > 1 else 1),
        known[-1],
    )


def by_operation(small: Trace, large: Trace, elements: int) -> list[Line]:
    """Return a line through the live bytes at each operation."""
    lines = []
    for one, other in zip(small.points, large.points, strict=True):
        slope = (other.live - one.live) / (large.size - small.size) / elements
        lines.append(
            Line(one.gradients, one.live - one.gradients - slope * small.size * elements, slope)
        )
    return lines


def by_peak(traces: Sequence[Trace], elements: int) -> list[Line]:
    """Return chords between the peaks, which lie above a convex function.

    A single trace gives a constant: its peak.
    """
    peaks = [
        (trace.size * elements, max(point.live - point.gradients for point in trace.points))
        for trace in traces
    ]
    gradients = traces[-1].gradients
    if len(peaks) == 1:
        return [Line(gradients, peaks[0][1], 0)]
    slopes = [(b - a) / (y - x) for (x, a), (y, b) in pairwise(peaks)]
    return [
        Line(gradients, a - slope * x, slope) for (x, a), slope in zip(peaks, slopes, strict=False)
    ]
