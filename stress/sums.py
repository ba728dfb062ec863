"""Figures that are added up over steps, rounds and processes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any


class Sums:
    """Base of dataclasses whose fields are numbers and counters; one named `worst` keeps the largest."""

    def as_json(self) -> dict[str, Any]:
        """For `merge`, and for a file."""
        return {name: dict(value) if isinstance(value, Counter) else value for name, value in vars(self).items()}

    def merge(self, other: Mapping[str, Any]) -> None:
        """Adds what `as_json` gave of another."""
        for name, value in other.items():
            mine = getattr(self, name)
            if isinstance(mine, Counter):
                mine.update(value)
            else:
                setattr(self, name, max(mine, value) if name == "worst" else mine + value)


def listed(counter: Mapping[str, int]) -> str:
    """Names with their numbers, the most frequent first."""
    return ", ".join(f"{name} {n}" for name, n in sorted(counter.items(), key=lambda item: -item[1])) or "none"
