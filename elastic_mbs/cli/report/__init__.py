"""The report: a run log as one HTML file that needs nothing else.

Four lanes on one time axis (memory, micro-batch size, throughput, loss), with a mark for each
event. A job of several ranks is one run, with a lane of memory for each of them. It opens without a
network, in light and dark, on wide and narrow screens.
"""

# `data.py` has the points of each line, `job.py` puts ranks together, `svg.py` has each line's lane
# and look, `page.py` the HTML around the lanes.

from __future__ import annotations

import argparse
from pathlib import Path

from elastic_mbs.cli.report.job import by_job, read_job
from elastic_mbs.cli.report.page import page
from elastic_mbs.error_bases import UsageError
from elastic_mbs.sinks.log_reader import files_of, read_log


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "log", type=Path, metavar="RUN.jsonl", help="what ElasticMBS(..., log=...) has written"
    )
    parser.add_argument(
        "-o",
        "--out",
        type=Path,
        metavar="HTML",
        help="where the report goes (default: next to the log, named .html)",
    )


def main(arguments: argparse.Namespace) -> int:
    """Write the report; the exit code is 0."""
    log: Path = arguments.log
    out: Path = arguments.out or log.with_suffix(".html")
    check_out(out, log)
    write(render(log), out)
    print(out)
    return 0


def render(log: Path) -> str:
    """Return the report of a log as HTML; of a job, it is that of the logs of its ranks.

    Raises:
        UsageError: the log cannot be read; the error has one line.
    """
    runs = [run for file in files_of(log) for run in read_log(file)]
    return page([read_job(job) for job in by_job(runs)], log.name)


def check_out(out: Path, log: Path) -> None:
    """Raise a UsageError before the work is done where no page can be written to `out`."""
    try:
        problems = {
            "this is a folder": out.is_dir(),
            f"there is no folder {out.parent}": not out.parent.is_dir(),
            "this is the log itself": out.absolute() == log.absolute(),
        }
    except OSError as error:  # a name that is too long, a folder that may not be entered
        raise UsageError(f"--out {out}: {error.strerror or error}") from error
    for problem in (problem for problem, here in problems.items() if here):
        raise UsageError(f"--out {out}: {problem}; name another file, such as run.html")


def write(text: str, out: Path) -> None:
    try:
        out.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"--out {out}: {error.strerror or error}") from error
