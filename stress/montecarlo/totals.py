"""What one case came to, and what many of them did."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Outcome:
    """What one case came to.

    Attributes:
        calls: training calls.
        faults: faults that were planned.
        struck: operations that were made to fail.
        limits_hit: times that a memory limit was passed.
        splits: failures after which the micro-batch was made smaller.
        partial: failures after which a piece was replayed for some of the leaves, because the others had its gradient already.
        errors: typed errors that ended a call, by name.
        modes: replays by mode.
        phases: failures by phase.
        seconds: spent in calls.
        lost: of those, in attempts that failed.
        worst: largest relative error of a gradient.
    """

    calls: int = 0
    faults: int = 0
    struck: int = 0
    limits_hit: int = 0
    splits: int = 0
    partial: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    modes: Counter[str] = field(default_factory=Counter)
    phases: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0
    lost: float = 0.0
    worst: float = 0.0

    def as_json(self) -> dict[str, Any]:
        """For `merge`, and for a file."""
        return {name: dict(value) if isinstance(value, Counter) else value for name, value in vars(self).items()}

    def merge(self, other: Mapping[str, Any]) -> None:
        """Adds what `as_json` gave of another; of the worst error the larger one counts."""
        for name, value in other.items():
            mine = getattr(self, name)
            if isinstance(mine, Counter):
                mine.update(value)
            else:
                setattr(self, name, max(mine, value) if name == "worst" else mine + value)


@dataclass
class Totals(Outcome):
    """Sums over cases.

    Attributes:
        runs: cases.
        clean: of those, cases in which nothing went wrong that could.
        failures: cases with an outcome that is not allowed, by kind.
    """

    runs: int = 0
    clean: int = 0
    failures: Counter[str] = field(default_factory=Counter)

    def add(self, outcome: Outcome) -> None:
        """Counts a case whose outcome is allowed."""
        self.runs += 1
        self.clean += not (outcome.struck or outcome.limits_hit)
        self.merge(outcome.as_json())

    def fail(self, kind: str) -> None:
        """Counts a case whose outcome is not."""
        self.runs += 1
        self.failures[kind] += 1

    def table(self) -> str:
        """For a person."""
        share = self.lost / self.seconds if self.seconds else 0.0
        rows = {
            "runs": f"{self.runs} ({self.clean} in which nothing struck), {self.calls} training calls",
            "faults": f"{self.faults} planned; {self.struck} operations made to fail, memory limit passed {self.limits_hit} times",
            "failures survived by phase": _listed(self.phases),
            "replays by mode": f"{_listed(self.modes)}; {self.partial} of pieces that had partly committed",
            "splits": str(self.splits),
            "typed errors": _listed(self.errors),
            "time lost to replays": f"{self.lost:.1f} s of {self.seconds:.1f} s in calls ({share:.0%})",
            "worst error of a gradient": f"{self.worst:.1e}",
            "not allowed": _listed(self.failures),
        }
        return "\n".join(f"{name:28} {value}" for name, value in rows.items())


def _listed(counter: Counter[str]) -> str:
    return ", ".join(f"{name} {n}" for name, n in counter.most_common()) or "none"
