"""Memory runs out everywhere in a call, and exceptions strike every line of recovery.

Every operation is struck, the library's own included. Each outcome has to be that of a call without
failures, or a typed error with everything as it was. All else is wrong (the result differs), raw
(an error for lack of memory that is not typed) or damaged (an error after which something has
changed).

Exit codes: 0 all were right, 2 bad input, 3 an outcome that is not allowed, 4 an unexpected error.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from dataclasses import dataclass, field

import torch

from elastic_mbs.errors import UsageError

from ..console import PASSED, UNEXPECTED, Progress, Tally, freeze, listed, prepare, write_figures
from ..console import WRONG as EXIT_WRONG
from ..models.steps import STEPS
from ..options import seed, whole, writable
from .calls import CALLS
from .run import DAMAGED, RAW, WRONG, Outcome
from .sweep import Sweep
from .target import Target, builtin, of_subject

DIMENSIONS = ("operations", "lines")
SHOWN = 5  # outcomes of each kind that are printed for a case; the rest are counted
SAMPLES = 8  # samples of the user's first batch, unless told otherwise


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "cases",
        nargs="*",
        metavar="CASE",
        help="built-in cases by name (all by default; an unknown name lists them)",
    )
    parser.add_argument(
        "--model",
        metavar="MODEL",
        help="a model in their place: built-in by name, or your own as path.py:factory",
    )
    samples = (
        "how many samples of --model's first batch make the batch: fewer are quicker, the "
        f"operations stay the same (default {SAMPLES})"
    )
    parser.add_argument("--samples", type=whole(1), metavar="N", help=samples)
    parser.add_argument("--seed", type=seed, metavar="N", help="of --model (default 0)")
    parser.add_argument(
        "--kind",
        choices=("cpu", "cuda", "simcuda"),
        default="cpu",
        help="where the steps run: on the CPU, on a GPU, or on a simulated one (default cpu)",
    )
    where = "at operations that can allocate, at lines of recovery, or at both (default)"
    parser.add_argument("--dimension", choices=DIMENSIONS, help=where)
    parser.add_argument(
        "--call",
        choices=tuple(CALLS),
        action="append",
        help="only this call; may be given again (default: all)",
    )
    stride = (
        "strike at every N-th point only: the model is made anew for each, which takes long where "
        "it has many parameters (default 1)"
    )
    parser.add_argument("--stride", type=whole(1), metavar="N", default=1, help=stride)
    first = (
        "the first point to strike: runs with `--stride 10` and 1 to 10 here strike all points, "
        "each a tenth of them (default 1)"
    )
    parser.add_argument("--first", type=whole(1), metavar="N", default=1, help=first)
    parser.add_argument(
        "--max-points",
        type=whole(1),
        metavar="N",
        help="about N points of each case and dimension, drawn, and not all of them",
    )
    parser.add_argument(
        "--json", type=writable, metavar="FILE", help="write the figures to this file"
    )


@dataclass
class Summary(Tally):
    """Outcomes at the points of one case."""

    case: str = ""
    points: int = 0
    exact: int = 0
    worst: float = 0.0
    found: Counter[str] = field(default_factory=Counter)  # outcomes that are not allowed, by kind
    errors: Counter[str] = field(default_factory=Counter)
    modes: Counter[str] = field(default_factory=Counter)

    def add(self, outcome: Outcome) -> None:
        self.points += 1
        self.exact += outcome.error is None and not outcome.found
        self.worst = max(self.worst, outcome.worst)
        self.modes.update(outcome.modes)
        self.found.update(outcome.found.keys())
        self.errors.update([outcome.error] if outcome.error else [])

    def bad(self) -> str:
        return ", ".join(f"{self.found[kind]} {kind}" for kind in (WRONG, RAW, DAMAGED))

    def line(self) -> str:
        modes = listed(self.modes)
        errors = listed(self.errors)
        counts = f"{self.points:6} points  {self.exact:6} exact  {self.bad()}"
        return (
            f"{self.case:28} {counts}  worst {self.worst:.1e}  replays: {modes}  errors: {errors}"
        )


def main(options: argparse.Namespace) -> int:
    prepare()
    targets = _targets(options)
    began = time.monotonic()
    table = []
    code = PASSED
    for target in targets:
        summary = Summary(target.name)
        calls = options.call or tuple(CALLS)
        sweep = Sweep(target, options.stride, options.first, options.max_points, calls)
        code = max(code, _case(sweep, options.dimension, summary))
        table.append(summary)
        print(summary.line(), flush=True)
    total = Summary()
    for summary in table:
        total.merge(summary.as_json() | {"case": ""})
    print(
        f"{total.points} injection points, {total.exact} exact, {total.bad()}, worst error "
        f"{total.worst:.1e}, {time.monotonic() - began:.0f} s"
    )
    figures = total.as_json() | {
        "case": "all",
        "stride": options.stride,
        "first": options.first,
    }
    write_figures(options.json, {**figures, "cases": [each.as_json() for each in table]})
    return code


def _targets(options: argparse.Namespace) -> list[Target]:
    """Return the cases that were asked for.

    Raises a UsageError where there is no such case or device, or options do not go together.
    """
    device = "cpu" if options.kind == "cpu" else "cuda"
    if device == "cuda" and not torch.cuda.is_available():
        raise UsageError("--kind cuda needs a CUDA device, and torch sees none here")
    for name in ("samples", "seed"):
        if options.model is None and getattr(options, name) is not None:
            raise UsageError(
                f"--{name} {getattr(options, name)} is for --model; the built-in cases have their "
                "own"
            )
    if options.model is not None and options.cases:
        raise UsageError(
            f"--model {options.model} and the case {options.cases[0]!r} were both given: it is "
            "one or the other"
        )
    if options.model is None:
        return [builtin(name, device) for name in options.cases or STEPS]
    target = of_subject(
        options.model,
        samples=options.samples or SAMPLES,
        seed=options.seed or 0,
        device=device,
    )
    case = target.build()
    how = "compared with the same pieces and with the whole batch"
    if not case.separable:
        how = (
            "its gradient depends on the split (BatchNorm, dropout, samples that depend on each "
            "other): compared with the same pieces only"
        )
    print(f"{target.name}: {how}, tolerance {case.tolerance:.0e}")
    return [target]


def _case(sweep: Sweep, dimension: str | None, summary: Summary) -> int:
    """Strike at the points of one case, add up the outcomes, and return the exit code."""
    name = sweep.target.name
    ways = sweep.ways()
    for outcome in ways.values():
        if outcome.found:
            print(f"WRONG without a failure: {outcome}", flush=True)
            summary.add(outcome)
            return EXIT_WRONG
    freeze()  # these calls have imported much that each recovery would look through
    progress = Progress(piped=30.0, live=1.0)
    expected = sweep.expected(ways)
    began = time.monotonic()
    try:
        for chosen in DIMENSIONS if dimension is None else (dimension,):
            for outcome in getattr(sweep, chosen)(ways):
                summary.add(outcome)
                left = (
                    (time.monotonic() - began) / summary.points * max(0, expected - summary.points)
                )
                progress.tell(
                    f"{name}: {summary.points} of about {expected}, about {left / 60:.0f} min "
                    "left; --stride N makes it shorter"
                )
                if any(summary.found[kind] <= SHOWN for kind in outcome.found):
                    progress.clear()
                    print(outcome, flush=True)
    except Exception as error:
        progress.clear()
        print(f"UNEXPECTED in {name}: {type(error).__name__}: {error}", flush=True)
        return UNEXPECTED
    progress.clear()
    return EXIT_WRONG if summary.found else PASSED
