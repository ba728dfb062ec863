"""What the stress tool has found, to look at: a page for a browser, and a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from elastic_mbs.errors import UsageError

from ..record import Run
from .page import render

__all__ = ["write_html", "write_png"]


def write_html(runs: Sequence[Run], path: Path) -> None:
    """Writes the runs as one HTML file that needs nothing else.

    Raises:
        UsageError: the file cannot be written.
    """
    try:
        path.write_text(render(runs), encoding="utf-8")
    except OSError as error:
        raise UsageError(f"--html {path}: {error.strerror or error}") from error


def write_png(runs: Sequence[Run], path: Path) -> None:
    """Writes the runs as one picture, each with its memory and its micro-batches.

    Raises:
        UsageError: matplotlib is not installed, or the file cannot be written.
    """
    try:
        from .picture import draw
    except ImportError as error:
        raise UsageError(f"--png {path}: a picture needs matplotlib: pip install 'elastic-mbs[plot]'") from error
    try:
        draw(runs, path)
    except OSError as error:
        raise UsageError(f"--png {path}: {error.strerror or error}") from error
