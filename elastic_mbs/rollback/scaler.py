"""A GradScaler whose first use ran out of memory."""

from __future__ import annotations

import torch


def reset_half_made(scaler: torch.amp.GradScaler | None) -> None:
    """Make a scaler start again, where it has only one of the two tensors of its first use.

    It would never make the other one.
    """
    missing = object()
    if (
        getattr(scaler, "_scale", None) is not None
        and getattr(scaler, "_growth_tracker", missing) is None
    ):
        scaler._scale = None  # type: ignore[union-attr]  # there is one
