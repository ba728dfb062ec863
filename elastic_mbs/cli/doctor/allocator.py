"""The settings of torch's CUDA allocator in the environment: `name:value,name:[a:b,c:d]`."""

from __future__ import annotations

import re
from collections.abc import Mapping

# in the order in which the CUDA allocator of torch 2.13 looks for them; the first that is set counts
VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
_SETTING = re.compile(r"(\w+):(\[[^\]]*\]|[^,\[\]]+)")


def settings(environment: Mapping[str, str]) -> dict[str, str]:
    """The settings of the variable that counts; what torch cannot read is passed over, since it says so itself when CUDA starts."""
    return next((_parse(environment[name]) for name in VARIABLES if name in environment), {})


def conflict(environment: Mapping[str, str]) -> bool:
    """Whether two of the variables are set to different things."""
    return len({frozenset(_parse(environment[name]).items()) for name in VARIABLES if name in environment}) > 1


def _parse(text: str) -> dict[str, str]:
    return dict(_SETTING.findall("".join(text.split())))
