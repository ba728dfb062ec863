"""Real allocations fail by the thousand, at random places of training.

Each step is compared with a loop by hand. Memory moves between steps and between two operations of
a step: in forward, in backward, in an
optimizer's step, in a replay. Under `shim` torch's own allocator fails, and counts its failures;
under `rlimit` the kernel refuses memory to the whole process; `budget` counts tensors, on any
system. Training runs in rounds of some 50 failures, each in a process of its own: a crash or a hang
ends a round and not the run, and is reported with the command that repeats it. Gradient, loss,
buffers, random streams and the optimizer's step are compared. A refused call has to leave
everything as it was, and no call may leave memory behind.

Exit codes: 0 passed, 2 bad input, 3 a wrong outcome, 4 a crash or an unexpected error, 5 a hang;
the highest where there are several.
"""

from __future__ import annotations

import argparse
import math
import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from elastic_mbs import Policy
from elastic_mbs.dispatch import VersionedMode, run
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
from ..limits import ON_GPU, ChildError, Emit, MemoryLimit, check_kind, open_limit, run_child
from ..models.factory import find
from ..options import duration, whole, writable
from ..options import seed as a_seed
from ..reference.state import WrongOutcomeError
from .training import Counts, Range, Training

KINDS = ("shim", "rlimit", "budget", *ON_GPU)
MODELS = ("gpt", "mlp", "cnn", "heads")
PER_ROUND = 50  # failures after which a round ends
STEPS = 400  # steps after which a round ends in any case
MOST_BAD = 5  # bad rounds after which the run ends: enough to look at
LAST_WORDS = 12  # lines of a process's output that are shown after a crash or a hang
TURNS = 6  # steps with one runtime: from the second on it uses learned sizes

NOTHING_MORE = "nothing more"  # nothing beyond the memory held at that moment
BLOCKS = "blocks"  # all memory, but in small blocks only

# Memory there is: a share of the whole batch's need beyond the smallest piece; one of the two
# above; None for ample memory.
Room = float | str | None


@dataclass(frozen=True)
class Blow:
    """A move of memory."""

    at: int  # number of the operation in the step that it precedes, from 1; 0 is before the step
    room: Room  # memory that is left


def draw(rng: random.Random, operations: int, range_: Range) -> list[Blow]:
    """Draw the moves of one step, in their order.

    `operations` is the approximate number of operations of the whole batch in one piece; several
    pieces
    take more.
    """
    before: Room = (
        None if rng.random() < 0.3 else rng.uniform(0.05, 1.1) if rng.random() < 0.95 else -0.5
    )
    found = [Blow(0, before)]
    for _ in range(rng.choice((0, 1, 1, 1, 2, 3))):
        early = rng.random() < 0.4  # as often among the first few as among the many that follow
        at = 1 + (
            int(math.exp(rng.random() * math.log(4 * operations)))
            if early
            else rng.randrange(2 * operations)
        )
        kind = rng.random()
        found.append(
            Blow(
                at,
                NOTHING_MORE
                if kind < 0.6
                else BLOCKS
                if range_.blocks and kind < 0.7
                else rng.uniform(0.0, 0.8),
            )
        )
        if rng.random() < 0.8:
            found.append(
                Blow(
                    at + rng.randint(1, operations),
                    None if rng.random() < 0.5 else rng.uniform(0.3, 1.2),
                )
            )
    return sorted(found, key=lambda blow: blow.at)


class Blows(VersionedMode):
    """A block in which memory moves as drawn; after it there is ample memory."""

    def __init__(self, limit: MemoryLimit, range_: Range, blows: Sequence[Blow]) -> None:
        super().__init__()
        self._limit = limit
        self._range = range_
        self._blows = list(reversed(blows))
        self._held = limit.live()
        self._count = 0

    def __enter__(self) -> Any:
        entered = super().__enter__()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        self._move()
        return entered

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]  # torch leaves it untyped
        self._make(None)

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: Any = (),
        kwargs: Any = None,
    ) -> Any:
        self._count += 1
        self._move()
        return run(func, args, kwargs)

    def _move(self) -> None:
        while self._blows and self._blows[-1].at <= self._count:
            self._make(self._blows.pop().room)

    def _make(self, room: Room) -> None:
        if self._range.blocks:
            self._limit.fragment(max(1, self._range.whole // 16) if room == BLOCKS else None)
        if room is None or room == BLOCKS:
            self._limit.resize(None)
        elif isinstance(room, str):
            self._limit.resize(self._limit.live() + self._range.slack)
        else:
            self._limit.resize(self._held + self._range.of(room))


def hammer(emit: Emit, *, kind: str, model: str, seed: int, failures: int, steps: int) -> None:
    """Run one round: train until `failures` allocations have failed or `steps` steps are made.

    Emits `{"counts": …}` after each step.
    """
    with open_limit(kind) as limit:
        training = Training(limit, model, seed)
        training.prepare()
        rng = training.rng
        counts = training.counts
        while counts.steps < steps and counts.failures < failures:
            options = {
                "micro_batch_size": training.largest if rng.random() < 0.5 else "auto",
                "policy": Policy(patience=1, min_gain=0.0, cooldown=0.0),
                "monitor_interval": 0.0,
                "seed": rng.getrandbits(31),
            }
            with training.runtimes(options) as (mbs, doors):
                door = rng.choice(doors)
                for _ in range(TURNS):
                    if counts.steps < steps and counts.failures < failures:
                        training.step(
                            mbs,
                            door,
                            lambda: Blows(
                                limit,
                                training.range,
                                draw(rng, training.operations, training.range),
                            ),
                        )
                        emit({"counts": counts.as_json()})


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--failures",
        type=whole(1),
        default=1000,
        metavar="N",
        help="allocations to make fail (default 1000)",
    )
    parser.add_argument(
        "--kind", choices=KINDS, default="shim", help="what refuses memory (default shim)"
    )
    models = (
        "built-in by name, or your own as path.py:factory; may be given again (default: "
        f"{', '.join(MODELS)} by turns)"
    )
    parser.add_argument("--model", action="append", metavar="NAME", help=models)
    parser.add_argument(
        "--seed",
        type=a_seed,
        default=0,
        help="of models, batches, and where memory moves (default 0)",
    )
    parser.add_argument(
        "--only",
        type=a_seed,
        metavar="ROUND_SEED",
        help="one round of one --model, by the seed that was printed for it",
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
    models = list(dict.fromkeys(options.model or MODELS))
    if options.only is not None and len(models) > 1:
        raise UsageError(
            f"--only {options.only} is a round of one model: give one --model, as it was printed"
        )
    for model in models:
        find(model)
    check_kind(options.kind)
    what = (
        f"{options.failures} failures, limit {options.kind}, models {', '.join(models)}, seed "
        f"{options.seed}, torch {torch.__version__}"
    )
    print(f"hammer, {what}", flush=True)
    run = _Run(options, models)
    began = time.monotonic()
    run.rounds()
    for model, counts in run.counts.items():
        print(f"{Path(model).name:12} {counts.line()}")
    print(f"{run.all.line()}, {run.made} rounds, not allowed: {listed(run.bad)}")
    print("passed" if run.code == PASSED else "failed", flush=True)
    figures = {
        "schema": "elastic-mbs/hammer/1",
        "kind": options.kind,
        "seed": options.seed,
        "exit_code": run.code,
        "rounds": run.made,
    }
    figures |= {
        "seconds": round(time.monotonic() - began, 1),
        "bad": dict(run.bad),
        **run.all.as_json(),
    }
    write_figures(
        options.json,
        {
            **figures,
            "models": {Path(model).name: counts.as_json() for model, counts in run.counts.items()},
        },
    )
    return run.code


class _Run:
    """The rounds, and their results."""

    def __init__(self, options: argparse.Namespace, models: list[str]) -> None:
        self._options = options
        self._progress = Progress()
        self.all = Counts()
        self.counts = {model: Counts() for model in models}
        self.bad: Counter[str] = Counter()  # rounds that ended badly, by kind
        self.code = PASSED  # highest exit code of a round
        self.made = 0

    def rounds(self) -> None:
        only = self._options.only
        wanted = self._options.failures
        models = list(self.counts)
        if only is not None:
            self._round(models[0], only, PER_ROUND)
            return
        each = min(PER_ROUND, -(-wanted // len(models)))  # each model has its turn
        while self.all.failures < wanted and self.bad.total() < MOST_BAD:
            seed = case_seed(self._options.seed, self.made) % 2**31  # numpy takes no larger seed
            self._round(
                models[self.made % len(models)], seed, min(each, wanted - self.all.failures)
            )

    def _round(self, model: str, seed: int, failures: int) -> None:
        """Run one round in a process of its own.

        A round that ends badly counts up to its end.
        """
        last: dict[str, Any] = {}
        kind = self._options.kind
        arguments = {
            "kind": kind,
            "model": model,
            "seed": seed,
            "failures": failures,
            "steps": STEPS,
        }
        self.made += 1
        try:
            for message in run_child(kind, hammer, arguments, deadline=self._options.deadline):
                last = message["counts"]
                failed = self.all.failures + last["failures"]
                made = self.all.steps + last["steps"]
                self._progress.tell(
                    f"{Path(model).name}: {failed} failures, {made} steps, {self.bad.total()} bad "
                    "rounds"
                )
        except ChildError as error:
            code, lines = bad_end(error)
            self.bad[error.how] += 1
            self.code = max(self.code, code)
            self._progress.clear()
            print(
                "\n  ".join(
                    [
                        *lines,
                        f"repeat: python -m {TOOL} hammer --kind {kind} --model {model} --only "
                        f"{seed}",
                    ]
                )
            )
        self._progress.clear()
        for counts in (self.all, self.counts[model]):
            counts.merge(last)


def bad_end(error: ChildError) -> tuple[int, list[str]]:
    """Return the exit code for a process that ended badly, and lines that report it."""
    code = {"hang": HANG, WrongOutcomeError.__name__: WRONG}.get(error.how, UNEXPECTED)
    return code, [
        f"{error.how}: {error}",
        *([] if code == WRONG else error.last_words.strip().splitlines()[-LAST_WORDS:]),
    ]
