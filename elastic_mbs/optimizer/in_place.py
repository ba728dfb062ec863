"""The guard of `optimizer.step()` itself, for `ElasticMBS(model, optimizers=[optimizer])`.

The optimizer gets a `step` of its own that makes the guarded step. A scheduler may wrap it before
or after, and a GradScaler may call it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from types import MethodType
from typing import Any

from torch.optim import Optimizer

from elastic_mbs.errors import UsageError
from elastic_mbs.optimizer.guarded_step import check_optimizer

GuardedStep = Callable[[Optimizer, object], None]

_GUARD = "_elastic_mbs_guard"  # attribute of a `step` that was put in place


class GuardInPlace:
    """The guard of one optimizer's `step`, from `put` to `take_off`.

    Attributes:
        active: False makes the step as it was before.
    """

    active = False
    _step: MethodType | None = None
    _found: Any = None  # the instance's own `step` before: a scheduler's, or none
    _inside = False  # the guarded step runs, and calls `step` itself

    def __init__(self, optimizer: Optimizer, guarded_step: GuardedStep) -> None:
        self._optimizer = optimizer
        self._guarded_step = guarded_step

    def put(self) -> None:
        """Take the place of `optimizer.step`; the guard of an earlier runtime ends."""
        present = getattr(self._optimizer.step, _GUARD, None)
        if isinstance(present, GuardInPlace) and present is not self:
            present.take_off()
        self.active = True
        if present is self:
            return  # still there, perhaps inside a scheduler's
        self._found = vars(self._optimizer).get("step")
        # A method, because a scheduler that comes later takes its function.
        self._step = MethodType(self._around(self._optimizer.step), self._optimizer)
        vars(self._optimizer)["step"] = self._step

    def take_off(self) -> None:
        """Give the place back."""
        self.active = False
        attributes = vars(self._optimizer)
        if attributes.get("step") is not self._step:
            return  # wrapped by a scheduler, which keeps it
        if self._found is None:
            del attributes["step"]
        else:
            attributes["step"] = self._found

    def _around(self, plain_step: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(plain_step)
        def step(optimizer: Optimizer, closure: object = None) -> Any:
            if self._inside or not self.active:
                return plain_step() if closure is None else plain_step(closure)
            self._inside = True
            try:
                return self._guarded_step(optimizer, closure)
            finally:
                self._inside = False

        setattr(step, _GUARD, self)
        return step


def guards_of(optimizers: object, guarded_step: GuardedStep) -> list[GuardInPlace]:
    """Return a guard for each optimizer, not in place yet.

    Raises:
        UsageError: `optimizers` holds something else, or an optimizer that cannot be guarded.
    """
    if isinstance(optimizers, Optimizer) or not isinstance(optimizers, Iterable):
        raise UsageError(
            f"optimizers= got a {type(optimizers).__name__}: give a sequence of optimizers, "
            "optimizers=[optimizer]"
        )
    optimizers = list(optimizers)
    for optimizer in optimizers:
        check_optimizer(optimizer)
    return [GuardInPlace(optimizer, guarded_step) for optimizer in optimizers]
