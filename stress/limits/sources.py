"""The C and C++ sources of the limits that are compiled where they run; the wheel has none."""

from __future__ import annotations

from pathlib import Path

from elastic_mbs import __version__


def missing(path: Path, limit: str) -> str | None:
    """Return the way to the sources of a limit where they are not beside it, else None."""
    if path.exists():
        return None
    return (
        f"{limit} is compiled from sources that the wheel does not have ({path.name}): get the "
        "source distribution with `pip download --no-deps --no-binary elastic-mbs elastic-mbs=="
        f"{__version__}`, unpack it, and run `python -m stress` in its folder"
    )
