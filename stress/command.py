"""Commands of the tool: `python -m stress [montecarlo | exhaustive | hammer | ranks | soak]`.

Without a command it runs the scenarios.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from importlib import import_module

from elastic_mbs.errors import UsageError

from .limits import simcuda
from .models.subject import words
from .options import Commands
from .scenarios import command as scenarios

__all__ = ["add_arguments"]

# Commands besides the scenarios: their module and their purpose. The module has
# `add_arguments(parser)` and `main(options)`, which returns the exit code.
COMMANDS = {
    "montecarlo": (
        ".montecarlo.command",
        "random models, batches, limits and faults, each step checked",
    ),
    "exhaustive": (
        ".exhaustive.command",
        "make memory run out at every operation of a step, one after the other",
    ),
    "hammer": (
        ".endurance.hammer",
        "make real allocations fail by the thousand at random places, each step checked",
    ),
    "ranks": (
        ".ranks.command",
        "random training on several ranks (DDP, FSDP2), with errors on any of them",
    ),
    "soak": (
        ".endurance.soak",
        "train for a long time while memory comes and goes: does anything rise?",
    ),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the tool's options and its other commands.

    Each sets `run`, a function of the parsed options that returns the exit code.
    """
    scenarios.add_arguments(parser)
    parser.set_defaults(run=partial(_run, scenarios.main))
    commands = parser.add_subparsers(metavar="COMMAND", dest="command", action=Commands)
    for name, (where, purpose) in COMMANDS.items():
        module = import_module(where, __package__)
        command = commands.add_parser(
            name,
            help=purpose,
            description=module.__doc__,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        module.add_arguments(command)
        command.set_defaults(run=partial(_run, module.main))


def _run(main: Callable[[argparse.Namespace], int], options: argparse.Namespace) -> int:
    """Run a command, and put its complaint about an input on one line.

    The package itself explains a batch on several.
    """
    # one kind, or a list of kinds
    if "simcuda" in (getattr(options, "kind", None) or ()) and not simcuda.inside():
        simcuda.start_again()
    try:
        return main(options)
    except UsageError as error:
        if "\n" not in str(error):
            raise
        raise UsageError(words(error)) from error
