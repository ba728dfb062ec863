#!/usr/bin/env python3
"""Picture of a run log for the README: memory, micro-batch and loss over time.

elastic-mbs demo && python tools/picture.py elastic_mbs_demo.jsonl docs/pictures/demo.svg
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import matplotlib as mpl
from matplotlib.figure import Figure

MEBI = 2**20


def draw(log: Path, out: Path) -> None:
    """Draw the only run of `log`."""
    records = [json.loads(line) for line in log.read_text().splitlines()]
    calls = [record for record in records if record.get("event") == "CallDone"]
    ooms = [record["t"] for record in records if record.get("event") == "OutOfMemory"]
    times = [call["t"] for call in calls]
    mpl.rcParams.update(
        {
            "svg.fonttype": "none",
            "font.size": 9,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "svg.hashsalt": "demo",
        }
    )
    figure = Figure(figsize=(9, 4.4), layout="constrained")
    memory, size, loss = figure.subplots(3, 1, sharex=True, height_ratios=[3, 2, 2])
    left = [(call["total"] - call["held_by_others"]) / MEBI for call in calls]
    memory.fill_between(
        times,
        [call["peak_allocated"] / MEBI for call in calls],
        step="pre",
        color="#56b4e9",
        label="peak of each call",
    )
    memory.step(times, left, where="post", color="#d55e00", label="what the co-tenant leaves")
    memory.set_ylabel("MiB")
    memory.set_ylim(0)
    size.step(times, [call["micro_batch_size"] for call in calls], where="pre", color="#0072b2")
    size.plot(
        ooms, [0] * len(ooms), "x", color="#d55e00", label="out of memory, survived", clip_on=False
    )
    size.set_ylabel("micro-batch")
    size.set_ylim(0)
    shown = [*size.get_legend_handles_labels()[0], *memory.get_legend_handles_labels()[0]]
    memory.legend(
        handles=shown, loc="lower right", bbox_to_anchor=(1, 1), frameon=False, ncols=len(shown)
    )
    loss.plot(times, [call["loss"] for call in calls], color="#37474f")
    loss.set_ylabel("loss")
    loss.set_xlabel("seconds")
    figure.patch.set_facecolor("white")
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, metadata={"Date": None})


if __name__ == "__main__":
    draw(Path(sys.argv[1]), Path(sys.argv[2]))
