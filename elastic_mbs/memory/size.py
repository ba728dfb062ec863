"""Numbers of bytes, read and written."""

from __future__ import annotations

import re

from elastic_mbs.errors import UsageError

_UNITS = {"": 1, "B": 1}
_UNITS |= {f"{letter}IB": 1024**power for power, letter in enumerate("KMGT", 1)}
_UNITS |= {f"{letter}B": 1000**power for power, letter in enumerate("KMGT", 1)}
_SIZE = re.compile(r"\s*(\d+(?:_\d+)*(?:\.\d+)?)\s*([a-zA-Z]*)\s*")


def parse_bytes(size: int | str) -> int:
    """Bytes, rounded down, of an int or a string such as `"2GiB"`, `"1.5 MiB"`, `"500MB"` (KiB to TiB: powers of 1024; KB to TB: powers of 1000).

    Raises:
        UsageError: the text is no size, the unit is unknown, or the number is negative.
    """
    if isinstance(size, int) and not isinstance(size, bool):
        if size < 0:
            raise UsageError(f"a size cannot be negative, got {size} bytes")
        return size
    match = _SIZE.fullmatch(size) if isinstance(size, str) else None
    unit = _UNITS.get(match[2].upper()) if match else None
    if match is None or unit is None:
        raise UsageError(f"cannot read {size!r} as a number of bytes: write an int, or a string such as '2GiB' (1024³) or '2GB' (1000³)")
    return int(match[1]) * unit if "." not in match[1] else int(float(match[1]) * unit)


def in_words(size: int) -> str:
    """Bytes with two decimals, as the CUDA allocator's messages have them: `1536` → `1.50 KiB`."""
    for unit, power in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if size >= 1 << power:
            return f"{size / (1 << power):.2f} {unit}"
    return f"{size} bytes"
