"""What the commands share: exit codes, the seed by which one command repeats a case, how far a run is, and what ends one that hangs."""

from __future__ import annotations

import faulthandler
import gc
import json
import os
import random
import shutil
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

# Exit codes of `montecarlo`, `exhaustive`, `hammer` and `soak`, for scripts: the highest of
# several. 2 is bad input, as everywhere.
PASSED = 0
# a gradient, a buffer, a random stream, an event or what is left in memory is not what it has to be
WRONG = 3
UNEXPECTED = 4  # an error that is none of ours, or none that may come of running out of memory
HANG = 5  # not done within its deadline

# for `python -m`: `stress` in a checkout, `elastic_mbs.stress` where the package is installed
TOOL = __package__


def case_seed(seed: int, number: int) -> int:
    """The seed of a case by the seed of all and its number: one integer, and another for each pair."""
    return random.Random(f"{seed}:{number}").getrandbits(48)


def prepare() -> None:
    """One thread, and recovery, which collects garbage, need not look at what has been imported by now."""
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()


def write_figures(path: Path | None, figures: Mapping[str, Any]) -> None:
    """Writes them as JSON, where that was asked for, with the version of torch."""
    if path is not None:
        path.write_text(json.dumps({"torch": torch.__version__, **figures}, indent=1) + "\n")


class Tally:
    """Base of dataclasses whose fields are numbers and counters; one named `worst` keeps the largest."""

    def as_json(self) -> dict[str, Any]:
        """For `merge`, and for a file."""
        return {
            name: dict(value) if isinstance(value, Counter) else value
            for name, value in vars(self).items()
        }

    def merge(self, other: Mapping[str, Any]) -> None:
        """Adds what `as_json` gave of another."""
        for name, value in other.items():
            mine = getattr(self, name)
            if isinstance(mine, Counter):
                mine.update(value)
            else:
                setattr(self, name, max(mine, value) if name == "worst" else mine + value)


def listed(counter: Mapping[str, int]) -> str:
    """Names with their numbers, the most frequent first."""
    return (
        ", ".join(f"{name} {n}" for name, n in sorted(counter.items(), key=lambda item: -item[1]))
        or "none"
    )


class Progress:
    """A line that is rewritten on a terminal; where the output is piped, one that stays, every so many seconds."""

    def __init__(self, piped: float = 10.0, live: float = 0.0) -> None:
        self._live = sys.stdout.isatty()
        self._every = live if self._live else piped
        self._told = time.monotonic()

    def tell(self, line: str) -> None:
        """Prints it, unless the one before is too fresh."""
        if time.monotonic() - self._told >= self._every:
            self._told = time.monotonic()
            # a longer line would stay on the row above
            width = shutil.get_terminal_size().columns - 1
            print(
                f"\r\x1b[K{line[:width]}" if self._live else line,
                end="" if self._live else "\n",
                flush=True,
            )

    def clear(self) -> None:
        if self._live:
            print("\r\x1b[K", end="")


@contextmanager
def watchdog(seconds: float, report: Callable[[], str]) -> Iterator[None]:
    """Ends the process where the block takes longer, with a report and the stacks: a thread that is stuck cannot be stopped."""

    def bark() -> None:
        print(report(), flush=True)
        faulthandler.dump_traceback(sys.stdout)
        os._exit(HANG)

    timer = threading.Timer(seconds, bark)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()
