"""Findings as a person reads them: aligned text that fits the terminal."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Sequence

from elastic_mbs.cli.doctor.judgement import Finding, Level

LEAST = 60
MOST = 110
_LEVEL = max(map(len, Level))


def render(findings: Sequence[Finding], width: int = 80) -> str:
    """All findings and how many there are of each level.

    Args:
        findings: in the order in which they are shown.
        width: columns of the terminal; between 60 and 110 of them are used.
    """
    width = min(max(width, LEAST), MOST)
    topic = max((len(finding.topic) for finding in findings), default=0)
    lines: list[str] = []
    for finding in findings:
        head = f"{finding.level:<{_LEVEL}}  {finding.topic:<{topic}}  "
        indent = " " * len(head)
        lines += _wrapped(finding.found, head, indent, width)
        lines += _wrapped(finding.means, indent, indent, width)
        lines += _wrapped(finding.do, f"{indent}→ ", f"{indent}  ", width)
    return "\n".join([*lines, "", summary(findings)])


def summary(findings: Sequence[Finding]) -> str:
    """`1 problem, 2 warnings, 3 notes`."""
    count = Counter(finding.level for finding in findings)
    if not count[Level.PROBLEM] and not count[Level.WARNING]:
        return "no problems"
    words = [f"{count[level]} {level}{'' if count[level] == 1 else 's'}" for level in (Level.PROBLEM, Level.WARNING, Level.NOTE) if count[level]]
    return ", ".join(words)


def _wrapped(text: str, first: str, rest: str, width: int) -> list[str]:
    """Lines no longer than the width, unless a word is: commands and UUIDs stay in one piece, to be copied."""
    return textwrap.wrap(text, width, initial_indent=first, subsequent_indent=rest, break_long_words=False, break_on_hyphens=False)
