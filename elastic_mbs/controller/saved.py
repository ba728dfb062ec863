"""Values of a saved state, checked as they are read."""

from __future__ import annotations

from typing import Any, TypeVar

Value = TypeVar("Value", int, float, bool, str)


def checked(value: Any, kind: type[Value], least: float = 0, most: float = 2**63 - 1) -> Value:
    """Return `value`; raise a ValueError unless it has this type, and a number is in range.

    In range means from `least` to `most`. An int serves as a float.
    """
    fits = type(value) is kind or (kind is float and type(value) is int)
    if not fits or (kind is not str and not least <= value <= most):
        raise ValueError(f"{value!r} is not of type {kind.__name__}, or out of range")
    return kind(value)
