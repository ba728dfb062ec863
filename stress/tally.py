"""Dataclasses as JSON holds them, and figures that are added up. Numbers that JSON does not have are "NaN", "Infinity" and "-Infinity"."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any


def to_plain(value: Any) -> Any:
    """A value as dicts, lists, numbers and strings."""
    if is_dataclass(value):
        return {each.name: to_plain(getattr(value, each.name)) for each in fields(value)}
    if isinstance(value, float) and not math.isfinite(value):
        return json.dumps(value)
    if isinstance(value, dict):
        return {key: to_plain(item) for key, item in value.items()}
    return [to_plain(item) for item in value] if isinstance(value, list | tuple) else value


class Tally:
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
