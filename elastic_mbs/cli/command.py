"""The command line: `elastic-mbs`, also `python -m elastic_mbs`."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from elastic_mbs import __version__
from elastic_mbs.cli import demo, doctor, report, watch
from elastic_mbs.errors import RecoveryError, UsageError

BAD_INPUT = 2
INTERRUPTED = 130
"""128 + SIGINT, as shells have it."""
NOBODY_READS = 141
"""128 + SIGPIPE."""


class _Parser(argparse.ArgumentParser):
    """A parser whose complaints come as `UsageError`: one line, instead of the whole usage."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (see {self.prog} --help)")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command.

    Args:
        arguments: the command line without the program's name; None for this process's.

    Returns:
        The exit code: that of the command, 2 for bad input, 130 after Ctrl-C, 141 where nobody reads the output any more (`… | head`).
    """
    parser = _Parser(prog="elastic-mbs", description="PyTorch training that survives out-of-memory errors, with exact gradients.")
    parser.add_argument("--version", action="version", version=f"elastic-mbs {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    command = commands.add_parser("demo", help="train a small GPT in less memory than its batch needs, and compare", description=demo.__doc__)
    demo.add_arguments(command)
    command.set_defaults(run=demo.main)
    command = commands.add_parser("doctor", help="look at this machine: what will hurt training, and what to do", description=doctor.__doc__)
    doctor.add_arguments(command)
    command.set_defaults(run=doctor.main)
    command = commands.add_parser(
        "report", help="make a page of a run log: memory, micro-batch, throughput and loss over time", description=report.__doc__
    )
    report.add_arguments(command)
    command.set_defaults(run=report.main)
    command = commands.add_parser("watch", help="follow a run log in a live panel", description=watch.__doc__)
    watch.add_arguments(command)
    command.set_defaults(run=watch.main)
    command = commands.add_parser("stress", help="make memory run out in many ways, and see whether training survives")
    given = sys.argv[1:] if arguments is None else list(arguments)
    try:
        if given[:1] == ["stress"]:  # no other command needs its modules
            _stress_arguments()(command)
        parsed = parser.parse_args(given)
        code: int = parsed.run(parsed)
        sys.stdout.flush()
    except UsageError as error:
        print(f"elastic-mbs: {error}", file=sys.stderr)
        return BAD_INPUT
    except RecoveryError as error:
        print(f"elastic-mbs: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # or the interpreter, which flushes at its end, complains once more
        return NOBODY_READS
    return code


def _stress_arguments() -> Callable[[argparse.ArgumentParser], None]:
    """The stress tool's own: `elastic_mbs.stress` where it is installed, the folder beside the package in a checkout.

    Raises:
        UsageError: it is in neither place, or another package has its name.
    """
    package = Path(__file__).resolve().parents[1]
    beside = package.parent / "stress"
    if (package / "stress" / "command.py").is_file():
        name = "elastic_mbs.stress"
    elif (beside / "command.py").is_file():
        name = "stress"
        _import_from(name, beside)
    else:
        raise UsageError(f"there is no stress tool in {package} or beside it: install the wheel, or use a whole checkout")
    add_arguments: Callable[[argparse.ArgumentParser], None] = importlib.import_module(f"{name}.command").add_arguments
    return add_arguments


def _import_from(name: str, folder: Path) -> None:
    """Imports a package from its folder: the path may not lead there, or lead to another distribution's package of that name first.

    Raises:
        UsageError: another one has been imported already.
    """
    loaded = sys.modules.get(name)
    if loaded is None:
        spec = importlib.util.spec_from_file_location(name, folder / "__init__.py", submodule_search_locations=[str(folder)])
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    elif folder not in [Path(place).resolve() for place in getattr(loaded, "__path__", ())]:
        raise UsageError(f"another package named {name} ({loaded.__file__}) has been imported in the place of {folder}: start a fresh interpreter")
