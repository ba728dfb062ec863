"""The settings of torch's CUDA allocator in the environment: `name:value,name:[a:b,c:d]`."""

from __future__ import annotations

import re
from collections.abc import Mapping

# in the order in which the CUDA allocator of torch 2.13 looks for them; the first that is set counts
VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
_PART = re.compile(r"(?:\[[^\]]*\]|[^,\[\]])+")


def settings(environment: Mapping[str, str]) -> dict[str, str]:
    """The settings of the variable that counts, without what cannot be read."""
    return next((_parse(environment[name])[0] for name in VARIABLES if name in environment), {})


def errors(environment: Mapping[str, str]) -> str:
    """What is wrong with the variable that counts, in words; empty where nothing is."""
    return next((f"{name}: {', '.join(found)}" for name in VARIABLES if name in environment and (found := _parse(environment[name])[1])), "")


def conflict(environment: Mapping[str, str]) -> bool:
    """Whether two of the variables are set to different things."""
    return len({frozenset(_parse(environment[name])[0].items()) for name in VARIABLES if name in environment}) > 1


def _parse(text: str) -> tuple[dict[str, str], list[str]]:
    found, wrong = {}, []
    for part in _PART.findall("".join(text.split())):
        name, _, value = part.partition(":")
        if name and value:
            found[name] = value
        else:
            wrong.append(f"{part!r} is not name:value")
    if text.count("[") != text.count("]"):
        wrong.append(f"{text!r} has a bracket that is not closed")
    return found, wrong
