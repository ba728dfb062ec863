"""Makes a case that fails smaller, by putting back to its plainest one part of it after the other, as long as it still fails."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from typing import Any

from .plan import Fault, Plan


def smaller(plan: Plan) -> Iterator[Plan]:
    """Cases that are a little plainer than this one, the greatest steps first."""
    for name in ("faults", "layers", "limits", "moves"):
        parts = getattr(plan, name)
        if parts:
            yield _with(plan, name, ())
        if len(parts) > 1:
            for i in range(len(parts)):
                yield _with(plan, name, (*parts[:i], *parts[i + 1 :]))
    plain = Plan()
    for each in fields(Plan):
        if each.name not in ("seed", "faults", "layers", "limits", "moves") and getattr(plan, each.name) != getattr(plain, each.name):
            yield _with(plan, each.name, getattr(plain, each.name))
    if plan.samples > 1:
        yield replace(plan, samples=plan.samples // 2)
        yield replace(plan, samples=plan.samples - 1)
    if plan.steps > 1:
        yield replace(plan, steps=plan.steps - 1)
    for i, fault in enumerate(plan.faults):
        for name in ("times", "gap", "error"):
            if getattr(fault, name) != getattr(Fault(), name):
                made = replace(fault, **{name: getattr(Fault(), name)})
                yield replace(plan, faults=(*plan.faults[:i], made, *plan.faults[i + 1 :]))


def _with(plan: Plan, name: str, value: Any) -> Plan:
    values: dict[str, Any] = {name: value}
    return replace(plan, **values)


def shrink(plan: Plan, fails: Callable[[Plan], bool], *, seconds: float = 30.0, clock: Callable[[], float] = time.monotonic) -> Plan:
    """The smallest case found that still fails, greedily.

    Args:
        plan: fails.
        fails: whether a case fails in the same way.
        seconds: not longer than this.
        clock: gives the time.
    """
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
