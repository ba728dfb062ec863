"""Values of many tensors copied in few operations."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

Groups = list[tuple[list[Tensor], list[Tensor]]]  # targets and their sources


def group(pairs: Iterable[tuple[Tensor, Tensor]]) -> Groups:
    """Sort pairs of a target and its source into lists that one kernel copies.

    A kernel serves the targets of one type on one device.
    """
    groups: dict[tuple[torch.device, torch.dtype], tuple[list[Tensor], list[Tensor]]] = {}
    for target, source in pairs:
        targets, sources = groups.setdefault((target.device, target.dtype), ([], []))
        targets.append(target)
        sources.append(source)
    return list(groups.values())


def copy(groups: Groups) -> None:
    """Copy the values of all sources to their targets."""
    for targets, sources in groups:
        torch._foreach_copy_(targets, sources)
