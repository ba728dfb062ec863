"""Figures of each part of `tools/gpu_check`, read from its output or its files."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

Figures = dict[str, Any]
WHY = 2000
"""Characters kept of pytest's report on each test that failed."""


def read_junit(path: Path) -> Figures:
    """Return tests by outcome, and the names of failed ones, from pytest's JUnit report."""
    # A test that was interrupted has no name.
    cases = [case for case in ElementTree.parse(path).iter("testcase") if case.get("name")]
    if not cases:
        raise ValueError("no test was run")
    failed = [
        case for case in cases if case.find("failure") is not None or case.find("error") is not None
    ]
    why = {
        _name(case): (each.text or each.get("message") or "")[-WHY:]
        for case in cases
        for tag in ("failure", "error")
        for each in case.iter(tag)
    }
    skipped = [case for case in cases if case.find("skipped") is not None]
    return {
        "run": len(cases),
        "passed": len(cases) - len(failed) - len(skipped),
        "failed": [_name(case) for case in failed],
        "why": why,
        "skipped": [_name(case) for case in skipped],
        "recorded": {
            p.get("name", ""): p.get("value", "") for case in cases for p in case.iter("property")
        },
        "slowest": [
            [case.get("name"), float(case.get("time", 0))]
            for case in sorted(cases, key=lambda case: -float(case.get("time", 0)))[:5]
        ],
    }


def _name(case: ElementTree.Element) -> str:
    return f"{case.get('classname')}::{case.get('name')}"


def read_demo(text: str) -> Figures:
    """Return the rows of the demo's summary, by their labels, and its verdict."""
    rows = {
        match[1].strip().replace(" ", "_").replace("-", "_"): match[2]
        for match in re.finditer(r"^([a-z][a-z0-9 -]{20} )(\S.*)$", text, re.MULTILINE)
    }
    lines = text.strip().splitlines()
    if not rows or not lines:
        raise ValueError("the demo printed no summary")
    return {**rows, "verdict": lines[-1]}


def read_object(text: str) -> Figures:
    """Return the first JSON object in an output.

    Libraries may have warned before it, or after.
    """
    found, _ = json.JSONDecoder().raw_decode(text, max(0, text.find("{")))
    return dict(found)


def read_json(path: Path) -> Figures:
    """Return a JSON object from a file."""
    found = json.loads(path.read_text())
    if not isinstance(found, dict):
        raise ValueError(f"{path.name} holds no JSON object")
    return found


def read_stress(path: Path, *, expandable: bool | None = None) -> Figures:
    """Return verdict, complaints and totals of each run that the stress tool has recorded.

    Args:
        path: its JSON.
        expandable: whether the allocator's segments had to be expandable; None for either.
    """
    runs = read_json(path)["runs"]
    if not runs:
        raise ValueError("no scenario was run")
    if expandable is not None and any(run["expandable"] is not expandable for run in runs):
        raise ValueError(
            f"the allocator's segments were {'not ' if expandable else ''}expandable, whatever "
            "the environment said"
        )
    return {
        run["scenario"] + (f"_{run['process'] + 1}" if run["process"] else ""): {
            "passed": run["passed"],
            "complaints": run["complaints"],
            **run["totals"],
            "needs": run["needs"],
            "end": run["end"],
            "expandable": run["expandable"],
        }
        for run in runs
    }
