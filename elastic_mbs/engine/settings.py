"""The settings of a runtime, checked once."""

from __future__ import annotations

import math
import platform
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

import torch

from elastic_mbs.controller.policy import Policy
from elastic_mbs.engine.result import OutputPlace, check_place
from elastic_mbs.errors import ElasticMBSError, UsageError
from elastic_mbs.version import __version__

Reduction = Literal["mean", "sum"]
Replay = Literal["auto", "isolate"]


@dataclass(frozen=True)
class Settings:
    """What the user asked for, in the words of `ElasticMBS`.

    Raises:
        UsageError: a value makes no sense; the message names it and the way out.
    """

    name: str = "elastic_mbs"
    micro_batch_size: int | Literal["auto"] = "auto"
    min_micro_batch_size: int = 1
    max_micro_batch_size: int | None = None
    align: int = 1
    grow: bool = True
    reduction: Reduction = "mean"
    accumulate_dtype: torch.dtype | None = None
    replay: Replay = "auto"
    outputs: OutputPlace = "cpu"
    scaler: torch.amp.GradScaler | None = None
    backward: Callable[[torch.Tensor], object] | None = None
    is_oom: Callable[[BaseException], bool] | None = None
    on_fatal: Callable[[ElasticMBSError], object] | None = None
    wait_for_memory: float = 30.0

    def __post_init__(self) -> None:
        size = self.micro_batch_size
        if not (size == "auto" or (_is_count(size) and int(size) >= 1)):
            raise UsageError(f"micro_batch_size={size!r} is neither 'auto' nor a whole number of at least 1")
        for key in ("min_micro_batch_size", "align"):
            if not (_is_count(getattr(self, key)) and getattr(self, key) >= 1):
                raise UsageError(f"{key}={getattr(self, key)!r} is not a whole number of at least 1")
        low, high = self.min_micro_batch_size, self.max_micro_batch_size
        if high is not None and not (_is_count(high) and high >= low):
            raise UsageError(f"max_micro_batch_size={high!r} must be None or a whole number of at least min_micro_batch_size={low}")
        if size != "auto" and not (low <= int(size) and (high is None or int(size) <= high)):
            raise UsageError(f"micro_batch_size={size} lies outside [min_micro_batch_size={low}, max_micro_batch_size={high}]")
        if self.reduction not in ("mean", "sum"):
            raise UsageError(f"reduction={self.reduction!r} is not known: use 'mean' (a mean over the piece's counts) or 'sum'")
        if self.replay not in ("auto", "isolate"):
            raise UsageError(
                f"replay={self.replay!r} is not known: use 'auto', or 'isolate' for losses that compare samples in ways torch cannot show"
            )
        if self.accumulate_dtype not in (None, torch.float32, torch.float64):
            raise UsageError(f"accumulate_dtype={self.accumulate_dtype!r} is not wider than half precision: use torch.float32, or None")
        if self.scaler is not None and self.backward is not None:
            raise UsageError("scaler= and backward= were both given; a trainer's own backward scales the loss by itself, so leave scaler out")
        wait = self.wait_for_memory
        if isinstance(wait, bool) or not isinstance(wait, int | float) or not 0 <= wait < math.inf:
            raise UsageError(f"wait_for_memory={wait!r} is not a finite number of seconds of at least 0")
        for key in ("backward", "is_oom", "on_fatal"):
            if getattr(self, key) is not None and not callable(getattr(self, key)):
                raise UsageError(f"{key}={getattr(self, key)!r} cannot be called: give a function, or None")
        if self.scaler is not None and not (hasattr(self.scaler, "scale") and hasattr(self.scaler, "unscale_")):
            raise UsageError(f"scaler={self.scaler!r} is no torch.amp.GradScaler: it has no scale() and unscale_()")
        check_place(self.outputs)

    @property
    def plain(self) -> bool:
        """Whether a piece's backward is `loss.backward()` and adds to `.grad` in place."""
        return self.scaler is None and self.backward is None and self.accumulate_dtype is None and self.replay == "auto"


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def describe(settings: Settings, policy: Policy, devices: Callable[[], list[torch.device]]) -> dict[str, object]:
    """What a header tells of a runtime.

    Args:
        settings: those that are numbers and strings are told.
        policy: all of it is told.
        devices: gives the model's devices.
    """
    told = {item.name: getattr(settings, item.name) for item in fields(settings) if item.name != "name"}
    return {
        "name": settings.name,
        "versions": {
            "elastic_mbs": __version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
            "cuda": torch.version.cuda,
        },
        "device": _device_name(devices()[0]),
        "settings": {name: value for name, value in told.items() if value is None or isinstance(value, bool | int | float | str)},
        "policy": asdict(policy),
    }


def _device_name(device: torch.device) -> str:
    if device.type != "cuda":
        return str(device)
    try:  # cuda-only
        return f"{device} ({torch.cuda.get_device_name(device)})"
    except RuntimeError:  # cuda-only
        return str(device)
