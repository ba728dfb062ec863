"""elastic_mbs against loops written by hand and against its peers, on the CPU under a `MemoryBudget` that a script of steps moves.

    python -m tools.bench [ROW …] [--rounds N] [--quick] [--json FILE] [--png FILE] [--include NAME=FILE]

Those who are compared train the same model on the same batches, step by step in turns of ten, in one process, on one core: `taskset -c 1 python …`
keeps it to one. accelerate and Lightning take part where they are installed (`pip install accelerate lightning`).
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # so that it runs from anywhere, installed or not

from tools.bench.contenders import installed
from tools.bench.rows import fault, flapping, idle, recovery, scale, whole_run
from tools.bench_overhead import environment, keep_freed_memory

Rows = Mapping[str, tuple[Callable[[bool, int], Sequence[Any]], Callable[[Sequence[Any]], str]]]

ROWS: Rows = {
    "run": (whole_run.rows, whole_run.text),
    "recovery": (recovery.rows, recovery.text),
    "flapping": (flapping.rows, flapping.text),
    "fault": (fault.rows, fault.text),
    "idle": (idle.rows, idle.text),
    "scale": (scale.rows, scale.text),
}
"""By the name of a row: what measures (quick, rounds) → figures, and what makes a table of them."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures, prints tables, writes files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="*", metavar="ROW", help=f"of {', '.join(ROWS)} (default: all)")
    parser.add_argument("--rounds", type=int, default=1, help="how often everything is run")
    parser.add_argument("--quick", action="store_true", help="small models and short runs: whether it works, not how fast it is")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    parser.add_argument("--png", type=Path, metavar="FILE", help="draw them there")
    parser.add_argument("--include", action="append", default=[], metavar="NAME=FILE", help="put another tool's JSON among the figures")
    options = parser.parse_args(arguments)
    unknown = [name for name in options.rows if name not in ROWS]
    if unknown:
        parser.error(f"there is no row {unknown[0]!r}: there is {', '.join(ROWS)}")
    keep_freed_memory()
    torch.set_num_threads(1)
    figures: dict[str, Any] = {"environment": environment(torch.device("cpu")) | {"peers": installed()}}
    for name in options.rows or ROWS:
        measure, text = ROWS[name]
        began = time.perf_counter()
        found = measure(options.quick, options.rounds)
        figures[name] = [asdict(row) for row in found]
        print(f"## {name} ({time.perf_counter() - began:.0f} s)\n\n{text(found)}\n", flush=True)
    for each in options.include:
        name, _, path = each.partition("=")
        figures[name] = json.loads(Path(path).read_text())
    if options.json is not None:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(figures, separators=(",", ":")) + "\n")
    if options.png is not None:
        from tools.bench.picture import draw

        draw(figures, options.png)


if __name__ == "__main__":
    main()
