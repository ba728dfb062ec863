"""Makes real allocations fail by the thousand, at random places of training, and holds every step against a loop by hand.

Memory moves between steps and between two operations of a step: in forward, in backward, while an optimizer steps, while what failed is run again.
Under `shim` torch's own allocator fails, and counts it; under `rlimit` the kernel refuses memory to the whole process; `budget` counts tensors, on
any system. Training runs in rounds of some 50 failures, each in a process of its own: one that crashes or hangs ends a round, not the run, and is
told with the command that repeats it. Compared are gradient, loss, buffers, random streams and the optimizer's step; a call that is refused has to
leave everything as it was, and none may leave memory behind.
Exit codes: 0 passed, 2 bad input, 3 a wrong outcome, 4 a crash or an unexpected error, 5 a hang; the highest of them where there are several.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from elastic_mbs.errors import UsageError

from .. import exit_codes
from ..limits import ChildError, Crashed, Failed, Hung, available, run_child
from ..models.factory import find
from ..options import duration, whole
from ..options import seed as a_seed
from ..output import check_writable
from ..reference.state import WrongOutcomeError
from ..repeat import TOOL, case_seed
from ..sums import listed
from .counts import Counts
from .job import hammer

KINDS = ("shim", "rlimit", "budget")
MODELS = ("gpt", "mlp", "cnn", "heads")
PER_ROUND = 50
"""Failures after which a round ends."""
STEPS = 400
"""Steps after which it ends all the same."""
MOST_BAD = 5
"""Rounds that end badly, after which there is enough to look at."""
EVERY = 10.0
"""Seconds between two lines of progress where the output is piped."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    parser.add_argument("--failures", type=whole(1), default=1000, metavar="N", help="allocations to make fail (default 1000)")
    parser.add_argument("--kind", choices=KINDS, default="shim", help="what refuses memory (default shim)")
    parser.add_argument(
        "--model",
        action="append",
        metavar="NAME",
        help=f"built-in by name, or your own as path.py:factory; may be given again (default: {', '.join(MODELS)} by turns)",
    )
    parser.add_argument("--seed", type=a_seed, default=0, help="of models, batches, and where memory moves (default 0)")
    parser.add_argument("--only", type=a_seed, metavar="ROUND_SEED", help="one round of one --model, by the seed that was printed for it")
    parser.add_argument("--deadline", type=duration("seconds"), default=300.0, metavar="SECONDS", help="a longer round hangs (default 300)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to this file")


@dataclass
class Tally:
    """What all rounds came to.

    Attributes:
        counts: by model.
        bad: rounds that ended badly, by how: "crash", "hang", "wrong outcome", or the name of an error.
        code: the highest exit code of a round.
        rounds: how many there were.
    """

    counts: dict[str, Counts]
    bad: Counter[str] = field(default_factory=Counter)
    code: int = exit_codes.PASSED
    rounds: int = 0

    @property
    def all(self) -> Counts:
        """Over all models."""
        total = Counts()
        for each in self.counts.values():
            total.merge(each.as_json())
        return total

    def line(self) -> str:
        """The summary."""
        return f"{self.all.line()}, {self.rounds} rounds, not allowed: {listed(self.bad)}"


def main(options: argparse.Namespace) -> int:
    """Runs the rounds; returns the exit code."""
    models = _checked(options)
    rounds = [(models[0], options.only)] if options.only is not None else _rounds(models, options.seed)
    print(
        f"hammer, {options.failures} failures, world {options.kind}, models {', '.join(models)}, seed {options.seed}, torch {torch.__version__}",
        flush=True,
    )
    tally, progress, began = Tally({model: Counts() for model in models}), _Progress(), time.monotonic()
    each = min(PER_ROUND, -(-options.failures // len(models)))  # every model has its turn
    for model, seed in rounds:
        tally.rounds += 1
        failures = PER_ROUND if options.only is not None else min(each, options.failures - tally.all.failures)
        _round(options, model, seed, failures, tally, progress)
        if options.only is not None or tally.all.failures >= options.failures:
            break
        if sum(tally.bad.values()) >= MOST_BAD:
            print(f"ended after {MOST_BAD} bad rounds")
            break
    progress.clear()
    wide = max(len(Path(model).name) for model in models)
    for model, counts in tally.counts.items():
        print(f"{Path(model).name:{wide}} {counts.line()}")
    print(tally.line())
    print("passed" if tally.code == exit_codes.PASSED else "failed", flush=True)
    if options.json is not None:
        figures = {
            "schema": "elastic-mbs/hammer/1",
            "torch": torch.__version__,
            "kind": options.kind,
            "seed": options.seed,
            "exit_code": tally.code,
            "seconds": round(time.monotonic() - began, 1),
            "rounds": tally.rounds,
            "bad": dict(tally.bad),
            **tally.all.as_json(),
            "models": {Path(model).name: counts.as_json() for model, counts in tally.counts.items()},
        }
        options.json.write_text(json.dumps(figures, indent=1) + "\n")
    return tally.code


def _checked(options: argparse.Namespace) -> list[str]:
    models = list(dict.fromkeys(options.model or MODELS))
    if options.only is not None and len(models) > 1:
        raise UsageError(f"--only {options.only} is a round of one model: give one --model, as it was printed")
    for model in models:
        find(model)
    check_writable(options.json, "--json")
    problem = available(options.kind)
    if problem is not None:
        raise UsageError(f"--kind {options.kind} cannot be had here: {problem}")
    return models


def _rounds(models: list[str], seed: int) -> Iterator[tuple[str, int]]:
    number = 0
    while True:
        yield models[number % len(models)], case_seed(seed, number) % 2**31  # numpy takes no more
        number += 1


def _round(options: argparse.Namespace, model: str, seed: int, failures: int, tally: Tally, progress: _Progress) -> None:
    """One round in a process of its own; what it counted until it ended badly counts."""
    last: dict[str, Any] = {}
    before, name = tally.all, Path(model).name
    arguments = {"kind": options.kind, "model": model, "seed": seed, "failures": failures, "steps": STEPS}
    try:
        for message in run_child(options.kind, hammer, arguments, deadline=options.deadline):
            last = message["counts"]
            failed, made = before.failures + last["failures"], before.steps + last["steps"]
            progress.tell(f"{name}: {failed} failures, {made} steps, {sum(tally.bad.values())} bad rounds")
    except ChildError as error:
        kind, code = _verdict(error)
        tally.bad[kind] += 1
        tally.code = max(tally.code, code)
        progress.clear()
        print(f"{kind.upper()}: {error}")
        if isinstance(error, Hung | Crashed) or code == exit_codes.UNEXPECTED:
            print("\n".join(f"  {line}" for line in error.last_words.strip().splitlines()[-12:]))
        print(f"  repeat: python -m {TOOL} hammer --kind {options.kind} --model {model} --only {seed}", flush=True)
    tally.counts[model].merge(last)


def _verdict(error: ChildError) -> tuple[str, int]:
    if isinstance(error, Hung):
        return "hang", exit_codes.HANG
    if isinstance(error, Crashed):
        return f"crash by {error.signal}", exit_codes.UNEXPECTED
    name = error.error if isinstance(error, Failed) else None
    return ("wrong outcome", exit_codes.WRONG) if name == WrongOutcomeError.__name__ else (name or "unexpected exit", exit_codes.UNEXPECTED)


class _Progress:
    """A line that rewrites itself on a terminal; now and then a line where the output is piped."""

    def __init__(self) -> None:
        self._told = time.monotonic()
        self._live = sys.stdout.isatty()

    def tell(self, line: str) -> None:
        """Tells, where it is time to."""
        now = time.monotonic()
        if self._live or now - self._told > EVERY:
            self._told = now
            print(f"\r\x1b[K{line}" if self._live else line, end="" if self._live else "\n", flush=True)

    def clear(self) -> None:
        """Makes room for a line that stays."""
        if self._live:
            print("\r\x1b[K", end="")
