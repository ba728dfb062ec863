"""The live panel of a run log that grows.

It shows the micro-batch, memory, throughput, loss and the last events of the run that has written
last; of a job of several ranks, a row for each. Needs rich: `pip install 'elastic-mbs[tui]'`.
"""

from __future__ import annotations

import argparse
import importlib.util
import time
from pathlib import Path

from elastic_mbs.cli.watch.follow import Followers, State
from elastic_mbs.error_bases import UsageError
from elastic_mbs.sinks.log_reader import EMPTY


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "log", type=Path, metavar="RUN.jsonl", help="what ElasticMBS(..., log=...) writes"
    )
    parser.add_argument(
        "--once",
        action="store_true",
        help="show one frame and end, as where the output is not a terminal",
    )
    parser.add_argument(
        "--interval",
        type=float,
        metavar="SECONDS",
        default=0.5,
        help="between two looks at the file (default: %(default)s)",
    )


def main(arguments: argparse.Namespace) -> int:
    """Show the panel until Ctrl-C; the exit code is 0."""
    if not 0.05 <= arguments.interval <= 3600:
        raise UsageError(f"--interval {arguments.interval} is not between 0.05 and 3600 seconds")
    if importlib.util.find_spec("rich") is None:
        raise UsageError("watch needs rich, which is not installed: pip install 'elastic-mbs[tui]'")
    from rich.console import Console, RenderableType
    from rich.live import Live

    from elastic_mbs.cli.watch.job import job_panel
    from elastic_mbs.cli.watch.panel import panel

    def frame(states: list[State]) -> RenderableType:
        now = time.time()
        return job_panel(states, now) if len(states) > 1 else panel(states[0], now)

    console, followers = Console(), Followers(arguments.log)
    states = followers.read()
    if not states:
        raise UsageError(f"{arguments.log}: {EMPTY}")
    if arguments.once or not console.is_terminal:
        console.print(frame(states))
        return 0
    with Live(frame(states), console=console, auto_refresh=False) as live:
        while True:
            time.sleep(arguments.interval)
            states = followers.read() or states  # a new file shows its first line soon
            live.update(frame(states), refresh=True)
