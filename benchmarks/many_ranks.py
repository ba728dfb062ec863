"""Predict the cost of waiting in jobs of 8 to 10,000 ranks.

All ranks of a job wait for the slowest one in every step. Two things grow with the number of ranks:
the chance that one of them replays, and the time of a meeting. Both are computed, and not run.

*Replays.* `benchmarks/results/partial_replay.json` has runs of thirteen models. In each a co-tenant
comes once, and the samples are counted that were computed a second time for it. A rank is visited
independently of the others, `visits` times in 1,000 steps. A step of the job takes as long as that
of its slowest rank. Its expected loss is the mean of the largest of many draws, which the sorted
costs give without a simulation.

*Meetings.* gloo's all_gather passes rows along a ring, so a meeting of all ranks takes ranks - 1
hops. A hop is taken to be as long as a whole meeting of two processes on one machine
(docs/distributed.md). Another network has another `--hop`.

    python -m benchmarks.many_ranks            # into benchmarks/results
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from pathlib import Path

RESULTS = Path(__file__).resolve().parent / "results"
RANKS = (8, 64, 512, 4096, 10_000)
VISITS = (0.01, 0.1, 1.0)
HOP = 0.2  # milliseconds


def costs() -> list[float]:
    """Return the measured costs of a visit, in steps, sorted."""
    found = json.loads((RESULTS / "partial_replay.json").read_text())
    return sorted(
        (run["computed_with_restarts"] or run["computed"]) / model["samples"] - run["steps"]
        for model in found["results"]
        for run in model["runs"]
        if not run["ended_by"]
    )


def loss_of_a_step(costs: Sequence[float], ranks: int, visited: float) -> float:
    """Return the expected loss of one step of a job, in steps.

    Args:
        costs: the costs of a visit, sorted, each as likely.
        ranks: the number of ranks, each visited by itself.
        visited: the probability that a rank is visited in a step.
    """

    def at_most(i: int) -> float:
        """Return the probability that no rank has a cost above the i smallest ones."""
        return float((1.0 - visited * (1.0 - i / len(costs))) ** ranks)

    return sum(cost * (at_most(i + 1) - at_most(i)) for i, cost in enumerate(costs) if cost > 0)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table, and write it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hop", type=float, default=HOP, metavar="MS", help="default %(default)s")
    parser.add_argument("--json", type=Path, default=RESULTS / "many_ranks.json")
    options = parser.parse_args(arguments)
    visit = costs()
    print(f"visits: {len(visit)}, mean {statistics.mean(visit):.3f} steps, worst {visit[-1]:.2f}")
    rows = []
    for ranks in RANKS:
        meeting = options.hop * (ranks - 1)
        lost = {n: loss_of_a_step(visit, ranks, n / 1000) for n in VISITS}
        rows.append({"ranks": ranks, "meeting_ms": meeting, "lost": lost})
        shown = ", ".join(f"{n:g}: {part:.2%}" for n, part in lost.items())
        print(
            f"{ranks:6} ranks: a meeting {meeting:8.1f} ms; lost by visits in 1,000 steps {shown}"
        )
    result = {
        "hop_ms": options.hop,
        "visits": {"number": len(visit), "mean": statistics.mean(visit), "worst": visit[-1]},
        "rows": rows,
    }
    options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
