"""The step hooks of the user and of others, run once for a step that is tried several times."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer
from torch.optim import optimizer as torch_optimizer

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
        # Those registered for all optimizers run first before a step, and last after it.
        first = torch_optimizer._global_optimizer_pre_hooks.values()
        self._left_before = [*first, *self._before.values()]  # still to be run
        self._left_after: list[Any] | None = None  # the same; None until the others have run

    @property
    def begun(self) -> bool:
        """True once the hooks before the step have run."""
        return self._left_after is not None

    def skip_before(self) -> None:
        """Leave out the hooks before the step: they have run, and it was taken back since."""
        self._left_before = []

    def defer(self, begin: Callable[[Optimizer, Any, Any], None]) -> None:
        """Put `begin` in the place of the hooks before the step."""
        self._optimizer._optimizer_step_pre_hooks = OrderedDict({0: begin})
        self._optimizer._optimizer_step_post_hooks = OrderedDict({0: self._end})
        for hooks in _for_all():
            for key, hook in list(hooks.items()):
                if not isinstance(hook, _ForOthers):
                    hooks[key] = _ForOthers(self._optimizer, hook)

    def put_back(self) -> None:
        self._optimizer._optimizer_step_pre_hooks = self._before
        self._optimizer._optimizer_step_post_hooks = self._after
        for hooks in _for_all():
            for key, hook in list(hooks.items()):
                if isinstance(hook, _ForOthers) and hook.optimizer is self._optimizer:
                    hooks[key] = hook.hook

    def begin(self, optimizer: Optimizer, args: Any, kwargs: Any) -> bool:
        """Run the hooks before the step that are left; return whether there were any."""
        some = bool(self._left_before)
        self.put_back()  # a hook may take itself off, or add another one
        while self._left_before:
            self.running = True
            if self._left_before.pop(0)(optimizer, args, kwargs) is not None:
                raise MisuseError(
                    "a step hook that changes the arguments of step() does not go with "
                    "optimizer_step(), which passes none"
                )
            self.running = False
        last = torch_optimizer._global_optimizer_post_hooks.values()
        self._left_after = [
            *self._after.values(),
            *(each.hook if isinstance(each, _ForOthers) else each for each in last),
        ]
        return some

    def _end(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self.ended = True

    def run_after(self) -> None:
        """Run the hooks that follow a step; none of them if the scaler has skipped it."""
        while self._left_after:
            self.running = True
            self._left_after.pop(0)(self._optimizer, (self._optimizer,), {})
            self.running = False


class _ForOthers:
    """A hook of all optimizers, for the time in which it is deferred for one of them."""

    def __init__(self, optimizer: Optimizer, hook: Callable[..., Any]) -> None:
        self.optimizer = optimizer
        self.hook = hook

    def __call__(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        return None if optimizer is self.optimizer else self.hook(optimizer, args, kwargs)


def _for_all() -> tuple[dict[int, Callable[..., Any]], ...]:
    """Return the hooks that are registered for all optimizers: before a step, and after it."""
    return (
        torch_optimizer._global_optimizer_pre_hooks,
        torch_optimizer._global_optimizer_post_hooks,
    )
