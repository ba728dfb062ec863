"""Random models, batches, options, limits and faults, each step held against a loop written by hand.

What may come out is the right gradient, with loss, outputs, buffers and random streams of a run without faults over the same pieces, or a typed error
with everything as it was. A case that fails is made smaller, and printed with the command that repeats it.
Exit codes: 0 passed, 2 bad input, 3 a wrong outcome, 4 an unexpected error, 5 a hang; the highest of them where there are several.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import shlex
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from pathlib import Path

import torch

from elastic_mbs.errors import UsageError

from ..exit_codes import HANG, PASSED, UNEXPECTED, WRONG
from ..options import duration, seed, whole
from ..output import check_writable
from ..progress import Progress
from ..reference.state import WrongOutcomeError
from ..repeat import TOOL, case_seed
from ..watchdog import Watchdog
from .plan import Plan, draw, read
from .shrink import shrink
from .totals import Outcome, Totals
from .trial import run_trial

SHARED = ("runs", "seed", "minutes", "baseline", "deadline", "shrink")
"""Options that other processes need."""

EVERY = 10.0
"""Seconds between two lines of progress where the output is piped."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    parser.add_argument("--runs", type=whole(1), default=2000, help="cases (default 2000)")
    parser.add_argument("--seed", type=seed, help="of all cases; drawn and printed where it is not given")
    parser.add_argument("--minutes", type=duration("minutes"), help="end after so many minutes at the latest")
    parser.add_argument("--jobs", type=whole(1, 1024), default=1, help="processes (default 1)")
    parser.add_argument("--baseline", action="store_true", help="the same cases with nothing going wrong: they must be exact, without an event")
    parser.add_argument("--only", type=whole(0), metavar="CASE_SEED", help="one case, by the seed that was printed for it")
    parser.add_argument("--case", metavar="JSON", help="one case, as it was printed")
    parser.add_argument("--deadline", type=duration("seconds"), default=60.0, metavar="SECONDS", help="a case that takes longer hangs (default 60)")
    look = "look so long for a smaller case that fails (default 30)"
    parser.add_argument("--shrink", type=duration("seconds", zero=True), default=30.0, metavar="SECONDS", help=look)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to this file")


def main(options: argparse.Namespace) -> int:
    """Runs the cases; returns the exit code."""
    if options.only is not None and options.case is not None:
        raise UsageError(f"--only {options.only} and --case were both given: it is one or the other")
    check_writable(options.json, "--json")
    _prepare()
    if options.only is not None or options.case is not None:
        plan = draw(options.only) if options.only is not None else read(options.case)
        plan = plan.calmed() if options.baseline else plan
        print(plan.words())
        totals = Totals()
        code = _Cases(options, totals).case(plan, _repeat(plan, options.only, options.baseline))
    else:
        options.seed = time.time_ns() % 10**9 if options.seed is None else options.seed
        what = "without faults" if options.baseline else "with faults and limits"
        print(f"Monte Carlo, seed {options.seed}, {options.runs} runs {what}, torch {torch.__version__}", flush=True)
        code, totals = _shared(options) if options.jobs > 1 else _many(options)
    print(totals.table(), flush=True)
    if options.json is not None:
        figures = {"seed": options.seed, "torch": torch.__version__, "baseline": options.baseline, "exit_code": code, **totals.as_json()}
        options.json.write_text(json.dumps(figures, indent=1) + "\n")
    return code


def _prepare() -> None:
    torch.set_num_threads(1)
    importlib.import_module("torch._dynamo")  # torch does so at the first checkpoint: a second, and 100 000 objects
    gc.collect()
    gc.freeze()  # recovery collects garbage; what has been imported by now need not be looked at each time


def _shared(options: argparse.Namespace) -> tuple[int, Totals]:
    """The cases shared out among processes: each runs every n-th of them."""
    code, totals = PASSED, Totals()
    with ProcessPoolExecutor(options.jobs, get_context("spawn"), _prepare) as pool:
        plain = argparse.Namespace(**{name: value for name, value in vars(options).items() if name in SHARED})
        for running in [pool.submit(_many, plain, number, options.jobs) for number in range(options.jobs)]:
            try:
                ended, told = running.result()
            except BrokenProcessPool:
                ended, told = HANG, Totals(failures=Counter({"a process that hung or crashed": 1}))
            code = max(code, ended)
            totals.merge(told.as_json())
    return code, totals


def _many(options: argparse.Namespace, first: int = 0, every: int = 1) -> tuple[int, Totals]:
    totals, code, began, progress = Totals(), PASSED, time.monotonic(), Progress(EVERY)
    cases = _Cases(options, totals)
    for number in range(first, options.runs, every):
        seed = case_seed(options.seed, number)
        plan = draw(seed).calmed() if options.baseline else draw(seed)
        code = max(code, cases.case(plan, _repeat(plan, seed, options.baseline)))
        took = time.monotonic() - began
        if options.minutes is not None and took > 60 * options.minutes:
            break
        bad = sum(totals.failures.values())
        progress.tell(f"{totals.runs} runs, {totals.struck + totals.limits_hit} failures made, {bad} not allowed, {took:.0f} s")
    progress.clear()
    return code, totals


def _repeat(plan: Plan, seed: int | None, baseline: bool) -> str:
    what = f"--only {seed}" if seed is not None else f"--case {shlex.quote(json.dumps(plan.changes()))}"
    return f"python -m {TOOL} montecarlo {what}{' --baseline' if baseline else ''}"


class _Cases:
    """Runs cases one after the other, and tells of those that fail."""

    def __init__(self, options: argparse.Namespace, totals: Totals) -> None:
        self._options = options
        self._totals = totals

    def case(self, plan: Plan, repeat: str) -> int:
        """One case; returns its exit code."""
        try:
            outcome = self._run(plan, repeat)
            if self._options.baseline and (outcome.phases or outcome.errors):
                raise WrongOutcomeError(f"there were out-of-memory events although nothing was made to fail: {dict(outcome.phases)}")
        except Exception as error:
            self._totals.fail(_kind(error))
            print(self._told(plan, error, repeat), flush=True)
            return _code(error)
        self._totals.add(outcome)
        return PASSED

    def _run(self, plan: Plan, repeat: str) -> Outcome:
        told = f"HANG: not done after {self._options.deadline:g} s\n  case: {plan.words()}\n  repeat: {repeat}"
        with Watchdog(self._options.deadline, lambda: told):
            return run_trial(plan)

    def _told(self, plan: Plan, error: Exception, repeat: str) -> str:
        kind = _kind(error)

        def fails(candidate: Plan) -> bool:
            try:
                self._run(candidate, repeat)
            except Exception as found:
                return _kind(found) == kind
            return False

        small = shrink(plan, fails, seconds=self._options.shrink)
        head = "WRONG" if _code(error) == WRONG else f"UNEXPECTED {type(error).__name__}"
        lines = [f"{head}: {str(error).partition(chr(10))[0][:300]}", f"  case: {plan.words()}", f"  repeat: {repeat}"]
        if small != plan:
            lines += [f"  smallest that fails: {small.words()}", f"  repeat: {_repeat(small, None, False)}"]
        if _code(error) != WRONG and error.__traceback__ is not None:
            last = error.__traceback__
            while last.tb_next is not None:
                last = last.tb_next
            lines.append(f"  raised in {last.tb_frame.f_code.co_filename}:{last.tb_lineno}")
        return "\n".join(lines)


def _kind(error: Exception) -> str:
    return "wrong outcome" if isinstance(error, WrongOutcomeError) else type(error).__name__


def _code(error: Exception) -> int:
    return WRONG if isinstance(error, WrongOutcomeError) else UNEXPECTED
