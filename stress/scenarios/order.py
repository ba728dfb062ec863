"""What is to be run, as data that goes to another process."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Self

from .catalogue import SCENARIOS, Scenario

DEADLINE = 900.0
"""Seconds for what is quick: the built-in models."""


@dataclass(frozen=True)
class Order:
    """One process of a scenario.

    Attributes:
        scenario: its name.
        kind: of limit.
        model: as `--model` names it.
        seed: of model, batches, script and controller.
        steps: how many.
        device: "cpu" or "cuda".
        budget: bytes that stand for a share of 1; None for what the whole batch takes.
        process: 0, or 1 for the second of two.
        folder: for checkpoints; None where there are none.
        dies: the step in whose backward the process kills itself; None for never.
        needs: what the model takes, where that is known and the limit is already there: for two processes on one device.
        deadline: seconds after which a process of it is taken for hung.
        meeting: folder in which two processes on one device wait for each other; None where there is nobody to wait for.
    """

    scenario: str
    kind: str
    model: str
    seed: int
    steps: int
    device: str = "cpu"
    budget: int | None = None
    process: int = 0
    folder: str | None = None
    dies: int | None = None
    needs: dict[str, Any] | None = None
    meeting: str | None = None
    deadline: float = DEADLINE

    @property
    def entry(self) -> Scenario:
        """The scenario itself."""
        return SCENARIOS[self.scenario]

    def to_json(self) -> dict[str, Any]:
        """This, as JSON holds it."""
        return asdict(self)

    @classmethod
    def from_json(cls, plain: dict[str, Any]) -> Self:
        """What `to_json` gave."""
        return cls(**plain)
