"""The words of errors about the parts of a batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from elastic_mbs.batch.containers import Path
from elastic_mbs.batch.layout import Cut, Node, quoted, where
from elastic_mbs.batch.splitters import type_name

# A line with more names than this is not offered.
MOST_NAMES = 12


def line_on(leaf: Node) -> str:
    """Return one line on a leaf: its path, its shape, and the dimension it is cut along."""
    if leaf.cut in (Cut.NARROW, Cut.COPY):
        return f"{where(leaf.path)}: shape {tuple(leaf.value.shape)}, {leaf.size} on dim {leaf.dim}"
    unit = "samples" if leaf.cut is Cut.CUSTOM else "items"
    return f"{where(leaf.path)}: {type_name(type(leaf.value))} of {leaf.size} {unit}"


def some_of(paths: Sequence[Path], most: int = 4) -> str:
    """Return the names of some places: `"a", "b" and 3 more`."""
    return ", ".join([where(path) if not path else quoted(path) for path in paths[:most]]) + (
        f" and {len(paths) - most} more" if len(paths) > most else ""
    )


def place_of(path: Path, batch: Any) -> str:
    """Return the place of a part of a batch `b`, as Python code."""
    code, value = "b", batch
    for part in path:
        if isinstance(part, int) or isinstance(value, Mapping):
            code, value = f"{code}[{part!r}]", value[part]
        else:
            code, value = f"{code}.{part}", getattr(value, str(part))
    return code
