"""Benchmarks of elastic_mbs against loops by hand and against its peers.

    python -m benchmarks.bench [ROW …] [--rounds N] [--quick] [--json FILE] [--png FILE]
                               [--include NAME=FILE]
    python -m benchmarks.bench run --device cuda|simcuda

They run on the CPU under a `MemoryBudget` that a script of steps moves. All contenders train the
same model on the same batches, step by step in turns of ten, in one process, on one core: `taskset
-c 1 python …` keeps it to one. accelerate and Lightning take part where they are installed
(`pip install accelerate lightning`).

On a CUDA device the script moves torch's memory fraction, and each contender trains alone. On a
simulated one (`--device simcuda`) the figures are counts, without times.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch

# so that it runs from anywhere, installed or not
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.bench.contenders import installed
from benchmarks.bench.rows import fault, flapping, idle, recovery, scale, settled, step, whole_run
from benchmarks.bench_overhead import environment, keep_freed_memory
from elastic_mbs.errors import UsageError
from stress.limits import simcuda

Rows = Mapping[str, tuple[Callable[[bool, int], Sequence[Any]], Callable[[Sequence[Any]], str]]]

ROWS: Rows = {
    "run": (whole_run.rows, whole_run.text),
    "settled": (settled.rows, settled.text),
    "recovery": (recovery.rows, recovery.text),
    "flapping": (flapping.rows, flapping.text),
    "fault": (fault.rows, fault.text),
    "idle": (idle.rows, idle.text),
    "scale": (scale.rows, scale.text),
    "step": (step.rows, step.text),
}
"""Name of a row → the functions that measure it, (quick, rounds) → figures, and tabulate it."""


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "rows", nargs="*", metavar="ROW", help=f"of {', '.join(ROWS)} (default: all)"
    )
    parser.add_argument("--rounds", type=int, default=1, help="how often everything is run")
    parser.add_argument(
        "--quick",
        action="store_true",
        help="small models and short runs: whether it works, not how fast it is",
    )
    parser.add_argument(
        "--device",
        choices=("cpu", "cuda", "simcuda"),
        default="cpu",
        help="what the row 'run' is run on (default: cpu)",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    parser.add_argument("--png", type=Path, metavar="FILE", help="draw them there")
    parser.add_argument(
        "--include",
        action="append",
        default=[],
        metavar="NAME=FILE",
        help="put another tool's JSON among the figures",
    )
    return parser


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print tables, write files."""
    parser = make_parser()
    options = parser.parse_args(arguments)
    device = device_of(options.device, parser)
    rows = (
        ROWS
        if device.type == "cpu"
        else {"run": (partial(whole_run.rows, device=device), whole_run.text)}
    )
    unknown = [name for name in options.rows if name not in rows]
    if unknown:
        parser.error(
            f"there is no row {unknown[0]!r} on {options.device}: there is {', '.join(rows)}"
        )
    if options.png is not None and simcuda.inside():
        parser.error("--png draws times, and a simulated device has none")
    keep_freed_memory()
    torch.set_num_threads(1)
    figures: dict[str, Any] = {"environment": environment(device) | {"peers": installed()}}
    for name in options.rows or rows:
        measure, text = rows[name]
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
        from benchmarks.bench.picture import draw

        draw(figures, options.png)


def device_of(name: str, parser: argparse.ArgumentParser) -> torch.device:
    """Return the device of that name.

    For a simulated one the command is started again where it does not run under the simulation.
    """
    if name == "cpu":
        return torch.device("cpu")
    if name == "simcuda" and not simcuda.inside():
        try:
            simcuda.start_again()
        except UsageError as error:
            parser.error(str(error))
    if not torch.cuda.is_available():
        parser.error("--device cuda, but torch sees no CUDA device: --device simcuda simulates one")
    return torch.device("cuda", torch.cuda.current_device())


if __name__ == "__main__":
    main()
