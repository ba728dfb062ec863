"""The demo: a small GPT on real text, in less memory than its batch needs.

A co-tenant comes and goes. The GPT is trained twice, the second time without limits and without
this package, and both loss curves are compared. On a CPU there is a second act: a document that
needs more than there is, although it is alone. `elastic_mbs/cli/demo/run.py` holds the training
loop. With `--distributed`, under torchrun, it is a job of several ranks, one of which runs out.
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from elastic_mbs.cli import report
from elastic_mbs.cli.demo import ranks
from elastic_mbs.cli.demo.compare import Notes, Options, prepare, run_both
from elastic_mbs.cli.demo.console import introduction, page, summary, table, verdict
from elastic_mbs.cli.demo.one_sample import run_long_document
from elastic_mbs.errors import UsageError
from elastic_mbs.memory import parse_bytes
from elastic_mbs.sinks.run_log import checked_path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    _add_run(parser)
    parser.add_argument(
        "--distributed",
        choices=tuple(ranks.KINDS),
        help=f"a job of several ranks, one of which runs out: {ranks.COMMAND} ddp",
    )
    _add_output(parser)


def _add_run(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--steps", type=int, default=36, help="optimizer steps, at least 4 (default: %(default)s)"
    )
    parser.add_argument(
        "--seed",
        type=int,
        default=0,
        help="seed of the weights and of the choice of text (default: %(default)s)",
    )
    parser.add_argument(
        "--budget",
        metavar="BYTES",
        help="memory there is, such as 96MiB (default: 30%% of what the whole batch needs)",
    )
    parser.add_argument(
        "--batch",
        type=int,
        default=64,
        help="documents per step, at least 2 (default: %(default)s)",
    )
    parser.add_argument(
        "--text",
        type=Path,
        metavar="PATH",
        help="a file or a folder to train on (default: the source of Python's standard library)",
    )
    parser.add_argument(
        "--device",
        choices=("auto", "cpu", "cuda"),
        default="auto",
        help="auto is CUDA where there is one (default: %(default)s)",
    )
    parser.add_argument(
        "--dtype",
        choices=("float64", "float32"),
        default="float64",
        help="float64 shows that all that differs is rounding (default: %(default)s)",
    )


def _add_output(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--out",
        type=Path,
        metavar="HTML",
        default=Path("elastic_mbs_demo.html"),
        help="the page to look at (default: %(default)s)",
    )
    parser.add_argument(
        "--log",
        type=Path,
        metavar="JSONL",
        help="the run log, for `report` and `watch` (default: next to the page, named .jsonl)",
    )
    parser.add_argument(
        "--no-page", action="store_true", help="write no page, and a run log only with --log"
    )


def main(arguments: argparse.Namespace) -> int:
    """Run the demo.

    Returns:
        The exit code: 0 when the runs are equal within rounding, 1 when they are not or when no
        out-of-memory error happened.
    """
    options = _options(arguments)
    if options.device.type == "cpu":
        # Pieces this small gain little from more threads, and threads that wait for each other at
        # the end of each operation stand still while another process has a core: with four busy
        # processes on two cores, two threads took 11 to 55 s for what one did in 0.9 s.
        torch.set_num_threads(1)
    if arguments.distributed is not None:
        return _job(options, arguments.distributed, arguments.out, with_page=not arguments.no_page)
    setting = prepare(options)
    print(introduction(setting), flush=True)
    outcome = run_both(setting, Notes(options.steps, setting.budget))
    rows = summary(outcome, setting)
    print(
        f"\n{table(outcome)}\n\n" + "\n".join(f"{name:<22}{value}" for name, value in rows.items())
    )
    if options.log is not None and not arguments.no_page:
        report.write(page(outcome, rows, options.log), arguments.out)
        print(f"{'page':<22}{arguments.out}, of the run log {options.log}")
    print(f"\n{verdict(outcome)}")
    equal = outcome.equal
    if options.device.type == "cpu":
        print("\nSecond act: one long document, in less memory than it needs.", flush=True)
        long = run_long_document(options, partial(print, flush=True))
        print(long)
        equal = equal and long.equal
    return 0 if equal and outcome.ooms else 1


def _job(options: Options, kind: ranks.Kind, out: Path, *, with_page: bool) -> int:
    """Run the demo as one rank of a job; rank 0 tells of it, and has its exit code."""
    rank, world, options = ranks.begin(options, kind)
    try:
        setting = ranks.set_up(options, world)
        if rank == 0:
            print(ranks.introduction(setting, world, kind), flush=True)
        outcome = ranks.run_job(setting, rank, world, kind)
        if outcome is None:
            return 0
        rows = ranks.summary(outcome)
        print(
            f"\n{table(outcome)}\n\n"
            + "\n".join(f"{name:<22}{value}" for name, value in rows.items())
        )
        if options.log is not None and with_page:
            report.write(page(outcome, rows, options.log), out)
            print(f"{'page':<22}{out}, of the run logs of the ranks")
        print(f"\n{verdict(outcome)}", flush=True)
        return 0 if outcome.equal and outcome.ooms else 1
    finally:
        dist.destroy_process_group()


def _options(arguments: argparse.Namespace) -> Options:
    for name, least in (("steps", 4), ("batch", 2), ("seed", 0)):
        if getattr(arguments, name) < least:
            raise UsageError(f"--{name} {getattr(arguments, name)} is too small: at least {least}")
    if arguments.device == "cuda" and not torch.cuda.is_available():
        raise UsageError(
            "--device cuda: there is no CUDA device here; --device cpu runs the same with a limit "
            "of our own"
        )
    cuda = arguments.device != "cpu" and torch.cuda.is_available()
    log: Path | None = arguments.log
    if not arguments.no_page:
        log = log or arguments.out.parent / f"{arguments.out.stem}.jsonl"
        report.check_out(arguments.out, log)
    return Options(
        steps=arguments.steps,
        seed=arguments.seed,
        budget=None
        if arguments.budget is None
        else parse_bytes(
            int(arguments.budget) if arguments.budget.isdecimal() else arguments.budget
        ),
        batch=arguments.batch,
        text=arguments.text,
        device=torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu"),
        dtype=getattr(torch, arguments.dtype),
        log=None if log is None else checked_path(log),
    )
