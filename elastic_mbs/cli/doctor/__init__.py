"""The doctor: a diagnosis of this machine for training, with a cure for each finding.

It looks at versions, the driver, devices and who else is on them, the allocator's settings, and the
limits of the host and its containers. Exit code 1 where there is a problem that will hurt training.
"""

from __future__ import annotations

import argparse
import json
import shutil
import textwrap
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from elastic_mbs.cli.doctor.facts import Facts
from elastic_mbs.cli.doctor.machine import collect
from elastic_mbs.cli.doctor.rules import Finding, Level, judge

SCHEMA = "elastic-mbs-doctor"
# of the JSON document: rises when a field goes or changes its meaning, not when one is added
VERSION = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--json", action="store_true", help="print one JSON document instead of text"
    )
    parser.add_argument(
        "--allocate",
        action="store_true",
        help="also allocate 1 MiB on each device, which takes a few hundred MiB there for a "
        "moment (a CUDA context)",
    )


def main(arguments: argparse.Namespace) -> int:
    """Look at the machine and print the findings.

    Returns:
        The exit code: 1 when there is a problem that will hurt training.
    """
    facts = collect(allocate=arguments.allocate)
    findings = judge(facts)
    found = document(facts, findings)
    print(
        json.dumps(found, indent=2)
        if arguments.json
        else render(findings, shutil.get_terminal_size().columns)
    )
    return int(not found["healthy"])


def document(facts: Facts, findings: Sequence[Finding]) -> dict[str, Any]:
    """Return the document that `--json` prints.

    Sizes are in bytes; a fact that could not be found out is `{"why": …, "absent": …}`.
    """
    return {
        "schema": SCHEMA,
        "version": VERSION,
        "healthy": all(finding.level is not Level.PROBLEM for finding in findings),
        "findings": [asdict(finding) for finding in findings],
        "facts": asdict(facts),
    }


def render(findings: Sequence[Finding], width: int = 80) -> str:
    """Return all findings as aligned text of 60 to 110 columns, and their number by level."""
    width = min(max(width, 60), 110)
    topic = max((len(finding.topic) for finding in findings), default=0)
    lines: list[str] = []
    for finding in findings:
        head = f"{finding.level:<{max(map(len, Level))}}  {finding.topic:<{topic}}  "
        indent = " " * len(head)
        for text, first, rest in (
            (finding.found, head, indent),
            (finding.means, indent, indent),
            (finding.do, f"{indent}→ ", f"{indent}  "),
        ):
            # a line is longer than the width where a word is: commands and UUIDs stay in one piece,
            # to be copied
            lines += textwrap.wrap(
                text,
                width,
                initial_indent=first,
                subsequent_indent=rest,
                break_long_words=False,
                break_on_hyphens=False,
            )
    return "\n".join([*lines, "", summary(findings)])


def summary(findings: Sequence[Finding]) -> str:
    """Return the number of findings by level: `1 problem, 2 warnings, 3 notes`."""
    count = Counter[str](finding.level for finding in findings if finding.level is not Level.OK)
    words = [
        f"{count[level]} {level}{'' if count[level] == 1 else 's'}"
        for level in reversed(Level)
        if count[level]
    ]
    return ", ".join(words) if count[Level.PROBLEM] or count[Level.WARNING] else "no problems"
