"""Where results go."""

from __future__ import annotations

from pathlib import Path

from elastic_mbs.errors import UsageError


def check_writable(path: Path | None, option: str) -> None:
    """Opens a file before minutes of work, so that UsageError comes before them where it cannot be written. What is in it stays."""
    if path is None:
        return
    try:
        if path.is_dir():
            raise UsageError(f"{option} {path}: this is a folder; name a file")
        if not path.parent.is_dir():
            raise UsageError(f"{option} {path}: there is no folder {path.parent}; make it first")
        was_there = path.exists()
        path.open("a").close()
        if not was_there:
            path.unlink()
    except OSError as error:
        raise UsageError(f"{option} {path}: it cannot be written ({error.strerror}); name another file") from error
