"""The user's hooks around an optimizer's step, however often the step is tried."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from torch.optim import Optimizer

from elastic_mbs.errors import MisuseError


class DeferredHooks:
    """The user's step hooks, run once for the whole step however often it is tried.

    One may clip gradients, another average weights.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.ended = False  # the latest call of `step` has ended
        self.running = False  # a hook of the user's runs, or has failed
        self._optimizer = optimizer
        self._before = optimizer._optimizer_step_pre_hooks
        self._after = optimizer._optimizer_step_post_hooks
        self._left_before = list(self._before.values())  # still to be run
        self._left_after: list[Any] | None = None  # the same; None until the others have run

    @property
    def begun(self) -> bool:
        """True once the hooks before the step have run."""
        return self._left_after is not None

    def defer(self) -> None:
        self._optimizer._optimizer_step_pre_hooks = OrderedDict({0: self.begin})
        self._optimizer._optimizer_step_post_hooks = OrderedDict({0: self._end})

    def put_back(self) -> None:
        self._optimizer._optimizer_step_pre_hooks = self._before
        self._optimizer._optimizer_step_post_hooks = self._after

    def begin(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self.begun:
            return
        self.put_back()  # a hook may take itself off, or add another one
        while self._left_before:
            self.running = True
            if self._left_before.pop(0)(optimizer, args, kwargs) is not None:
                raise MisuseError(
                    "a step hook that changes the arguments of step() does not go with "
                    "optimizer_step(), which passes none"
                )
            self.running = False
        self.defer()
        self._left_after = list(self._after.values())

    def _end(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self.ended = True

    def run_after(self) -> None:
        """Run the hooks that follow a step; none of them if the scaler has skipped it."""
        while self._left_after:
            self.running = True
            self._left_after.pop(0)(self._optimizer, (self._optimizer,), {})
            self.running = False
