"""Optimizer steps made without the guard: one that began and did not end is reported, because calling it again would train a different model."""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.hooks import RemovableHandle

from elastic_mbs.engine.shared import running


class StepWatch:
    """Follows the steps of every optimizer of the process while it is on."""

    def __init__(self) -> None:
        self.begun: str | None = None  # the optimizer whose step has begun and not ended
        self._hooks: tuple[RemovableHandle, ...] = ()

    def start(self) -> None:
        if not self._hooks:
            running.hook_steps()  # before our own hook: a step that is refused has not begun
            self._hooks = (
                register_optimizer_step_pre_hook(self._on_begin),
                register_optimizer_step_post_hook(self._on_end),
            )

    def stop(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks, self.begun = (), None

    def left_behind(self) -> str | None:
        """What to do about a step that did not end, once; None if all have."""
        begun, self.begun = self.begun, None
        if begun is None:
            return None
        return f"`{begun}.step()` did not end; parameters and state may be half changed: load the last checkpoint, or use `mbs.optimizer_step`"

    def _on_begin(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        # runs forward and backward, and with them this very code, inside the step
        closure = len(args) > 1 or kwargs
        self.begun = None if closure else type(optimizer).__name__

    def _on_end(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self.begun = None
