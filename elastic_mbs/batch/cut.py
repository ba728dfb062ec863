"""The words of `dims=`, by which the user says how a value is cut where its shape does not tell.

The cutting itself is in `elastic_mbs.batch.layout`.

Each function returns a dict from a name, a dotted path or an index to a reading; `|` joins them
with each other and with plain dimensions: `dims={"position_ids": 1} | cut.whole("mask")`.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum, auto
from typing import Any

__all__ = ["Dims", "fields", "items", "whole"]


class ListLayout(Enum):
    """A reading of a list whose type does not decide it."""

    ITEMS = auto()  # one item per sample
    FIELDS = auto()  # each element holds all samples


# Name, dotted path or index → dimension of the samples, None (pass whole) or a `ListLayout`. The
# empty name is the batch itself.
Dims = Mapping[Any, int | ListLayout | None]


def whole(*names: str | int) -> dict[str, Any]:
    """Pass these parts whole to every piece: `dims=cut.whole("class_weights")`."""
    return {str(name): None for name in names}


def items(*names: str | int) -> dict[str, Any]:
    """Read these lists or tuples as one item per sample: `dims=cut.items("images")`.

    Without a name: the batch itself.
    """
    return {str(name): ListLayout.ITEMS for name in names or ("",)}


def fields(*names: str | int) -> dict[str, Any]:
    """Read these lists as fields that each hold all samples: `dims=cut.fields("views")`.

    Without a name: the batch itself.
    """
    return {str(name): ListLayout.FIELDS for name in names or ("",)}
