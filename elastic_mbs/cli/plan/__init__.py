"""The plan: the memory of a step of your own model, size by size, and the size that fits.

No step is run, unless --measure asks for it.

FILE.py:FUNCTION is a function without arguments that returns (model, loss_fn, batches), as for the
stress tool; behind them may come a function that makes the optimizer from the parameters (SGD with
momentum by default), and a dict of options for ElasticMBS. Exit code 1 where nothing fits, or where
there can be no plan.
"""

from __future__ import annotations

import argparse
import json
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from elastic_mbs import ElasticMBS, MemoryBudget, PlanReport, Policy
from elastic_mbs.cli.plan.chart import draw
from elastic_mbs.cli.plan.job import Job, load

SCHEMA = "elastic-mbs-plan"
CALLS = 3  # that are timed at each size; the quickest counts
# of the JSON document: rises when a field goes or changes its meaning, not when one is added
VERSION = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "factory",
        metavar="FILE.py:FUNCTION",
        help="the function that makes model, loss function and batches",
    )
    parser.add_argument(
        "--budget",
        metavar="SIZE",
        help='memory to plan for, such as "8GiB"; without it, what this machine has now',
    )
    parser.add_argument(
        "--device", help="where the model is brought first; without it, it stays where it was made"
    )
    parser.add_argument(
        "--measure",
        action="store_true",
        help="run a few steps at two sizes first, on the machine itself, for their time",
    )
    parser.add_argument(
        "--compare",
        action="store_true",
        help="plan for each way to save memory, too (logits, checkpoint, tile, offload), and say "
        "which is fastest, if any",
    )
    parser.add_argument(
        "--json",
        action="store_true",
        help="print one JSON document instead of the table; sizes are in bytes",
    )
    parser.add_argument(
        "--plot",
        metavar="FILE",
        type=Path,
        help="draw the table into a picture, by matplotlib (the extra `plot`)",
    )


def main(arguments: argparse.Namespace) -> int:
    """Make the plan, print it, and draw it where that is wanted."""
    job = load(arguments.factory, arguments.device)
    budget = (
        MemoryBudget(arguments.budget, [job.model, job.optimizer], device=job.device)
        if arguments.budget
        else nullcontext()
    )
    with budget, ElasticMBS(job.model, **job.options) as mbs:
        if arguments.measure:
            _measure(mbs, job)
        report = mbs.plan(
            job.loss_fn, job.batch, optimizer=job.optimizer, compare=arguments.compare
        )
    if arguments.plot is not None and report.reason is None:
        draw(report, arguments.plot)
    print(json.dumps(document(report), indent=2) if arguments.json else report)
    return int(report.reason is not None or report.largest == 0)


def _measure(mbs: ElasticMBS, job: Job) -> None:
    """Run calls in pieces of two sizes that fit, so that a plan knows their time."""
    fitting = [
        planned.peak
        for planned in mbs.plan(job.loss_fn, job.batch, optimizer=job.optimizer).sizes
        if planned.fits and planned.peak is not None
    ]
    margin = (job.options.get("policy") or Policy()).margin
    # the largest, and that halved twice
    for peak in dict.fromkeys([*fitting[:1], *fitting[:3][-1:]]):
        mbs.plan(
            job.loss_fn,
            job.batch,
            optimizer=job.optimizer,
            budget=int(peak / (1 - margin)) + 1,
        )
        for _ in range(CALLS):
            mbs.backward(job.loss_fn, job.batch)
            job.optimizer.zero_grad()


def document(report: PlanReport) -> dict[str, Any]:
    """Return the document that `--json` prints."""
    ways = tuple(replace(way, model=None, step=None) for way in report.ways)
    found = asdict(replace(report, model=None, ways=ways))
    for each in (found, *found["ways"]):
        del each["model"]
    for way in found["ways"]:
        del way["step"]
    return {"schema": SCHEMA, "version": VERSION, **found, "fastest": report.fastest}
