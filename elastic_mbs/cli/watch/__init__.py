"""The live panel: follows a run log while it grows.

Shows the micro-batch, memory, throughput, loss and the last events of the run that has written last. Needs rich: `pip install 'elastic-mbs[tui]'`.
"""

from __future__ import annotations

import argparse
import importlib.util
import io
import sys
import time
from contextlib import closing
from pathlib import Path

from elastic_mbs.cli.watch.follow import Follower
from elastic_mbs.cli.watch.state import Watched
from elastic_mbs.errors import UsageError
from elastic_mbs.sinks.run_log_reader import EMPTY

__all__ = ["add_arguments", "main"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The panel's options."""
    parser.add_argument("log", type=Path, metavar="RUN.jsonl", help="what ElasticMBS(..., log=...) writes")
    parser.add_argument("--once", action="store_true", help="show one frame and end, as where the output is not a terminal")
    parser.add_argument("--interval", type=float, metavar="SECONDS", default=0.5, help="between two looks at the file (default: %(default)s)")


def main(arguments: argparse.Namespace) -> int:
    """Shows the panel, until Ctrl-C.

    Returns:
        The exit code, 0.

    Raises:
        UsageError: the log cannot be read or is not one, or rich is not installed.
    """
    if not 0.05 <= arguments.interval <= 3600:
        raise UsageError(f"--interval {arguments.interval} is not between 0.05 and 3600 seconds")
    if importlib.util.find_spec("rich") is None:
        raise UsageError("watch needs rich, which is not installed: pip install 'elastic-mbs[tui]'")
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal without block characters gets question marks, not a crash
    with closing(Follower(arguments.log)) as follower:
        try:
            follow(follower, once=arguments.once, interval=arguments.interval)
        except UsageError as error:
            raise UsageError(f"{arguments.log}: {str(error).removeprefix(f'{arguments.log}: ')}") from error
    return 0


def follow(follower: Follower, *, once: bool, interval: float) -> None:
    """Shows the panel of a log.

    Raises:
        UsageError: the log cannot be read, or a line of it does not belong to a run log.
    """
    from rich.console import Console
    from rich.live import Live

    from elastic_mbs.cli.watch.panel import panel

    console = Console()
    watched = look(follower, Watched())
    state = watched.current
    if state is None:
        raise UsageError(EMPTY)
    if once or not console.is_terminal:
        console.print(panel(state, time.time()))
        return
    with Live(panel(state, time.time()), console=console, auto_refresh=False) as live:
        while True:
            time.sleep(interval)
            watched = look(follower, watched)
            state = watched.current or state  # a new file shows its first line soon
            live.update(panel(state, time.time()), refresh=True)


def look(follower: Follower, watched: Watched) -> Watched:
    """The runs with the new lines; those of a file that was cut or replaced are gone."""
    restarts, lines = follower.restarts, follower.lines()
    found = watched if follower.restarts == restarts else Watched()
    for line in lines:
        found.feed(line)
    return found
