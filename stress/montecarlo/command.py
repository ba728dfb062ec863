"""Random models, batches, options, limits and faults, each step compared with a loop by hand.

The right outcomes are the gradient, with loss, outputs, buffers and random streams of a run without
faults over the same pieces, or a typed error with everything as it was. A case that fails is made
smaller, and printed with the command that repeats it.

Exit codes: 0 passed, 2 bad input, 3 a wrong outcome, 4 an unexpected error, 5 a hang; the highest
where there are several.
"""

from __future__ import annotations

import argparse
import importlib
import json
import shlex
import time
import traceback
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field, replace
from multiprocessing import get_context

import torch

from elastic_mbs.errors import UsageError

from ..console import (
    HANG,
    PASSED,
    TOOL,
    UNEXPECTED,
    WRONG,
    Progress,
    case_seed,
    listed,
    prepare,
    watchdog,
    write_figures,
)
from ..limits import ON_GPU, check_kind
from ..models.plan import Plan, draw, read, smaller
from ..options import duration, seed, whole, writable
from ..reference.state import WrongOutcomeError, demand
from .trial import Outcome, run_trial

FUSED = ("gru", "lstm")  # layers with kernels of their own on a GPU
NO_END = "a process that hung or crashed"
# Exit codes by kind of failure, which is an error's name; UNEXPECTED for all others.
CODES = {WrongOutcomeError.__name__: WRONG, NO_END: HANG}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--runs", type=whole(1), default=2000, help="cases (default 2000)")
    parser.add_argument(
        "--seed", type=seed, help="of all cases; drawn and printed where it is not given"
    )
    parser.add_argument(
        "--minutes", type=duration("minutes"), help="end after so many minutes at the latest"
    )
    kinds = (
        "where cases run: on the CPU under a budget, on a GPU whose allocator refuses memory, or "
        "on a simulated one (default budget)"
    )
    parser.add_argument("--kind", choices=("budget", *ON_GPU), default="budget", help=kinds)
    parser.add_argument("--jobs", type=whole(1, 1024), default=1, help="processes (default 1)")
    parser.add_argument(
        "--baseline",
        action="store_true",
        help="the same cases with nothing going wrong: they must be exact, without an event",
    )
    parser.add_argument(
        "--only",
        type=whole(0),
        metavar="CASE_SEED",
        help="one case, by the seed that was printed for it",
    )
    parser.add_argument("--case", metavar="JSON", help="one case, as it was printed")
    parser.add_argument(
        "--deadline",
        type=duration("seconds"),
        default=60.0,
        metavar="SECONDS",
        help="a case that takes longer hangs (default 60)",
    )
    look = "look so long for a smaller case that fails (default 30)"
    parser.add_argument(
        "--shrink", type=duration("seconds", zero=True), default=30.0, metavar="SECONDS", help=look
    )
    parser.add_argument(
        "--json", type=writable, metavar="FILE", help="write the figures to this file"
    )


@dataclass
class Totals(Outcome):
    runs: int = 0
    clean: int = 0  # cases in which nothing struck
    # Cases with an outcome that is not allowed, by kind.
    failures: Counter[str] = field(default_factory=Counter)

    @property
    def code(self) -> int:
        return max((CODES.get(kind, UNEXPECTED) for kind in self.failures), default=PASSED)

    def table(self) -> str:
        made = f"{self.struck} operations made to fail ({self.refused} by a GPU's own allocator)"
        rows = {
            "runs": f"{self.runs} ({self.clean} in which nothing struck), {self.calls} training "
            "calls",
            "faults": f"{self.faults} planned; {made}, memory limit passed {self.limits_hit} times",
            "failures survived by phase": listed(self.phases),
            "replays by "
            "mode": f"{listed(self.modes)}; {self.partial} of pieces that had partly committed",
            "splits": str(self.splits),
            "typed errors": listed(self.errors),
            "worst error of a gradient": f"{self.worst:.1e}",
            "not allowed": listed(self.failures),
        }
        return "\n".join(f"{name:28} {value}" for name, value in rows.items())


def main(options: argparse.Namespace) -> int:
    if options.only is not None and options.case is not None:
        raise UsageError(
            f"--only {options.only} and --case were both given: it is one or the other"
        )
    check_kind(options.kind)
    _prepare()
    cases = _Cases(options)
    if options.only is not None:
        cases.case(draw(options.only), options.only)
    elif options.case is not None:
        cases.case(read(options.case), None)
    else:
        options.seed = time.time_ns() % 10**9 if options.seed is None else options.seed
        what = "without faults" if options.baseline else "with faults and limits"
        print(
            f"Monte Carlo, seed {options.seed}, {options.runs} runs {what}, torch "
            f"{torch.__version__}",
            flush=True,
        )
        cases.many() if options.jobs == 1 else cases.share()
    print(cases.totals.table(), flush=True)
    write_figures(
        options.json,
        {
            "seed": options.seed,
            "baseline": options.baseline,
            "exit_code": cases.totals.code,
            **cases.totals.as_json(),
        },
    )
    return cases.totals.code


def _prepare() -> None:
    # torch imports it at the first checkpoint: a second, and 100 000 objects.
    importlib.import_module("torch._dynamo")
    prepare()


def _part(options: argparse.Namespace, first: int) -> Totals:
    """Run the cases of one process among several."""
    cases = _Cases(options)
    cases.many(first, options.jobs)
    return cases.totals


class _Cases:
    """Random cases one after the other, with a print of each that fails."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self.totals = Totals()

    def share(self) -> None:
        """Run every n-th case, as one of n processes."""
        plain = argparse.Namespace(
            **{name: value for name, value in vars(self._options).items() if not callable(value)}
        )
        with ProcessPoolExecutor(plain.jobs, get_context("spawn"), _prepare) as pool:
            for running in [pool.submit(_part, plain, number) for number in range(plain.jobs)]:
                try:
                    totals = running.result()
                except BrokenProcessPool:
                    totals = Totals(failures=Counter({NO_END: 1}))
                self.totals.merge(totals.as_json())

    def many(self, first: int = 0, every: int = 1) -> None:
        options = self._options
        totals = self.totals
        began = time.monotonic()
        progress = Progress()
        for number in range(first, options.runs, every):
            seed = case_seed(options.seed, number)
            self.case(draw(seed), seed)
            took = time.monotonic() - began
            if options.minutes is not None and took > 60 * options.minutes:
                break
            made = totals.struck + totals.limits_hit
            bad = totals.failures.total()
            progress.tell(
                f"{totals.runs} runs, {made} failures made, {bad} not allowed, {took:.0f} s"
            )
        progress.clear()

    def case(self, plan: Plan, seed: int | None) -> None:
        """Run one case, drawn from a seed or given."""
        baseline = self._options.baseline
        totals = self.totals
        plan = replace(plan, faults=(), limits=(), moves=()) if baseline else plan
        if self._options.kind != "budget":
            plan = replace(plan, device="cuda")
        # Its operations are the CPU's: it has no fused recurrent cells, nor sparse tensors.
        if self._options.kind == "simcuda":
            plan = replace(
                plan,
                layers=tuple(name for name in plan.layers if name not in FUSED),
                tokens=plan.tokens.replace("sparse", "dense"),
            )
        lines = self._lines("case", plan, seed)
        totals.runs += 1
        try:
            outcome = self._run(plan, lines)
            failures = dict(outcome.phases + outcome.errors)
            demand(
                not (baseline and failures),
                f"there were out-of-memory events although nothing was made to fail: {failures}",
            )
        except Exception as error:
            kind = type(error).__name__
            last = traceback.extract_tb(error.__traceback__)[-1]
            totals.failures[kind] += 1
            print(
                f"{'WRONG' if kind in CODES else f'UNEXPECTED {kind}'}: "
                f"{str(error).partition(chr(10))[0][:300]}\n{lines}"
            )
            print(f"  raised in {last.filename}:{last.lineno}")
            small = shrink(
                plan, lambda candidate: self._fails(candidate, kind), self._options.shrink
            )
            if small != plan:
                print(self._lines("smallest that fails", small), flush=True)
            return
        totals.clean += not (outcome.struck or outcome.limits_hit)
        totals.merge(outcome.as_json())

    def _run(self, plan: Plan, lines: str) -> Outcome:
        with watchdog(
            self._options.deadline,
            lambda: f"HANG: not done after {self._options.deadline:g} s\n{lines}",
        ):
            return run_trial(plan)

    def _fails(self, plan: Plan, kind: str) -> bool:
        """Return whether a case fails in this way."""
        try:
            self._run(plan, self._lines("case", plan))
        except Exception as error:
            return type(error).__name__ == kind
        return False

    def _lines(self, what: str, plan: Plan, seed: int | None = None) -> str:
        """Return the case in words, and the command that repeats it."""
        which = (
            f"--case {shlex.quote(json.dumps(plan.changes()))}"
            if seed is None
            else f"--only {seed}"
        )
        kind = "" if self._options.kind == "budget" else f" --kind {self._options.kind}"
        return (
            f"  {what}: {plan.words()}\n  repeat: python -m {TOOL} montecarlo "
            f"{which}{kind}{' --baseline' * self._options.baseline}"
        )


def shrink(plan: Plan, fails: Callable[[Plan], bool], seconds: float = 30.0) -> Plan:
    """Return the smallest case that still fails in the same way.

    The search is greedy, and ends after `seconds`.
    """
    end = time.monotonic() + seconds
    left = smaller(plan)
    while (candidate := next(left, None)) is not None and time.monotonic() < end:
        if fails(candidate):
            plan = candidate
            left = smaller(candidate)
    return plan
