"""What a round, or many of them, came to."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from ..sums import Sums, listed


@dataclass
class Counts(Sums):
    """Sums over steps.

    Attributes:
        steps: training steps.
        failures: allocations that were refused, by the world's count; where nobody counts them, out-of-memory errors that the runtime has told of.
        ooms: out-of-memory errors that the runtime has told of, those of the optimizer among them.
        checked: steps whose gradient, loss, buffers and random streams were compared.
        worst: largest relative difference of a gradient.
        optimizer: guarded optimizer steps that were compared.
        phases: what ran out of memory: "load", "forward", "backward", "commit" or "optimizer".
        modes: how it was replayed.
        refused: typed errors that ended a call with everything as before it, by name.
    """

    steps: int = 0
    failures: int = 0
    ooms: int = 0
    checked: int = 0
    worst: float = 0.0
    optimizer: int = 0
    phases: Counter[str] = field(default_factory=Counter)
    modes: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)

    def line(self) -> str:
        """For a person."""
        return (
            f"{self.failures} failures in {self.steps} steps, {self.ooms} out-of-memory errors told of ({listed(self.phases)}), "
            f"{sum(self.refused.values())} calls refused, {self.checked} gradients checked, worst {self.worst:.1e}"
        )
