"""Trains for a long time while memory comes and goes, and looks whether memory, threads, files and the time of a step stay flat.

Every door, evaluations, guarded optimizer steps and checkpoints take part, runtimes are made and closed, and gradients are checked now and then. Of a
failed attempt nothing may be held when it is told of, and whenever all memory has returned the micro-batch has to grow back to the whole batch.
Exit codes: 0 flat and exact, 2 bad input, 3 something rises, stays small, is held, or is wrong, 4 an unexpected error, 5 a hang.
"""

from __future__ import annotations

import argparse
import json
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import torch

from elastic_mbs.errors import UsageError
from elastic_mbs.events import format_bytes

from ..endurance.trend import LEAST, Sample, allowed, complaints, rise
from ..exit_codes import HANG, PASSED, UNEXPECTED, WRONG
from ..limits import Crashed, Failed, Hung, available, run_child
from ..options import duration, seed, whole
from ..output import check_writable
from ..reference.state import WrongOutcomeError
from ..scenarios.facts import check
from ..watchdog import Watchdog
from .job import soak

STUCK = 600.0
"""Seconds beyond its time after which a run hangs."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    parser.add_argument("--minutes", type=duration("minutes"), default=30.0, help="how long (default 30)")
    parser.add_argument("--kind", choices=("budget", "shim"), default="budget", help="what fails: counted tensors, or the allocator itself")
    parser.add_argument("--model", default="heads", help="built-in by name, or your own as path.py:factory (default heads)")
    parser.add_argument("--samples", type=whole(2 * LEAST, why="for a trend"), default=120, help="how often to measure, at most (default 120)")
    parser.add_argument("--seed", type=seed, default=0, help="of model, batches, and the comings and goings of memory (default 0)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the samples and the verdict to this file")


def main(options: argparse.Namespace) -> int:
    """Runs it; returns the exit code."""
    check_writable(options.json, "--json")
    problem = available(options.kind)
    if problem is not None:
        raise UsageError(f"--kind {options.kind} cannot be had here: {problem}")
    check(options.model, options.seed, "cpu")
    arguments = {
        "kind": options.kind,
        "seconds": options.minutes * 60,
        "seed": options.seed,
        "model": options.model,
        "samples": options.samples,
    }
    print(
        f"soak for {options.minutes:g} min, world {options.kind}, model {options.model}, seed {options.seed}, torch {torch.__version__}", flush=True
    )
    samples: list[Sample] = []
    told, last, found, code = time.monotonic(), dict[str, Any](), list[str](), PASSED

    def take(message: dict[str, Any]) -> None:
        nonlocal told, last
        samples.append(Sample(**message["sample"]))
        last = message
        if time.monotonic() - told >= 60:
            told = time.monotonic()
            print(_line(samples[-1], last), flush=True)

    try:
        _run(take, options.kind, arguments, options.minutes * 60 + STUCK)
    except WrongOutcomeError as error:
        found, code = [str(error)], WRONG
    except Hung as error:
        found, code = [f"{error}\n{error.last_words}"], HANG
    except Failed as error:
        found, code = [f"{error}\n{error.last_words}"], WRONG if error.error == WrongOutcomeError.__name__ else UNEXPECTED
    except Crashed as error:
        found, code = [f"{error}\n{error.last_words}"], UNEXPECTED
    except UsageError:
        raise
    except Exception as error:
        found, code = ["".join(traceback.format_exception(error)).rstrip()], UNEXPECTED
    if code == PASSED:
        print(_line(samples[-1], last))
        found = complaints(samples)
        code = WRONG if found else PASSED
        print(_table(samples))
    for each in found:
        print(f"NOT FLAT: {each}" if code == WRONG else each)
    print("passed: flat and exact" if code == PASSED else "failed", flush=True)
    if options.json is not None:
        counts = {name: value for name, value in last.items() if name != "sample"}
        document = {"schema": "elastic-mbs/soak/1", **arguments, "torch": torch.__version__, "exit_code": code, "complaints": found, **counts}
        options.json.write_text(json.dumps({**document, "measured": [asdict(sample) for sample in samples]}, indent=1) + "\n")
    return code


def _run(take: Callable[[dict[str, Any]], None], kind: str, arguments: dict[str, Any], deadline: float) -> None:
    """Runs the job, in this process where that is possible."""
    if kind == "budget":
        with Watchdog(deadline, lambda: f"HANG: the run has not ended {STUCK:g} s after its time"):
            soak(take, **arguments)
    else:
        for message in run_child(kind, soak, arguments, deadline=deadline):
            take(message)


def _line(sample: Sample, message: dict[str, Any]) -> str:
    return (
        f"{sample.at / 60:5.1f} min  {message['steps']} steps  {message['ooms']} ooms  {message['refused']} refused  "
        f"live {format_bytes(sample.live)}  resident {format_bytes(sample.resident)}  threads {sample.threads}  files {sample.files}  "
        f"objects {sample.objects}  step ×{sample.ratio:.3f}  worst error {message['worst']:.1e} of {message['checked']} checked"
    )


def _table(samples: list[Sample]) -> str:
    lines = [f"{'over the second half':24} {'first':>14} {'last':>14} {'trend':>12} {'allowed':>12}"]
    for each in fields(Sample):
        if each.name != "at":
            first, last = getattr(samples[len(samples) // 2], each.name), getattr(samples[-1], each.name)
            lines.append(f"{each.name:24} {first:14.6g} {last:14.6g} {rise(samples, each.name):12.4g} {allowed(samples, each.name):12.4g}")
    return "\n".join(lines)
