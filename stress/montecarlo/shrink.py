"""Makes a case that fails smaller, by putting back to its plainest one part of it after the other, as long as it still fails."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from .plan import Plan, changed


def smaller(plan: Plan) -> Iterator[Plan]:
    """Cases that are a little plainer than this one, the greatest steps first."""
    parts = {name: value for name, value in changed(plan).items() if name != "seed"}
    for name in reversed(parts):  # faults and limits come last in a plan, and matter most
        yield _with(plan, name, getattr(Plan(), name))
    for name, value in parts.items():
        if isinstance(value, tuple):
            yield from (_with(plan, name, (*value[:i], *value[i + 1 :])) for i in range(len(value)))
    if plan.samples > 1:
        yield from (replace(plan, samples=samples) for samples in (plan.samples // 2, plan.samples - 1))
    if plan.steps > 1:
        yield replace(plan, steps=plan.steps - 1)
    for i, fault in enumerate(plan.faults):
        for name in changed(fault):
            plainer = replace(fault, **{name: getattr(type(fault)(), name)})
            yield replace(plan, faults=(*plan.faults[:i], plainer, *plan.faults[i + 1 :]))


def _with(plan: Plan, name: str, value: Any) -> Plan:
    return replace(plan, **{name: value})


def shrink(plan: Plan, fails: Callable[[Plan], bool], *, seconds: float = 30.0, clock: Callable[[], float] = time.monotonic) -> Plan:
    """The smallest case found in so many seconds that still fails in the same way, greedily."""
    end = clock() + seconds
    found = True
    while found:
        found = False
        for candidate in smaller(plan):
            if clock() > end:
                return plan
            if fails(candidate):
                plan, found = candidate, True
                break
    return plan
