"""Scripted ways of running out of memory, each with checks.

Is the training still exact, does it end, how often does it fail?

Kinds of limit: `budget` counts tensors, exactly, in this process; under `shim` torch's own
allocator fails; under `rlimit` the kernel refuses memory to the whole process; `cuda` is a real GPU
with a co-tenant process.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from elastic_mbs.errors import UsageError

from ..console import Progress
from ..limits import KINDS, ON_GPU, available
from ..models.subject import words
from ..options import memory, seed, whole, writable
from ..record import Run, Step, count, write_json
from ..report.page import render
from .catalogue import DEADLINE, LINES, SCENARIOS, Order
from .model_check import check
from .processes import failed, perform

# Scenarios of the bounded set for each real kind, besides all of them on the budget.
QUICK = {
    "shim": ("too_big", "cliff", "fragmentation", "two_elastic"),
    "rlimit": ("too_big", "sawtooth"),
    "cuda": (
        "too_big",
        "cliff",
        "sawtooth",
        "optimizer_first_step",
        "long_sequences",
        "one_sample_too_big",
        "two_elastic",
    ),
}
# Duration of a scenario's step, at most, in durations of making the model and checking it: for a
# process's deadline.
SLOWER = 20.0
FEWEST = 6  # steps below which the scripts have no room for their moves


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the scenarios, which the tool runs without a command."""
    again = "may be given again (default: all"
    parser.add_argument(
        "--scenario",
        action="append",
        choices=SCENARIOS,
        metavar="NAME",
        help=f"which to run; {again}, see --list)",
    )
    parser.add_argument("--list", action="store_true", help="list the scenarios and end")
    kinds = f"kind of limit: {', '.join(KINDS)}; {again} that can be had here)"
    parser.add_argument("--kind", action="append", choices=KINDS, metavar="KIND", help=kinds)
    parser.add_argument(
        "--model",
        metavar="NAME",
        help="a built-in model, or your own as path.py:factory (default: the scenario's)",
    )
    parser.add_argument(
        "--steps", type=whole(FEWEST), metavar="N", help="optimizer steps (default: the scenario's)"
    )
    parser.add_argument(
        "--seed",
        type=seed,
        default=0,
        metavar="N",
        help="of models, batches and scripts (default: 0)",
    )
    parser.add_argument(
        "--budget",
        type=memory,
        metavar="BYTES",
        help="memory there is, such as 96MiB (default: what the whole batch needs)",
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="the bounded set: few steps, and a few scenarios of each real kind",
    )
    parser.add_argument("--json", type=writable, metavar="FILE", help="write the records there")
    parser.add_argument("--html", type=writable, metavar="FILE", help="write a page of them there")


def main(options: argparse.Namespace) -> int:
    """Run scenarios.

    Returns 0 if all checks held, 1 if one did not or a scenario could not be carried out. The
    records
    are written in either case.
    """
    if options.list:
        print(listing())
        return 0
    if options.json is not None and options.json == options.html:
        raise UsageError(
            f"--json {options.json}: --html goes to the same file; name a file for each"
        )
    orders, missing = plan(options)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # pieces this small gain nothing from more
    runs: list[Run] = []
    try:
        orders = check_models(orders)
        for line in missing:
            print(line, flush=True)
        for found in run_all(orders):
            runs += found
    except KeyboardInterrupt:
        print(f"\ninterrupted: {len(runs)} records of {len(orders)}")
        write(runs, options)
        raise
    finally:
        torch.set_num_threads(threads)
    print(f"\n{summary(runs)}")
    write(runs, options)
    return 0 if all(run.passed for run in runs) else 1


def listing() -> str:
    """Return name, kinds and one line of each scenario."""
    names, kinds = (
        max(map(len, SCENARIOS)),
        max(len(" ".join(each.kinds)) for each in SCENARIOS.values()),
    )
    return "\n".join(
        f"{each.name:<{names}}  {' '.join(each.kinds):<{kinds}}  {LINES[each.name]}"
        for each in SCENARIOS.values()
    )


def plan(options: argparse.Namespace) -> tuple[list[Order], list[str]]:
    """Return the orders, kind by kind, and lines about kinds that cannot be had here."""
    orders = []
    missing = []
    for kind in (kind for kind in KINDS if kind in (options.kind or KINDS)):
        trouble = available(kind)
        if trouble is not None and options.kind:
            raise UsageError(f"--kind {kind}: {trouble}")
        if trouble is not None:
            missing.append(f"not run: {trouble}")
            continue
        names = options.scenario or (
            QUICK.get("cuda" if kind in ON_GPU else kind, SCENARIOS) if options.quick else SCENARIOS
        )
        for scenario in (
            SCENARIOS[name] for name in dict.fromkeys(names) if kind in SCENARIOS[name].kinds
        ):
            steps = options.steps or (scenario.quick if options.quick else scenario.steps)
            device = "cuda" if kind in ON_GPU else "cpu"
            orders.append(
                Order(
                    scenario.name,
                    kind,
                    options.model or scenario.model,
                    options.seed,
                    steps,
                    device,
                    options.budget,
                )
            )
    if not orders:
        raise UsageError(
            f"none of the scenarios {', '.join(options.scenario or ())} runs on "
            f"{', '.join(options.kind or KINDS)}; see --list"
        )
    return orders, missing


def check_models(orders: Sequence[Order]) -> list[Order]:
    """Check each model before anything is run.

    Returns the orders with deadlines that suit how long that took.
    """
    took: dict[tuple[str, int, str], float] = {}
    for each in dict.fromkeys((order.model, order.seed, order.device) for order in orders):
        began = time.monotonic()
        check(*each)
        took[each] = time.monotonic() - began
    return [
        replace(
            order,
            deadline=DEADLINE + SLOWER * order.steps * took[order.model, order.seed, order.device],
        )
        for order in orders
    ]


def run_all(orders: Sequence[Order]) -> Iterator[list[Run]]:
    """Run orders one after the other, and yield their records.

    Bad input that is found after the first of them is a failed record, too.
    """
    line = Progress(piped=math.inf)
    wide = max(len(order.scenario) for order in orders) + 4
    for number, order in enumerate(orders, 1):
        head = f"[{number:>{len(str(len(orders)))}}/{len(orders)}] {{:<{wide}}} {order.kind:<6}"
        here = head.format(order.scenario)
        line.tell(f"{here} measuring")

        def tell(
            step: Step, begun: str = f"{here} step {{}}/{order.steps}, micro-batch {{}}"
        ) -> None:
            line.tell(begun.format(step.step + 1, step.size))

        try:
            found = perform(order, tell)
        except UsageError as error:
            if number == 1:
                raise
            found = [failed(order, words(error))]
        line.clear()
        for run in found:
            sizes = f"micro-batch {run.sizes[0]}–{run.sizes[-1]}" if run.sizes else "no step"
            difference = (
                "" if run.differences is None else f"difference {run.differences.largest:.1e}, "
            )
            figures = (
                f"{run.ooms} OOMs, {run.replayed:.1%} replayed, {difference}{run.seconds:.1f} s"
            )
            print(
                f"{head.format(run.title)} {run.verdict:<6} {run.model}, {len(run.steps)} steps, "
                f"{sizes}, {figures}",
                flush=True,
            )
        yield found


def write(runs: Sequence[Run], options: argparse.Namespace) -> None:
    """Write the files that were asked for. Raises a UsageError where that is impossible."""
    try:
        if options.json is not None:
            write_json(runs, options.seed, options.json)
        if options.html is not None:
            options.html.write_text(render(runs), encoding="utf-8")
    except OSError as error:
        raise UsageError(f"the records cannot be written: {error}") from error


def summary(runs: Sequence[Run]) -> str:
    """Return the last lines: complaints in words, and the count."""
    lines = [
        f"{run.title} on {run.kind}: {complaint}" for run in runs for complaint in run.complaints
    ]
    lines += [
        f"{run.title} on {run.kind} shows nothing: {run.unshown}"
        for run in runs
        if run.passed and run.unshown
    ]
    rounding = sorted(
        {
            f"{d.tolerance_loss:.0e} of a loss, {d.tolerance_weight:.0e} of a weight in {r.dtype}"
            for r in runs
            if (d := r.differences)
        }
    )
    if rounding:
        lines.append(f"counts as rounding: up to {'; '.join(rounding)}")
    return "\n".join(
        [*lines, f"{count(runs)}; {sum(run.ooms for run in runs)} out-of-memory errors survived"]
    )
