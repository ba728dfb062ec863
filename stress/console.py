"""Parts that the commands share: exit codes, seeds of cases, progress, and a watchdog."""

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

# Exit codes of `montecarlo`, `exhaustive`, `hammer`, `ranks` and `soak`, for scripts: the highest
# of several. 2 is bad input, as everywhere.
PASSED = 0
# a wrong gradient, buffer, random stream or event, or memory that is still held
WRONG = 3
UNEXPECTED = 4  # an error that is not ours, or that running out of memory cannot cause
HANG = 5  # not done within the deadline

# Name for `python -m`: `stress` in a checkout, `elastic_mbs.stress` where the package is installed.
TOOL = __package__


def case_seed(seed: int, number: int) -> int:
    """Return the seed of a case from the seed of all cases and its number.

    It is one integer, and another one for each pair.
    """
    return random.Random(f"{seed}:{number}").getrandbits(48)


def prepare() -> None:
    """Compute in one thread, and freeze the objects that have been imported so far."""
    torch.set_num_threads(1)
    freeze()


def freeze() -> None:
    """Freeze all present objects, which each recovery would look through for garbage."""
    gc.collect()
    gc.freeze()


def write_figures(path: Path | None, figures: Mapping[str, Any]) -> None:
    """Write figures as JSON, with the version of torch, where a path is given."""
    if path is not None:
        path.write_text(json.dumps({"torch": torch.__version__, **figures}, indent=1) + "\n")


class Tally:
    """Base of dataclasses whose fields are numbers and counters.

    A field named `worst` keeps the largest value.
    """

    def as_json(self) -> dict[str, Any]:
        """Return the fields for `merge`, and for a file."""
        return {
            name: dict(value) if isinstance(value, Counter) else value
            for name, value in vars(self).items()
        }

    def merge(self, other: Mapping[str, Any]) -> None:
        """Add the fields that `as_json` of another tally gave."""
        for name, value in other.items():
            mine = getattr(self, name)
            if isinstance(mine, Counter):
                mine.update(value)
            else:
                setattr(self, name, max(mine, value) if name == "worst" else mine + value)


def listed(counter: Mapping[str, int]) -> str:
    """Return names with their numbers, the most frequent first."""
    return (
        ", ".join(f"{name} {n}" for name, n in sorted(counter.items(), key=lambda item: -item[1]))
        or "none"
    )


class Progress:
    """A line of progress, rewritten on a terminal.

    Where the output is piped, a new line is printed every few seconds.
    """

    def __init__(self, piped: float = 10.0, live: float = 0.0) -> None:
        self._live = sys.stdout.isatty()
        self._every = live if self._live else piped
        self._told = time.monotonic()

    def tell(self, line: str) -> None:
        """Print a line, unless the last one is too fresh."""
        if time.monotonic() - self._told >= self._every:
            self._told = time.monotonic()
            # a longer line would leave a part of itself in the row above
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
    """End the process with a report and all stacks where the block takes longer than `seconds`.

    A thread that is stuck cannot be stopped.
    """

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
