"""Makes a case that fails smaller, by putting back to its plainest one part of it after the other, as long as it still fails."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from .plan import Fault, Plan, changed


def smaller(plan: Plan) -> Iterator[Plan]:
    """Cases that are a little plainer than this one, the greatest steps first."""
    parts = {name: value for name, value in changed(plan).items() if name != "seed"}
    changes: list[dict[str, Any]] = [
        {name: getattr(Plan(), name)} for name in reversed(parts)
    ]  # faults and limits come last in a plan, and matter most
    for name, value in parts.items():
        changes += [{name: (*value[:i], *value[i + 1 :])} for i in range(len(value) if isinstance(value, tuple) else 0)]
    changes += [{"samples": samples} for samples in (plan.samples // 2, plan.samples - 1) if samples > 0]
    changes += [{"steps": plan.steps - 1}] if plan.steps > 1 else []
    for i, fault in enumerate(plan.faults):
        for name in changed(fault):
            plainer = replace(fault, **{name: getattr(Fault(), name)})
            changes.append({"faults": (*plan.faults[:i], plainer, *plan.faults[i + 1 :])})
    return (replace(plan, **change) for change in changes)


def shrink(plan: Plan, fails: Callable[[Plan], bool], *, seconds: float = 30.0) -> Plan:
    """The smallest case found in so many seconds that still fails in the same way, greedily."""
    end = time.monotonic() + seconds
    left = smaller(plan)
    while (candidate := next(left, None)) is not None and time.monotonic() < end:
        if fails(candidate):
            plan, left = candidate, smaller(candidate)
    return plan
