"""What cases came to."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from ..tally import Tally, listed


@dataclass
class Outcome(Tally):
    """What one case came to."""

    calls: int = 0  # training calls
    faults: int = 0  # that were planned
    struck: int = 0  # operations that were made to fail
    limits_hit: int = 0  # times that a memory limit was passed
    splits: int = 0  # failures after which the micro-batch was made smaller
    partial: int = 0  # failures after which a piece was replayed for some of the leaves, because the others had its gradient already
    errors: Counter[str] = field(default_factory=Counter)  # typed ones that ended a call
    modes: Counter[str] = field(default_factory=Counter)  # of replays
    phases: Counter[str] = field(default_factory=Counter)  # of failures
    seconds: float = 0.0  # spent in calls
    lost: float = 0.0  # of those, in attempts that failed
    worst: float = 0.0  # largest relative error of a gradient


@dataclass
class Totals(Outcome):
    """Sums over cases."""

    runs: int = 0
    clean: int = 0  # cases in which nothing went wrong that could
    failures: Counter[str] = field(default_factory=Counter)  # cases with an outcome that is not allowed, by kind

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
