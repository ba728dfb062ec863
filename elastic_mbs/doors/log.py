"""The log of a runtime's events, and the header of a run log."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Iterable
from dataclasses import asdict
from functools import partial

import torch

from elastic_mbs.device import accelerator_of
from elastic_mbs.errors import UsageError
from elastic_mbs.events import EventLog, Sink
from elastic_mbs.options import Settings
from elastic_mbs.sinks.run_log import RunLog
from elastic_mbs.version import __version__


def event_log(
    settings: Settings,
    devices: Callable[[], list[torch.device]],
    log: str | os.PathLike[str] | None,
    on_event: Sink | Iterable[Sink],
) -> EventLog:
    """Return the log of a runtime's events.

    The run log comes first, because a user's sink can raise.
    """
    run_log = () if log is None else (RunLog(log, partial(describe, settings, devices)),)
    sinks = (
        tuple(on_event)
        if isinstance(on_event, Iterable) and not callable(on_event)
        else (on_event,)
    )
    if not all(map(callable, sinks)):
        raise UsageError(f"on_event={on_event!r} is neither a function nor a sequence of functions")
    return EventLog((*run_log, *sinks))


def describe(settings: Settings, devices: Callable[[], list[torch.device]]) -> dict[str, object]:
    """Return the fields of a run log's header that describe a runtime.

    They are versions, device, and the options that are numbers, flags and strings.
    """
    policy = asdict(settings.policy) | {"min_micro_batch_size": settings.limits.minimum}
    listed = {
        name: policy.pop(name)
        for name in ("min_micro_batch_size", "max_micro_batch_size", "align", "grow")
    }
    groups = (settings.gradients, settings.recovery, settings.memory, settings.distributed)
    for group in (settings, *groups):
        listed |= vars(group)
    device = devices()[0]
    return {
        "name": listed.pop("name"),
        "versions": {
            "elastic_mbs": __version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
            "cuda": torch.version.cuda,
        },
        "device": str(device) if (found := accelerator_of(device)) is None else found.name(),
        "settings": {
            name: value
            for name, value in listed.items()
            if value is None or isinstance(value, bool | int | float | str)
        },
        "policy": policy,
    }
