"""Jagged tensors of `torch.nested`: one of their dimensions is as long as each sample is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from elastic_mbs.batch.ragged.rows import Rows


def is_jagged(value: Any) -> bool:
    """Return whether a nested tensor can be cut: a jagged one without holes between samples."""
    return value.layout is torch.jagged and value.lengths() is None


@dataclass(frozen=True, eq=False, slots=True)
class Jagged:
    """The samples of a jagged tensor.

    Pieces of tensors that share their offsets share them, too: so they can be added.
    """

    rows: Rows
    dim: int = 0

    def piece(self, value: Any, start: int, stop: int) -> Any:
        place, shared = (start, stop, value.device), self.rows.shared
        if place not in shared:
            offsets = value.offsets()
            shared.clear()
            shared[place] = offsets[start : stop + 1] - offsets[start]
        ragged = value._ragged_idx  # of the nested tensor; that of its values is one less
        return torch.nested.nested_tensor_from_jagged(
            self.rows.cut(value.values(), ragged - 1, start, stop),
            shared[place],
            jagged_dim=ragged,
        )
