"""Cost of a call without events against the loop by hand, with ample memory and no budget."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from benchmarks.bench.models import MODELS
from benchmarks.bench.report import table
from benchmarks.bench_overhead import Result, compare
from benchmarks.workloads import PIECES


def rows(quick: bool, rounds: int) -> list[Result]:
    """Return the figures of all workloads, in six pieces."""
    made = [make(samples) for make, samples in MODELS.values()]
    sized = [replace(workload, size=-(-workload.samples // PIECES)) for workload in made]
    return [
        compare(workload, pairs=3 if quick else 40 * rounds, seconds=600.0) for workload in sized
    ]


def text(found: Sequence[Result]) -> str:
    """Return the figures as a table."""
    return table(
        found,
        {
            "workload": lambda row: row.name,
            "by hand": lambda row: f"{1e3 * row.by_hand:.1f} ms",
            "elastic_mbs": lambda row: f"{1e3 * row.elastic:.1f} ms",
            "more, median [95 %]": lambda row: row.overhead,
            "by hand against itself": lambda row: row.control,
            "in CPU time": lambda row: row.cpu,
        },
    )
