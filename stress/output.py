"""Where results go."""

from __future__ import annotations

import os
from pathlib import Path

from elastic_mbs.errors import UsageError


def check_writable(path: Path | None, option: str) -> None:
    """Looks before hours of work whether a file can be written after them.

    Raises:
        UsageError: it cannot.
    """
    if path is None:
        return
    if path.is_dir():
        raise UsageError(f"{option} {path} is a folder: give a file")
    if not path.parent.is_dir():
        raise UsageError(f"{option} {path}: there is no folder {path.parent}")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise UsageError(f"{option} {path} cannot be written")
