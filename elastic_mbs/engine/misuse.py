"""Mistakes that a replay could not undo, noticed while a piece runs and named.

`optimizer.step()` and `backward()` inside the step function, `zero_grad()` in the middle of a batch, a call inside a call, a loop left early.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from elastic_mbs.errors import OptimizerInBackwardError, UnsupportedError, UsageError

StepObserver = Callable[[torch.optim.Optimizer, Any, Any], None]

_thread = threading.local()
_running: list[Any] = []
"""Every call that is running, on any thread: a backward on a GPU has its own, and an optimizer could step there."""
_observers: list[StepObserver] = []
_watching: list[RemovableHandle] = []


class AttemptWatch(Protocol):
    """Told of every guarded attempt; for tests that make some of them fail (`elastic_mbs.testing`). Attempts nest."""

    def begin(self, owner: object, modules: Iterable[torch.nn.Module], *, ready: bool, protected: Callable[[], bool] | None = None) -> None:
        """An attempt begins.

        Args:
            owner: what it belongs to: a call, or a step of an optimizer.
            modules: what runs in it.
            ready: whether nothing has failed since something last succeeded, so that one more failure is not the last.
            protected: whether what runs now must not fail, because it is the user's and is not tried again; None for never.
        """
        ...

    def end(self) -> None:
        """The latest attempt has ended."""
        ...


attempt_watch: AttemptWatch | None = None
"""Who is told. Read through the module, because it comes and goes."""


def running_call() -> Any:
    """The call that this thread is inside of, or None."""
    call = getattr(_thread, "call", None)
    return None if call is None or call.finished else call


def enter_call(call: Any) -> None:
    """Marks this thread as inside `call`, unless it is inside another one already, and tells `call.check_step` of every optimizer that steps."""
    if running_call() is None:
        _thread.call = call
    _running.append(call)
    _watch_steps()


def observe_steps(observer: StepObserver) -> None:
    """Calls `observer(optimizer, args, kwargs)` before each step of any optimizer, until `leave_steps`."""
    _observers.append(observer)
    _watch_steps()


def leave_steps(observer: StepObserver) -> None:
    """Ends what `observe_steps` began."""
    _observers.remove(observer)


def _watch_steps() -> None:
    if not _watching:
        # One hook for all calls, which stays: putting it on and off again for each would cost more than all its runs.
        _watching.append(register_optimizer_step_pre_hook(_on_step))


def leave_call(call: Any) -> None:
    """Ends what `enter_call` began; does nothing for a call that has left."""
    if getattr(_thread, "call", None) is call:
        _thread.call = None
    for place, each in enumerate(_running):
        if each is call:
            del _running[place]
            return


def _on_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    for call in tuple(_running):
        if call.finished:  # an interrupt has struck between its end and its leaving
            leave_call(call)
        else:
            call.check_step(optimizer)
    for observer in tuple(_observers):
        observer(optimizer, args, kwargs)


def check_gradients_stayed(committed: Sequence[torch.Tensor], name_of: Callable[[torch.Tensor], str]) -> None:
    """Checks that leaves which committed still have their gradient.

    Raises:
        OptimizerInBackwardError: one has none: an optimizer stepped and cleared it inside backward.
    """
    for leaf in committed:
        if leaf.grad is None:
            raise OptimizerInBackwardError(
                f"{name_of(leaf)} lost its gradient during backward: an optimizer steps inside backward (a post-accumulate hook that steps and "
                "clears .grad). Each piece would then be a step of its own; take the hook off and step once after the batch"
            )


def check_function(fn: object, usage: str) -> None:
    """Refuses a loss, a batch or anything else in the place of the function.

    Raises:
        UsageError: it cannot be called.
    """
    if not callable(fn):
        raise UsageError(f"mbs.{usage}: the function comes first and is called on pieces of the batch; got a {type(fn).__name__} in its place")


def check_capture() -> None:
    """Refuses to run where a failure could not be recovered from.

    Raises:
        UnsupportedError: a CUDA graph is being captured.
    """
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():  # cuda-only
        raise UnsupportedError(
            "a CUDA graph is being captured: an out-of-memory error could not be recovered from inside it. Run the step outside the capture"
        )
