"""The demo: a small GPT on real text, in less memory than its batch needs, beside a co-tenant that comes and goes.

It is trained twice, the second time without limits and without this package, and both loss curves are compared. `elastic_mbs/demo/run.py` holds the
training loop.
"""

from __future__ import annotations

import argparse
import importlib.util
import io
import sys
from pathlib import Path

import torch

from elastic_mbs.cli.demo.compare import Options, prepare, run_both
from elastic_mbs.cli.demo.console import Lines, introduction, summary, table, verdict
from elastic_mbs.errors import UsageError
from elastic_mbs.memory import parse_bytes
from elastic_mbs.sinks.run_log import checked_path

__all__ = ["add_arguments", "main"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The demo's options."""
    parser.add_argument("--steps", type=int, default=36, help="optimizer steps, at least 4 (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the weights and of the choice of text (default: %(default)s)")
    parser.add_argument("--budget", metavar="BYTES", help="memory there is, such as 96MiB (default: 30%% of what the whole batch needs)")
    parser.add_argument("--batch", type=int, default=64, help="documents per step, at least 2 (default: %(default)s)")
    parser.add_argument("--text", type=Path, metavar="PATH", help="a file or a folder to train on (default: the source of Python's standard library)")
    parser.add_argument("--out", type=Path, metavar="PNG", default=Path("elastic_mbs_demo.png"), help="where the picture goes (default: %(default)s)")
    parser.add_argument("--log", type=Path, metavar="JSONL", help="log the run to this file, for `elastic-mbs report` and `elastic-mbs watch`")
    parser.add_argument("--no-plot", action="store_true", help="draw no picture")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto is CUDA where there is one (default: %(default)s)")
    parser.add_argument(
        "--dtype", choices=("float64", "float32"), default="float64", help="float64 shows that all that differs is rounding (default: %(default)s)"
    )


def main(arguments: argparse.Namespace) -> int:
    """Runs the demo.

    Args:
        arguments: as parsed by what `add_arguments` was given.

    Returns:
        The exit code: 0 when the runs are equal within rounding, 1 when they are not or when no out-of-memory error happened.

    Raises:
        UsageError: an argument makes no sense.
    """
    options, out = _options(arguments), None if arguments.no_plot else _picture(arguments.out)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal without block characters gets question marks, not a crash
    if options.device.type == "cpu":
        # Pieces this small gain little from more threads, and threads that meet at the end of each operation stand still while somebody else has a
        # core: beside four busy processes on two cores, two threads took 11 to 55 s for what one did in 0.9 s.
        torch.set_num_threads(1)
    setting = prepare(options)
    print(introduction(setting), flush=True)
    outcome = run_both(setting, Lines(setting))
    print(f"\n{table(outcome)}\n\n{summary(outcome, setting)}")
    if out is not None and importlib.util.find_spec("matplotlib") is None:
        print(f"{'picture':<22}none: matplotlib is not installed (pip install 'elastic-mbs[plot]')")
    elif out is not None:
        from elastic_mbs.cli.demo.timeline import draw

        draw(outcome, setting, out)
        print(f"{'picture':<22}{out}")
    print(f"\n{verdict(outcome)}")
    return 0 if outcome.equal and outcome.ooms else 1


def _options(arguments: argparse.Namespace) -> Options:
    for name, least in (("steps", 4), ("batch", 2), ("seed", 0)):
        if getattr(arguments, name) < least:
            raise UsageError(f"--{name} {getattr(arguments, name)} is too small: at least {least}")
    if arguments.device == "cuda" and not torch.cuda.is_available():
        raise UsageError("--device cuda: there is no CUDA device here; --device cpu runs the same with a limit of our own")
    cuda = arguments.device != "cpu" and torch.cuda.is_available()
    return Options(
        steps=arguments.steps,
        seed=arguments.seed,
        budget=None if arguments.budget is None else parse_bytes(int(arguments.budget) if arguments.budget.isdecimal() else arguments.budget),
        batch=arguments.batch,
        text=arguments.text,
        device=torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu"),
        dtype=getattr(torch, arguments.dtype),
        log=None if arguments.log is None else checked_path(arguments.log),
    )


def _picture(path: Path) -> Path:
    """The place of the picture, looked at before a minute's work and not after it.

    Raises:
        UsageError: its folder does not exist, or it is a folder itself.
    """
    if path.is_dir() or not path.parent.is_dir():
        raise UsageError(
            f"--out {path}: {'this is a folder' if path.is_dir() else f'there is no folder {path.parent}'}; name a file, such as demo.png"
        )
    return path
