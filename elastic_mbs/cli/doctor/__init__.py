"""The doctor: what this machine is like for training with elastic_mbs, what that means, and what to do.

Looks at versions, the driver, devices and who else is on them, the allocator's settings, and the
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
    """Looks at the machine and prints what was found; the exit code is 1 when there is a problem that will hurt training."""
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
    """What `--json` prints; sizes are in bytes, and a fact that could not be found out is `{"why": …, "absent": …}`."""
    return {
        "schema": SCHEMA,
        "version": VERSION,
        "healthy": all(finding.level is not Level.PROBLEM for finding in findings),
        "findings": [asdict(finding) for finding in findings],
        "facts": asdict(facts),
    }


def render(findings: Sequence[Finding], width: int = 80) -> str:
    """All findings as aligned text, and how many there are of each level; between 60 and 110 columns are used."""
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
    """`1 problem, 2 warnings, 3 notes`."""
    count = Counter[str](finding.level for finding in findings if finding.level is not Level.OK)
    words = [
        f"{count[level]} {level}{'' if count[level] == 1 else 's'}"
        for level in reversed(Level)
        if count[level]
    ]
    return ", ".join(words) if count[Level.PROBLEM] or count[Level.WARNING] else "no problems"
