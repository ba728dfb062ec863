"""Makes memory run out at every operation of a step, forward and backward, one after the other.

Each outcome has to be the right gradient, with buffers and random streams of a run that never failed, or a typed error with everything as it was.
Exit codes: 0 all were, 2 bad input, 3 a wrong outcome, 4 an unexpected error.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch

from elastic_mbs.errors import UsageError
from elastic_mbs.testing import InjectOOM

from ..exit_codes import PASSED, UNEXPECTED, WRONG
from ..options import seed, whole
from ..output import check_writable
from ..state import WrongOutcomeError
from ..sums import Sums, listed
from .run import PATTERNS, Run, run, sweep
from .target import Target, builtin, of_subject

Way = tuple[bool, str, int]
"""Warm, pattern, door."""

WAYS: tuple[Way, ...] = tuple((warm, pattern, door) for warm in (False, True) for pattern in PATTERNS for door in (1, 3))

SAMPLES = 8
"""Of the user's first batch, unless told otherwise."""

EVERY = 1.0
"""Seconds between two updates of the progress line."""
PIPED = 30.0
"""The same where the output is piped, and each update is a line that stays."""
LONG = 60.0
"""Seconds from which a sweep is announced."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    parser.add_argument("cases", nargs="*", metavar="CASE", help="built-in cases by name (all by default; an unknown name lists them)")
    parser.add_argument("--model", metavar="MODEL", help="a model in their place: built-in by name, or your own as path.py:factory")
    samples = f"how many samples of --model's first batch make the batch: fewer are quicker, the operations stay the same (default {SAMPLES})"
    parser.add_argument("--samples", type=whole(1), metavar="N", help=samples)
    parser.add_argument("--seed", type=seed, metavar="N", help="of --model (default 0)")
    stride = "strike at every N-th operation only: the model is made anew for each, which takes long where it has many parameters (default 1)"
    parser.add_argument("--stride", type=whole(1), metavar="N", default=1, help=stride)
    parser.add_argument("--max-points", type=whole(1), metavar="N", help="no more than about N injections a case: the stride is widened to it")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to this file")


@dataclass
class Summary(Sums):
    """What the sweeps of one case came to."""

    case: str
    points: int = 0
    exact: int = 0
    worst: float = 0.0
    wrong: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    modes: Counter[str] = field(default_factory=Counter)

    def add(self, outcome: Run) -> None:
        """Counts one injection."""
        self.points += 1
        self.exact += outcome.error is None
        self.worst = max(self.worst, outcome.worst)
        self.modes.update(outcome.modes)
        if outcome.error is not None:
            self.errors[outcome.error] += 1

    def line(self) -> str:
        """As one line of the table."""
        modes, errors = listed(self.modes), listed(self.errors)
        return f"{self.case:28} {self.points:6} points  {self.exact:6} exact  worst {self.worst:.1e}  replays: {modes}  errors: {errors}"


@dataclass
class Progress:
    """A line with an estimate of what is left: rewritten on a terminal, now and then a new one where the output is piped.

    Attributes:
        expected: injections to come, about.
    """

    expected: int
    done: int = 0
    began: float = field(default_factory=time.monotonic)
    told: float = field(default_factory=time.monotonic)

    def step(self, name: str) -> None:
        """One injection is done."""
        self.done += 1
        now, live = time.monotonic(), sys.stdout.isatty()
        if now - self.told > (EVERY if live else PIPED):
            self.told = now
            left = (now - self.began) / self.done * max(0, self.expected - self.done)
            line = f"{name}: {self.done} of about {self.expected}, about {left:.0f} s left"
            print(f"\r\x1b[K{line}" if live else line, end="" if live else "\n", flush=True)

    def clear(self) -> None:
        """Makes room for a line that stays."""
        if sys.stdout.isatty():
            print("\r\x1b[K", end="")


def main(options: argparse.Namespace) -> int:
    """Sweeps the cases and prints a table; returns the exit code."""
    for name in ("samples", "seed"):
        if options.model is None and getattr(options, name) is not None:
            raise UsageError(f"--{name} {getattr(options, name)} is for --model; the built-in cases have their own")
    if options.model is not None and options.cases:
        raise UsageError(f"--model {options.model} and the case {options.cases[0]!r} were both given: it is one or the other")
    check_writable(options.json, "--json")
    torch.set_num_threads(1)
    if options.model is None:
        from ..cases import CASES

        targets = [builtin(name) for name in options.cases or CASES]
    else:
        target = of_subject(options.model, samples=options.samples or SAMPLES, seed=options.seed or 0)
        targets = [target]
        print(_what(target))
    gc.collect()
    gc.freeze()  # recovery collects garbage; what has been imported by now need not be looked at each time
    began, code = time.monotonic(), PASSED
    table: list[Summary] = []
    for target in targets:
        summary, worst = _case(target, options.stride, options.max_points)
        table.append(summary)
        code = max(code, worst)
        print(summary.line(), flush=True)
    points, worst_error = sum(s.points for s in table), max(s.worst for s in table)
    exact, wrong = sum(s.exact for s in table), sum(s.wrong for s in table)
    print(f"{points} injection points, {exact} exact, {wrong} wrong, worst error {worst_error:.1e}, {time.monotonic() - began:.0f} s")
    if options.json is not None:
        cases = [summary.as_json() for summary in table]
        figures = {"torch": torch.__version__, "stride": options.stride, "points": points, "wrong": wrong, "cases": cases}
        options.json.write_text(json.dumps(figures, indent=1) + "\n")
    return code


def _what(target: Target) -> str:
    case = target.build()
    how = (
        "compared with the same pieces and with the whole batch"
        if case.separable
        else "its gradient depends on the split (BatchNorm, dropout, samples that depend on each other): compared with the same pieces only"
    )
    return f"{target.name}: {how}, tolerance {case.tolerance:.0e}"


def _case(target: Target, stride: int, max_points: int | None) -> tuple[Summary, int]:
    summary, code = Summary(target.name), PASSED
    compiled = target.build().backend is not None
    ways = [way for i, way in enumerate(WAYS) if max_points is None or not compiled or i % 4 == 0]  # compiling costs more than what is looked for
    began = time.monotonic()
    try:
        operations = run(target, InjectOOM(), warm=True).operations
    except WrongOutcomeError as error:
        summary.wrong += 1
        print(f"WRONG without a failure: {error}", flush=True)
        return summary, WRONG
    each = time.monotonic() - began
    expected = operations * len(ways)
    if max_points is not None:
        stride = max(stride, -(-expected // max_points))
    progress = Progress(expected // stride)
    if each * progress.expected > LONG:
        long = f"about {progress.expected} injections, about {each * progress.expected / 60:.0f} min"
        print(f"{target.name}: {operations} operations, {long}; --stride N or --max-points N make it shorter", flush=True)
    for way in ways:
        try:
            for outcome in _sweep(target, way, stride):
                summary.add(outcome)
                progress.step(target.name)
        except WrongOutcomeError as error:
            code, found = max(code, WRONG), f"WRONG {way[1]}: {error}"
        except Exception as error:
            code, found = UNEXPECTED, f"UNEXPECTED {way[1]}, {'warm' if way[0] else 'cold'}, door {way[2]}: {type(error).__name__}: {error}"
        else:
            continue
        summary.wrong += 1
        progress.clear()
        print(found, flush=True)
    progress.clear()
    return summary, code


def _sweep(target: Target, way: Way, stride: int) -> Iterator[Run]:
    warm, pattern, door = way
    return sweep(target, warm=warm, pattern=pattern, door=door, stride=stride)
