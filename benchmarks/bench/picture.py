"""Picture of the whole runs: each contender against the oracle, and one run step by step."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

COLOURS = {"oracle": "#000000", "elastic_mbs": "#0072b2", "elastic_mbs with plan": "#56b4e9"}
COLOURS |= {"halving (Composer's rule)": "#d55e00", "accelerate": "#009e73", "Lightning": "#cc79a7"}


def draw(figures: Mapping[str, Any], out: Path) -> None:
    """Draw bars for each workload, and the seconds that each contender needed for a run's steps."""
    runs = figures["run"]
    groups = list(dict.fromkeys((run["workload"], run["visit"]) for run in runs))
    figure = Figure(figsize=(11, 4.2), layout="constrained")
    bars, course = figure.subplots(1, 2, width_ratios=[3, 2])
    names = [name for name in COLOURS if any(run["contender"] == name for run in runs)]
    for place, name in enumerate(names):
        found = {
            (run["workload"], run["visit"]): run["ratio"]
            for run in runs
            if run["contender"] == name
        }
        # some contenders do not take part in all
        values = [found.get(group, float("nan")) for group in groups]
        at = [group + 0.8 * place / len(names) for group in range(len(groups))]
        drawn = bars.bar(
            at, values, 0.8 / len(names), color=COLOURS[name], label=name, align="edge"
        )
        bars.bar_label(drawn, fmt="%.2f", fontsize=6)
    bars.set_xticks(
        [group + 0.4 for group in range(len(groups))],
        [f"{workload}\nvisit of {visit} steps" for workload, visit in groups],
    )
    bars.set_ylabel("time of the whole run / the oracle's")
    bars.legend(frameon=False, fontsize=8)
    for run in runs:
        if (run["workload"], run["visit"]) == groups[0]:
            seconds = list(accumulate(each / 1e3 for each in run["milliseconds"]))
            course.plot(
                seconds,
                range(1, len(seconds) + 1),
                color=COLOURS[run["contender"]],
                label=run["contender"],
            )
    course.set_xlabel(f"seconds, {groups[0][0]}")
    course.set_ylabel("steps made, also in vain")
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=130)
