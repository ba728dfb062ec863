"""Host → device: bringing a piece of the batch to the model."""

from __future__ import annotations

from typing import Any

import torch

from elastic_mbs.batch.containers import map_tensors
from elastic_mbs.errors import UsageError


def to_device(piece: Any, device: torch.device | None) -> Any:
    """The piece with its tensors on the device (None: where they are), in the current stream's order: the host does not wait."""
    if device is None:
        return piece
    return map_tensors(piece, lambda tensor: tensor if tensor.device == device else tensor.to(device, non_blocking=True))


def choose_device(wanted: torch.device | str | None, model: list[torch.device]) -> torch.device | None:
    """Where pieces go: "auto" is the model's device when it has exactly one and that is no CPU."""
    if wanted == "auto":
        return model[0] if len(model) == 1 and model[0].type != "cpu" else None
    if wanted is None:
        return None
    try:
        device = torch.device(wanted)
    except (RuntimeError, TypeError) as error:
        raise UsageError(f"device={wanted!r} is not a device: use 'auto', None (pieces stay where they are), or a torch.device") from error
    return torch.device("cuda", torch.cuda.current_device()) if device.type == "cuda" and device.index is None else device
