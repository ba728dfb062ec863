"""Optimizer steps made without the guard: one that began and did not end is reported.

Calling it again would train a different model.
"""

from __future__ import annotations

from torch.optim import Optimizer

from elastic_mbs.engine.shared import running


class StepWatch:
    """Watch over the steps of every optimizer of the process, from `start` to `stop`."""

    def __init__(self) -> None:
        self.begun: str | None = None  # the optimizer whose step has begun and not ended

    def start(self) -> None:
        running.observe_steps(self)

    def stop(self) -> None:
        running.ignore_steps(self)
        self.begun = None

    def left_behind(self) -> str | None:
        """Return the advice for a step that did not end, once; None if all have ended."""
        begun, self.begun = self.begun, None
        if begun is None:
            return None
        return (
            f"`{begun}.step()` did not end; parameters and state may be half changed: load the "
            "last checkpoint, and step by `mbs.optimizer_step` from then on"
        )

    def step_begins(self, optimizer: Optimizer, *, closure: bool) -> None:
        # a closure runs this very code inside the step
        self.begun = None if closure else type(optimizer).__name__

    def step_ends(self) -> None:
        self.begun = None
