"""The report: a run log as one HTML file that needs nothing else.

Four lanes on one time axis (memory, micro-batch size, throughput, loss), with a mark for each event. It opens without a network, in light and dark,
on wide and narrow screens.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from elastic_mbs.cli.report.data import read_run
from elastic_mbs.cli.report.page import page
from elastic_mbs.errors import UsageError
from elastic_mbs.sinks.run_log_reader import open_lines, read_runs

__all__ = ["add_arguments", "main", "render"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The report's options."""
    parser.add_argument("log", type=Path, metavar="RUN.jsonl", help="what ElasticMBS(..., log=...) has written")
    parser.add_argument("-o", "--out", type=Path, metavar="HTML", help="where the report goes (default: beside the log, named .html)")


def main(arguments: argparse.Namespace) -> int:
    """Writes the report.

    Args:
        arguments: as parsed by what `add_arguments` was given.

    Returns:
        The exit code, 0.

    Raises:
        UsageError: the log cannot be read or is none, or the report cannot be written.
    """
    log: Path = arguments.log
    out: Path = arguments.out or log.with_suffix(".html")
    if out.is_dir() or not out.parent.is_dir() or out.absolute() == log.absolute():
        raise UsageError(f"--out {out}: {_trouble(out)}; name another file, such as run.html")
    text = render(log)
    try:
        out.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"--out {out}: {error.strerror or error}") from error
    print(out)
    return 0


def render(log: Path) -> str:
    """The report of a log, as HTML.

    Raises:
        UsageError: the log cannot be read, or a line of it is none of a run log's; the message is one line.
    """
    try:
        runs = read_runs(open_lines(log))
    except UsageError as error:
        raise UsageError(f"{log}: {str(error).removeprefix(f'{log}: ')}") from error
    return page([read_run(run) for run in runs], log.name)


def _trouble(out: Path) -> str:
    if out.is_dir():
        return "this is a folder"
    return "this is the log itself" if out.parent.is_dir() else f"there is no folder {out.parent}"
