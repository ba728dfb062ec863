"""The step hooks of the user and of others, run once for a step that is tried several times."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from functools import partial
from operator import is_not
from typing import Any

from torch.optim import Optimizer
from torch.optim import optimizer as torch_optimizer

from elastic_mbs.engine.shared.running import is_ours
from elastic_mbs.errors import MisuseError

_is_something = partial(is_not, None)


class _Queue:
    """Hooks that run in their order, each once.

    An error for lack of memory can strike between any two lines of ours. So a hook leaves the queue
    and its result is noted in one line: an error before or after it is none of the hook's.

    Attributes:
        results: the values that the hooks that have ended returned.
    """

    def __init__(self, hooks: Iterable[Callable[..., Any]]) -> None:
        self.results: list[Any] = []
        self._left = list(hooks)
        self._all = len(self._left)

    @property
    def running(self) -> bool:
        """True while a hook runs, and once one has failed."""
        return len(self._left) + len(self.results) < self._all

    def __bool__(self) -> bool:
        """Return whether any are left."""
        return bool(self._left)

    def run_next(self, *arguments: Any) -> None:
        """Run the next hook."""
        self.results.append(self._left.pop(0)(*arguments))


class DeferredHooks:
    """The user's step hooks, run once for the whole step however often it is tried.

    One may clip gradients, another average weights.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.ended = False  # the latest call of `step` has ended
        self._optimizer = optimizer
        self._before = optimizer._optimizer_step_pre_hooks
        self._after = optimizer._optimizer_step_post_hooks
        # Those registered for all optimizers run first before a step, and last after it.
        first = torch_optimizer._global_optimizer_pre_hooks.values()
        before = [*first, *self._before.values()]
        self._queue_before = _Queue(before)
        # hooks of others can change the values with which the step begins
        self._can_change = not all(map(is_ours, before))
        self._queue_after: _Queue | None = None  # None until the others have run

    @property
    def begun(self) -> bool:
        """True once the hooks before the step have run."""
        return self._queue_after is not None

    @property
    def running(self) -> bool:
        """True while a hook of the user's runs, and once one has failed."""
        after = self._queue_after
        return self._queue_before.running or (after is not None and after.running)

    def skip_before(self) -> None:
        """Leave out the hooks before the step: they have run, and it was taken back since."""
        self._queue_before = _Queue(())

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
        """Run the hooks before the step; return whether they can have changed values.

        After an out-of-memory error it can be called again and continues where it stopped.
        """
        self.put_back()  # a hook may take itself off, or add another one
        queue = self._queue_before
        while queue and not any(map(_is_something, queue.results)):
            queue.run_next(optimizer, args, kwargs)
        if any(map(_is_something, queue.results)):
            raise MisuseError(
                "a step hook that changes the arguments of step() does not go with "
                "optimizer_step(), which passes none"
            )
        last = torch_optimizer._global_optimizer_post_hooks.values()
        others = [each.hook if isinstance(each, _ForOthers) else each for each in last]
        self._queue_after = _Queue([*self._after.values(), *others])
        return self._can_change and bool(queue.results)

    def _end(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self.ended = True

    def run_after(self) -> None:
        """Run the hooks that follow a step; none of them if the scaler has skipped it."""
        while self._queue_after:
            self._queue_after.run_next(self._optimizer, (self._optimizer,), {})


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
