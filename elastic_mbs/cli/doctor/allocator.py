"""Reads what the environment tells torch's CUDA allocator: `name:value,name:[a:b,c:d]`."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
"""In the order in which the CUDA allocator of torch 2.13 looks for its settings; the first that is set counts."""

_PART = re.compile(r"(?:\[[^\]]*\]|[^,\[\]])+")


@dataclass(frozen=True)
class Setting:
    """One setting.

    Attributes:
        variable: the environment variable it is from.
        name: such as "expandable_segments".
        value: such as "True".
        error: what is wrong with it, in words; empty where nothing is.
    """

    variable: str
    name: str = ""
    value: str = ""
    error: str = ""


def settings(environment: Iterable[tuple[str, str]]) -> list[Setting]:
    """The settings of the variable that counts."""
    known = dict(environment)
    for variable in VARIABLES:
        if variable in known:
            return _parse(variable, known[variable])
    return []


def conflict(environment: Iterable[tuple[str, str]]) -> bool:
    """Whether two of the variables are set and say different things."""
    known = dict(environment)
    said = {frozenset((setting.name, setting.value) for setting in _parse("", known[name])) for name in VARIABLES if name in known}
    return len(said) > 1


def _parse(variable: str, text: str) -> list[Setting]:
    found = []
    for part in _PART.findall("".join(text.split())):
        name, colon, value = part.partition(":")
        error = "" if colon and name and value else f"{part!r} is not name:value"
        found.append(Setting(variable, name, value, error))
    if text.count("[") != text.count("]"):
        found.append(Setting(variable, error=f"{text!r} has a bracket that is not closed"))
    return found
