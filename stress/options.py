"""Readers of values on the command line.

A complaint names the option, the value and the values that are allowed.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from pathlib import Path

from elastic_mbs.errors import UsageError
from elastic_mbs.memory import parse_bytes

# seed of numpy's legacy stream, which takes less than torch's and Python's
LARGEST_SEED = 2**32 - 1
MOST = 1_000_000.0  # minutes or seconds: timers of any system can wait for this long


def whole(least: int, most: int | None = None) -> Callable[[str], int]:
    """Return a reader of a whole number."""
    allowed = (
        f"a whole number of at least {least}"
        if most is None
        else f"a whole number from {least} to {most}"
    )

    def read(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(
                f"{text!r} is no whole number: give {allowed}"
            ) from None
        off = (
            f"below {least}"
            if number < least
            else f"above {most}"
            if most is not None and number > most
            else ""
        )
        if off:
            raise argparse.ArgumentTypeError(f"{number} is {off}: give {allowed}")
        return number

    return read


seed = whole(0, LARGEST_SEED)


def duration(unit: str, *, zero: bool = False) -> Callable[[str], float]:
    """Return a reader of a length of time in seconds or minutes."""
    allowed = f"a number of {unit} {'from 0 on' if zero else 'above 0'}, up to {MOST:.0f}"

    def read(text: str) -> float:
        try:
            number = float(text)
        except ValueError:
            number = math.nan
        if 0 < number <= MOST or (zero and number == 0):
            return number
        raise argparse.ArgumentTypeError(
            f"{text!r} is no length of time that can be used: give {allowed}"
        )

    return read


def memory(text: str) -> int:
    """Read a number of bytes above 0, such as "96MiB"."""
    try:
        size = parse_bytes(text)
    except UsageError:
        size = 0
    if size < 1:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no amount of memory: give a number of bytes above 0, or one with a "
            "unit, such as 96MiB"
        )
    return size


def writable(text: str) -> Path:
    """Read the place of a file, and open it before minutes of work are spent.

    Its contents stay.
    """
    path = Path(text)
    try:
        fresh = not path.exists()
        path.open("a").close()
        if fresh:
            path.unlink()
    except OSError as error:
        raise argparse.ArgumentTypeError(
            f"{path} cannot be written ({error.strerror}); name another file"
        ) from error
    return path


class Commands(argparse._SubParsersAction):  # type: ignore[type-arg]  # it takes no argument at run time
    """Commands of a parser that has options of its own.

    No command would see an option that stands before it, so such an option is refused.
    """

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: object,
        option_string: str | None = None,
    ) -> None:
        name = values[0] if isinstance(values, list) else values
        for dest, value in vars(namespace).items():
            if dest not in {self.dest, "run"} and value != parser.get_default(dest):
                option = f"--{dest.replace('_', '-')}"
                raise argparse.ArgumentError(
                    None,
                    f"{option} stands before the command {name}, which does not see it there: put "
                    f"it behind {name}",
                )
        super().__call__(parser, namespace, values, option_string)  # type: ignore[arg-type]  # as argparse gives them
