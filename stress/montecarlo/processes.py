"""The cases shared out among processes, each of which runs every n-th of them."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from ..exit_codes import UNEXPECTED
from .totals import Totals


def share(tool: str, options: argparse.Namespace) -> tuple[int, Totals]:
    """Runs the cases in `options.jobs` processes, whose output is printed as it comes.

    Returns:
        The highest of their exit codes, and the sum of what they counted.
    """
    totals, code = Totals(), 0
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / f"{number}.json" for number in range(options.jobs)]
        running = [subprocess.Popen(_command(tool, options, number, file), env=_environment(tool)) for number, file in enumerate(files)]
        try:
            for process, file in zip(running, files, strict=True):
                ended = process.wait()
                code = max(code, UNEXPECTED if ended < 0 or ended == 1 else ended)
                if ended < 0:
                    totals.fail(f"crash by signal {-ended}")
                if file.exists():
                    told = json.loads(file.read_text())
                    totals.merge({name: value for name, value in told.items() if name in vars(totals)})
        finally:
            for process in running:
                process.kill()
                process.wait()
    return code, totals


def _command(tool: str, options: argparse.Namespace, number: int, file: Path) -> list[str]:
    given = {"runs": options.runs, "seed": options.seed, "deadline": options.deadline, "shrink": options.shrink, "minutes": options.minutes}
    command = [sys.executable, "-m", tool, "montecarlo", "--first", str(number), "--every", str(options.jobs), "--json", str(file)]
    for name, value in given.items():
        command += [f"--{name}", str(value)] if value is not None else []
    return [*command, "--baseline"] if options.baseline else command


def _environment(tool: str) -> dict[str, str]:
    """This process's, with the folder that the tool was imported from first on the path."""
    here = Path(__file__).resolve().parents[2 + tool.count(".")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (str(here), os.environ.get("PYTHONPATH"))))}
