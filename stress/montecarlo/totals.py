"""What one case came to, and what many of them did."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from ..tally import Tally, listed


@dataclass
class Outcome(Tally):
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
            "failures survived by phase": listed(self.phases),
            "replays by mode": f"{listed(self.modes)}; {self.partial} of pieces that had partly committed",
            "splits": str(self.splits),
            "typed errors": listed(self.errors),
            "time lost to replays": f"{self.lost:.1f} s of {self.seconds:.1f} s in calls ({share:.0%})",
            "worst error of a gradient": f"{self.worst:.1e}",
            "not allowed": listed(self.failures),
        }
        return "\n".join(f"{name:28} {value}" for name, value in rows.items())
