"""Jobs under torchrun whose rank is killed at another step each time, and which resume.

python -m tests.helpers.ddp_killed [AGENTS] [TIMES]
"""

from __future__ import annotations

import json
import math
import sys
import tempfile
from pathlib import Path

from tests.helpers.ddp_train import STEPS, reference
from tests.helpers.nodes import free_port, two_nodes

WALL = 300.0  # seconds after which a job hangs


def difference(folder: Path, agents: int, step: int) -> float:
    """Return how far the losses of a job are from the undisturbed ones; infinite if it fails."""
    with two_nodes() as nodes:
        port = free_port()
        used = nodes[:agents]
        for node in used:
            node.start(folder, "killed", str(step), port=port, restarts=2, nodes=agents)
        ended = [node.wait(WALL) for node in used]
    if any(ended) or not (folder / "hit").exists():
        print(*(node.output.read_text()[-3000:] for node in used), sep="\n")
        return math.inf
    found = json.loads((folder / "losses.json").read_text())
    pairs = zip(found, reference(2), strict=True)
    worst: float = max(abs(mine - right) / abs(right) for mine, right in pairs)
    return worst


def main(agents: int = 2, times: int = 20) -> int:
    """Run the jobs, print the figures, and return 1 where one has not resumed equal."""
    worst: list[float] = []
    for number in range(times):
        with tempfile.TemporaryDirectory() as folder:
            worst.append(difference(Path(folder), agents, number % STEPS))
        equal = sum(each < 1e-12 for each in worst)
        print(f"{agents} agents: {equal} of {len(worst)} equal, worst {max(worst):.1e}", flush=True)
    return int(equal < times)


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
