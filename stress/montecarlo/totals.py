"""What many cases came to."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from .trial import Outcome

COUNTERS = ("errors", "modes", "phases")


@dataclass
class Totals:
    """Sums over cases.

    Attributes:
        runs: cases.
        clean: of those, cases in which nothing went wrong that could.
        failures: cases with an outcome that is not allowed, by kind.
    """

    runs: int = 0
    clean: int = 0
    calls: int = 0
    faults: int = 0
    struck: int = 0
    limits_hit: int = 0
    splits: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    modes: Counter[str] = field(default_factory=Counter)
    phases: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0
    lost: float = 0.0
    worst: float = 0.0
    failures: Counter[str] = field(default_factory=Counter)

    def add(self, outcome: Outcome) -> None:
        """Counts a case whose outcome is allowed."""
        self.runs += 1
        self.clean += not (outcome.struck or outcome.limits_hit)
        for name in ("calls", "faults", "struck", "limits_hit", "splits", "seconds", "lost"):
            setattr(self, name, getattr(self, name) + getattr(outcome, name))
        self.worst = max(self.worst, outcome.worst)
        for name in COUNTERS:
            getattr(self, name).update(getattr(outcome, name))

    def fail(self, kind: str) -> None:
        """Counts a case whose outcome is not."""
        self.runs += 1
        self.failures[kind] += 1

    def merge(self, other: dict[str, Any]) -> None:
        """Adds what another process has counted."""
        for name, value in other.items():
            if isinstance(getattr(self, name), Counter):
                getattr(self, name).update(value)
            elif name == "worst":
                self.worst = max(self.worst, value)
            else:
                setattr(self, name, getattr(self, name) + value)

    def as_json(self) -> dict[str, Any]:
        """For `merge`, and for a file."""
        return {name: dict(value) if isinstance(value, Counter) else value for name, value in vars(self).items()}

    def table(self) -> str:
        """For a person."""
        share = self.lost / self.seconds if self.seconds else 0.0
        rows = {
            "runs": f"{self.runs} ({self.clean} in which nothing struck), {self.calls} training calls",
            "faults": f"{self.faults} planned; {self.struck} operations made to fail, memory limit passed {self.limits_hit} times",
            "failures survived by phase": _listed(self.phases),
            "replays by mode": _listed(self.modes),
            "splits": str(self.splits),
            "typed errors": _listed(self.errors),
            "time lost to replays": f"{self.lost:.1f} s of {self.seconds:.1f} s in calls ({share:.0%})",
            "worst error of a gradient": f"{self.worst:.1e}",
            "not allowed": _listed(self.failures),
        }
        return "\n".join(f"{name:28} {value}" for name, value in rows.items())


def _listed(counter: Counter[str]) -> str:
    return ", ".join(f"{name} {n}" for name, n in counter.most_common()) or "none"
