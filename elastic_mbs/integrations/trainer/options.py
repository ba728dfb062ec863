"""The options of `elastic=`, and the optimizer's step that one of them guards."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Mapping
from typing import Any

import torch

from elastic_mbs.errors import UsageError
from elastic_mbs.options import Options, check_names
from elastic_mbs.runtime import ElasticMBS

OWN = {"optimizer_step": False, "verify": True}
_TAKEN = ("outputs", "reduction", "scaler")  # options of the runtime that follow from the trainer


class TrainerOptions(Options, total=False):
    """The options of `elastic=`: those of `ElasticMBS`, and two of the trainer's own."""

    optimizer_step: bool
    verify: bool


def checked(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options with the trainer's own filled in; the runtime checks the others."""
    check_names("elastic=", options, own=OWN, taken=_TAKEN)
    for name in OWN:
        if not isinstance(options.get(name, True), bool):
            raise UsageError(f"elastic={{{name!r}: {options[name]!r}}} is neither True nor False")
    if not (options.get("count") is None or callable(options["count"])):
        raise UsageError(
            f"elastic={{'count': {options['count']!r}}}: give a function of the batch that "
            "returns one count per sample, or None"
        )
    return {**OWN, **options}


def guard(optimizer: torch.optim.Optimizer, runtime: Callable[[], ElasticMBS]) -> None:
    """Send `optimizer.step()` through the runtime's guarded step, once."""
    if hasattr(plain := optimizer.step, "guarded"):
        return

    @functools.wraps(plain)
    def step(self: torch.optim.Optimizer, closure: Any = None) -> None:
        ours = vars(self)["step"]
        vars(self)["step"] = plain
        try:
            runtime().optimizer_step(self, closure)
        finally:
            vars(self)["step"] = ours

    vars(step)["guarded"] = True
    vars(optimizer)["step"] = types.MethodType(step, optimizer)
