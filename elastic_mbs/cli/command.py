"""The command line: `elastic-mbs`, also `python -m elastic_mbs`."""

from __future__ import annotations

import argparse
import importlib
import io
import logging
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from elastic_mbs.error_bases import RecoveryError, UsageError
from elastic_mbs.events import logger
from elastic_mbs.version import __version__

BAD_INPUT = 2
INTERRUPTED = 130  # 128 + SIGINT, as shells have it
NO_READER = 141  # 128 + SIGPIPE

_COMMANDS = {
    "demo": "train a small GPT in less memory than its batch needs, and compare",
    "doctor": "look at this machine: what will hurt training, and what to do",
    "plan": "predict the peak memory of your model's step, size by size, without running one",
    "report": "make a page of a run log: memory, micro-batch, throughput and loss over time",
    "watch": "follow a run log in a live panel",
    "stress": "make memory run out in many ways, and see whether training survives",
}


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are a `UsageError`: one line, instead of the whole usage."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (see {self.prog} --help)")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command.

    Args:
        arguments: the command line without the program's name; None for this process's.

    Returns:
        The exit code: that of the command, 2 for bad input, 130 after Ctrl-C, 141 where the output
        is not read any more (`… | head`).
    """
    logger.addHandler(logging.NullHandler())  # the commands tell by themselves what happens
    given = sys.argv[1:] if arguments is None else list(arguments)
    if isinstance(sys.stdout, io.TextIOWrapper):
        # a terminal without arrows and blocks gets question marks, not a crash
        sys.stdout.reconfigure(errors="replace")
    try:
        parsed = _parser(given).parse_args(given)
        code: int = parsed.run(parsed)
        sys.stdout.flush()
    except (UsageError, RecoveryError) as error:
        print(f"elastic-mbs: {error}", file=sys.stderr)
        return BAD_INPUT if isinstance(error, UsageError) else 1
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # or the interpreter, which flushes at its end, complains once more
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return NO_READER
    return code


def _parser(given: Sequence[str]) -> _Parser:
    parser = _Parser(
        prog="elastic-mbs",
        description="PyTorch training that survives out-of-memory errors, with exact gradients.",
    )
    parser.add_argument("--version", action="version", version=f"elastic-mbs {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for name, summary in _COMMANDS.items():
        command = commands.add_parser(name, help=summary)
        if given[:1] != [name]:
            continue  # no other command needs its modules: most of them import torch
        if name == "stress":
            _stress_arguments()(command)
        else:
            module = importlib.import_module(f"elastic_mbs.cli.{name}")
            command.description = module.__doc__
            module.add_arguments(command)
            command.set_defaults(run=module.main)
    return parser


def _stress_arguments() -> Callable[[argparse.ArgumentParser], None]:
    """Add the arguments of the stress tool.

    It is `elastic_mbs.stress` where it is installed, and the folder next to the package in a
    checkout.
    """
    package = Path(__file__).resolve().parents[1]
    places = {"elastic_mbs.stress": package / "stress", "stress": package.parent / "stress"}
    name, folder = next(
        ((name, folder) for name, folder in places.items() if (folder / "command.py").is_file()),
        ("", package),
    )
    if not name:
        raise UsageError(
            f"there is no stress tool in {package} or next to it: install the wheel, or use a "
            "whole checkout"
        )
    if name == "stress" and sys.path[:1] != [str(package.parent)]:
        # before another distribution's package of that name
        sys.path.insert(0, str(package.parent))
    loaded = sys.modules.get(name)
    if loaded is not None and folder not in [Path(place).resolve() for place in loaded.__path__]:
        raise UsageError(
            f"another package named {name} ({loaded.__file__}) was imported instead of {folder}: "
            "start a fresh interpreter"
        )
    add_arguments: Callable[[argparse.ArgumentParser], None] = importlib.import_module(
        f"{name}.command"
    ).add_arguments
    return add_arguments
