"""Tables in Markdown, made of rows of figures."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

R = TypeVar("R")


def table(rows: Sequence[R], columns: Mapping[str, Callable[[R], object]]) -> str:
    """Return a table with one line for each row.

    Args:
        rows: of any kind.
        columns: heading → text of a row under it.
    """
    lines = [
        list(columns),
        ["---"] * len(columns),
        *([str(show(row)) for show in columns.values()] for row in rows),
    ]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
