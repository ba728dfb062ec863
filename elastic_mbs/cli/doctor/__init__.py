"""The doctor: what this machine is like for training with elastic_mbs, what that means, and what to do.

Looks at versions, the driver, devices and who else is on them, the allocator's settings, and the limits of the host and its containers. Exit code 1
where there is a problem that will hurt training.
"""

from __future__ import annotations

import argparse
import io
import json
import shutil
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from elastic_mbs.cli.doctor.console import render
from elastic_mbs.cli.doctor.facts import Facts
from elastic_mbs.cli.doctor.judgement import Finding, Level, judge
from elastic_mbs.cli.doctor.machine import collect

__all__ = ["Facts", "Finding", "Level", "add_arguments", "collect", "document", "judge", "main"]

SCHEMA = "elastic-mbs-doctor"
VERSION = 1
"""Of the JSON document: rises when a field goes or changes its meaning, not when one is added."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The doctor's options."""
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of text")
    parser.add_argument(
        "--allocate",
        action="store_true",
        help="also allocate 1 MiB on each device, which takes a few hundred MiB there for a moment (a CUDA context)",
    )


def main(arguments: argparse.Namespace) -> int:
    """Looks at the machine and tells what was found.

    Args:
        arguments: as parsed by what `add_arguments` was given.

    Returns:
        The exit code: 1 when there is a problem that will hurt training, else 0.
    """
    facts = collect(allocate=arguments.allocate)
    findings = judge(facts)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal without arrows gets question marks, not a crash
    if arguments.json:
        print(json.dumps(document(facts, findings), indent=2))
    else:
        print(render(findings, shutil.get_terminal_size().columns))
    return int(_ill(findings))


def document(facts: Facts, findings: Sequence[Finding]) -> dict[str, Any]:
    """What `--json` prints.

    Returns:
        `schema` ("elastic-mbs-doctor"), `version` (1), `healthy` (no problem), `findings` (each with `level`, `topic`, `found`, `means`, `do`) and
        `facts` (the fields of `Facts`; what could not be found out is `{"why": …, "absent": …}`). Sizes are in bytes.
    """
    return {
        "schema": SCHEMA,
        "version": VERSION,
        "healthy": not _ill(findings),
        "findings": [asdict(finding) for finding in findings],
        "facts": asdict(facts) | {"environment": dict(facts.environment)},
    }


def _ill(findings: Sequence[Finding]) -> bool:
    return any(finding.level is Level.PROBLEM for finding in findings)
