"""Random training on several ranks, with out-of-memory errors on any of them.

Errors strike at random operations of random ranks: in forward, in backward, in the package's own
work at the end of a call, in the optimizer's step. Gradients and losses are compared with one
process in float64. A call that ends by a typed error has to leave everything as it was, and
replicas have to stay the same to the last bit. The job trains small random models on CPUs, over
gloo, in rounds of some 100 steps. Each round has processes of its own: one that hangs is killed,
and is reported with the command that repeats it.

Exit codes: 0 passed, 2 bad input, 3 a wrong outcome, 4 a crash or an unexpected error, 5 a hang;
the highest where there are several.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Sequence

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
    write_figures,
)
from ..options import duration, whole, writable
from ..options import seed as a_seed
from .job import HUNG, OK, Outcome, run_ranks
from .training import TOLERANCE, Counts

KINDS = ("ddp", "fsdp2", "hsdp", "lockstep")
OVERLAP = {"drawn": None, "on": True, "off": False}
PER_ROUND = 100  # steps after which a round ends
MOST_BAD = 5  # bad rounds after which the run ends: enough to look at
LAST_WORDS = 12  # lines of an error that are shown


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    kinds = (
        "DistributedDataParallel, fully_shard over all ranks, or over pairs of them, each with a "
        "replica (default ddp)"
    )
    parser.add_argument("--kind", choices=KINDS, default="ddp", help=kinds)
    parser.add_argument(
        "--steps", type=whole(1), default=1000, help="steps of the job (default 1000)"
    )
    parser.add_argument(
        "--ranks", type=whole(2, 64), metavar="N", help="processes (default 2; for hsdp 4)"
    )
    overlap = "of sums with the last backward, in ddp: in 7 of 10 models, all or none"
    parser.add_argument("--overlap", choices=tuple(OVERLAP), default="drawn", help=overlap)
    parser.add_argument(
        "--seed",
        type=a_seed,
        default=0,
        help="of models, batches, and where errors strike (default 0)",
    )
    parser.add_argument(
        "--minutes", type=duration("minutes"), help="end after so many minutes at the latest"
    )
    parser.add_argument(
        "--only", type=a_seed, metavar="ROUND_SEED", help="one round, by the seed printed for it"
    )
    parser.add_argument(
        "--deadline",
        type=duration("seconds"),
        default=300.0,
        metavar="SECONDS",
        help="a longer round hangs (default 300)",
    )
    parser.add_argument(
        "--json", type=writable, metavar="FILE", help="write the figures to this file"
    )


def main(options: argparse.Namespace) -> int:
    """Run the rounds; return the exit code."""
    if options.ranks is None:
        options.ranks = 4 if options.kind == "hsdp" else 2
    if options.kind == "hsdp" and (options.ranks < 4 or options.ranks % 2):
        raise UsageError(
            f"--ranks {options.ranks} with --kind hsdp: it needs 4 ranks or more, and an even "
            "number"
        )
    if options.kind != "ddp" and options.overlap == "on":
        raise UsageError(f"--overlap on is for --kind ddp: sums of {options.kind} do not overlap")
    print(
        f"ranks, {options.steps} steps of {options.kind} on {options.ranks} ranks, overlap "
        f"{options.overlap}, seed {options.seed}, torch {torch.__version__}",
        flush=True,
    )
    run = _Run(options)
    began = time.monotonic()
    run.rounds()
    counts = run.counts
    print(counts.line())
    print(f"typed errors: {listed(counts.typed)}")
    print(f"{run.made} rounds, {run.hangs} hangs, not allowed: {listed(counts.wrong + run.bad)}")
    print("passed" if run.code == PASSED else "failed", flush=True)
    figures = {
        "schema": "elastic-mbs/ranks/1",
        **{name: getattr(options, name) for name in ("kind", "ranks", "overlap", "seed")},
        "exit_code": run.code,
        "rounds": run.made,
        "hangs": run.hangs,
        "bad": dict(run.bad),
        "tolerance": TOLERANCE,
        "seconds": round(time.monotonic() - began, 1),
        **counts.as_json(),
    }
    write_figures(options.json, figures)
    return run.code


class _Run:
    """The rounds, and their results."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._began = time.monotonic()
        self._progress = Progress()
        self.counts = Counts()
        self.bad: Counter[str] = Counter()  # rounds without figures, by how a rank has ended
        self.code = PASSED  # highest exit code of a round
        self.made = 0

    @property
    def hangs(self) -> int:
        """Rounds that did not end."""
        return self.bad[HUNG]

    def rounds(self) -> None:
        """Run one round after the other."""
        options = self._options
        if options.only is not None:
            self._round(options.only, PER_ROUND)
            return
        left = options.steps
        bad = 0
        while left > 0 and bad < MOST_BAD and not self._late():
            seed = case_seed(options.seed, self.made) % 2**31
            bad += self._round(seed, min(PER_ROUND, left)) != PASSED
            left -= PER_ROUND
        self._progress.clear()

    def _late(self) -> bool:
        minutes = self._options.minutes
        return minutes is not None and time.monotonic() - self._began > 60 * minutes

    def _round(self, seed: int, steps: int) -> int:
        """Run one round; return its exit code."""
        from .round import run_round  # it imports DDP and fully_shard: half a second

        options = self._options
        arguments = (options.kind, seed, steps, OVERLAP[options.overlap])
        outcomes = run_ranks(run_round, *arguments, world=options.ranks, wall=options.deadline)
        self.made += 1
        found = Counts()
        for each in outcomes:
            if each.status == OK:
                found.merge(each.value)
        self.counts.merge(found.as_json())
        code, lines = judge(outcomes, found)
        if code != PASSED:
            self.bad.update({each.status for each in outcomes if each.status != OK})
            self.code = max(self.code, code)
            self._progress.clear()
            self._tell(lines, seed)
        self._progress.tell(self.counts.line())
        return code

    def _tell(self, lines: Sequence[str], seed: int) -> None:
        options = self._options
        repeat = (
            f"repeat: python -m {TOOL} ranks --kind {options.kind} --ranks {options.ranks} "
            f"--overlap {options.overlap} --only {seed}"
        )
        print("\n  ".join([*lines, repeat]), flush=True)


def judge(outcomes: Sequence[Outcome], counts: Counts) -> tuple[int, list[str]]:
    """Return the exit code of a round, and lines that report what is not allowed."""
    lines, codes = [], [PASSED]
    if counts.wrong:
        codes.append(WRONG)
        lines.append(f"WRONG: {listed(counts.wrong)}, worst difference {counts.worst:.1e}")
    for rank, each in enumerate(outcomes):
        if each.status == OK:
            continue
        codes.append(HANG if each.status == HUNG else UNEXPECTED)
        words = str(each.value).strip().splitlines()
        lines += [f"rank {rank}: {each.status}", *words[-LAST_WORDS:]]
    return max(codes), lines
