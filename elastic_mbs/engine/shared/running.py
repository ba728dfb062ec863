"""The calls that run now, and a refusal of everything that must not run inside them.

A step of an optimizer or of its learning rate, another call and the capture of a CUDA graph must
not run inside a call.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from elastic_mbs.device import Accelerator
from elastic_mbs.errors import NestedCallError, StepInsideError, UnsupportedError, UsageError

_thread = threading.local()
# The calls of all threads: a backward on a GPU has a thread of its own, and an optimizer could step
# there.
_running: list[Any] = []
# The optimizers that have stepped since the first call of the process, by their ids.
_stepped: weakref.WeakValueDictionary[int, torch.optim.Optimizer] = weakref.WeakValueDictionary()


def running_call() -> Any:
    """Return the call that this thread is inside of, or None."""
    call = getattr(_thread, "call", None)
    return None if call is None or call.finished else call


def enter_call(call: Any) -> None:
    """Mark this thread as inside `call`, unless it is inside another one.

    From now on every step of an optimizer, and of a scheduler of its learning rate, is checked.
    """
    if running_call() is None:
        _thread.call = call
    _running.append(call)
    _hook_steps()
    _hook_schedulers()


def leave_call(call: Any) -> None:
    """End what `enter_call` began; do nothing for a call that has left."""
    if getattr(_thread, "call", None) is call:
        _thread.call = None
    if call in _running:
        _running.remove(call)


def check_outer(resources: object, *, training: bool) -> None:
    """End a loop that was left early, and refuse a call inside a step that could not be undone.

    Args:
        resources: the resources of the call that is about to begin.
        training: it makes gradients.

    Raises:
        IncompleteBatchError: a loop was left early.
        NestedCallError: another call is inside its step function.
    """
    outer = running_call()
    if outer is not None and not outer.inside:
        outer.leave_early()
    if outer is not None and (training or outer.resources is resources):
        raise NestedCallError(
            "a call was started inside the step function of another one, or in a function of "
            "on_event while it runs, and could not be undone when that one is replayed: take it "
            "out of there (an evaluation by another runtime may stay)"
        )


# ---------------------------------------------------------------------- steps of optimizers


class StepObserver(Protocol):
    """Follower of the steps of every optimizer of the process."""

    def step_begins(self, optimizer: torch.optim.Optimizer, *, closure: bool) -> None:
        """Take note of a step that begins; one with a closure runs forward and backward inside."""
        ...

    def step_ends(self) -> None:
        """Take note that the step has ended."""
        ...


_observers: list[StepObserver] = []


def observe_steps(observer: StepObserver) -> None:
    """Tell `observer` of every step of an optimizer from now on."""
    if observer not in _observers:
        _observers.append(observer)
    _hook_steps()


def ignore_steps(observer: StepObserver) -> None:
    """End what `observe_steps` began; do nothing for an observer that is not there."""
    if observer in _observers:
        _observers.remove(observer)


@functools.cache
def _hook_steps() -> None:
    """Check every step of an optimizer before it begins, and tell the observers of it.

    One pair of hooks for the process, which stays: to put it on and off for each call would cost
    more than all its runs.
    """
    register_optimizer_step_pre_hook(_before_step)
    register_optimizer_step_post_hook(_after_step)


def optimizers() -> list[torch.optim.Optimizer]:
    """Return the optimizers that have stepped since the first call of the process."""
    # a list of references: to loop over a weak collection takes ten times as long
    return [each for reference in _stepped.valuerefs() if (each := reference()) is not None]


def _before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    _check_step(optimizer, type(optimizer).__name__)
    if id(optimizer) not in _stepped:
        _stepped[id(optimizer)] = optimizer
    for observer in tuple(_observers):  # after the checks: a step that is refused has not begun
        observer.step_begins(optimizer, closure=len(args) > 1 or bool(kwargs))


def is_ours(hook: object) -> bool:
    """Return whether a hook is the one that this module has before every step.

    It changes no value.
    """
    return hook is _before_step


def _after_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    for observer in tuple(_observers):
        observer.step_ends()


@functools.cache
def _hook_schedulers() -> None:
    """Check every step of torch's learning rate schedulers before it begins.

    They have no hooks, so `step` is wrapped in each class that has one of its own, and in each that
    is defined later.
    """
    kinds = [LRScheduler]
    for kind in kinds:  # it grows: the classes of classes
        kinds += kind.__subclasses__()
        _check_steps_of(kind)
    LRScheduler.__init_subclass__ = classmethod(_is_defined)  # type: ignore[assignment]


def _is_defined(kind: type[LRScheduler], /, **kwargs: Any) -> None:
    super(LRScheduler, kind).__init_subclass__(**kwargs)
    _check_steps_of(kind)


def _check_steps_of(kind: type[LRScheduler]) -> None:
    if "step" in vars(kind):
        kind.step = _checked(kind.step)  # type: ignore[method-assign]


def _checked(step: Callable[..., Any]) -> Any:
    """Return the `step` of a class of schedulers with a check before it."""

    @functools.wraps(step)
    def checked(self: Any, *args: Any, **kwargs: Any) -> Any:
        optimizer = getattr(self, "optimizer", None)
        # the first one, by which a scheduler is made, only sets the rate
        initial = getattr(self, "_is_initial", False)
        if _running and not initial and isinstance(optimizer, torch.optim.Optimizer):
            _check_step(optimizer, type(self).__name__)
        return step(self, *args, **kwargs)

    return checked


def _check_step(optimizer: torch.optim.Optimizer, name: str) -> None:
    """Ask every call that runs whether the optimizer, or its learning rate, may step now."""
    for call in tuple(_running):
        if call.finished:  # an interrupt has struck between its end and its leaving
            leave_call(call)
        else:
            check_step(call, optimizer, name)


def check_step(call: Any, optimizer: torch.optim.Optimizer, name: str) -> None:
    """Refuse a step over the leaves of a call's batch while it is incomplete.

    Args:
        call: the call.
        optimizer: the optimizer that steps, or whose learning rate does.
        name: the class that steps, for the error.

    Raises:
        StepInsideError: the step ran inside the step function.
        IncompleteBatchError: a loop was left early.
    """
    if not call.resources.trains(optimizer):
        return  # an optimizer of the step's own, over tensors that it makes itself
    if call.inside:
        raise StepInsideError(
            f"{name}.step() ran inside the step function, which runs once for each piece: "
            "step once, after the batch"
        )
    call.leave_early(f"{name}.step() ran before the whole batch was accumulated")


# ---------------------------------------------------------------------- misuse


def check_function(fn: object, usage: str) -> None:
    """Refuse a loss, a batch or another value in the place of the function."""
    if not callable(fn):
        raise UsageError(
            f"mbs.{usage}: the function comes first and is called on pieces of the batch; got a "
            f"{type(fn).__name__} in its place"
        )


def check_capture(accelerator: Accelerator) -> None:
    """Refuse to run while a graph of the device is being captured."""
    if accelerator.is_capturing():  # cuda-only
        raise UnsupportedError(
            "a CUDA graph is being captured: an out-of-memory error could not be recovered from "
            "inside it. Run the step outside the capture"
        )
