"""Options of `ElasticMBS` by their own names, for cases that override some of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from elastic_mbs import GradientOptions, MemoryOptions, Policy, RecoveryOptions

_GROUPS: dict[str, type] = {
    "policy": Policy,
    "gradients": GradientOptions,
    "recovery": RecoveryOptions,
    "memory": MemoryOptions,
}


def grouped(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keyword arguments of `ElasticMBS`.

    `{"grow": False}` becomes `{"policy": Policy(grow=False)}`.
    """
    found = dict(options)
    for name, group in _GROUPS.items():
        own = {item.name: found.pop(item.name) for item in fields(group) if item.name in found}
        if own:
            found[name] = replace(found.get(name) or group(), **own)
    return found
