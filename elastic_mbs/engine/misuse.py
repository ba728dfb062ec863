"""Which calls run now, and what must not run inside them: another call, a step of an optimizer, the capture of a CUDA graph."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from elastic_mbs.device import Accelerator
from elastic_mbs.errors import OptimizerInBackwardError, UnsupportedError, UsageError

fault_injector: Any = None
"""The `elastic_mbs.testing.faults.RandomFaults` of a test: it hears of each attempt's begin and end, and makes some fail. Read through the module."""

_thread = threading.local()
# the calls of all threads: a backward on a GPU has a thread of its own, and an optimizer could step
# there
_running: list[Any] = []


def running_call() -> Any:
    """The call that this thread is inside of, or None."""
    call = getattr(_thread, "call", None)
    return None if call is None or call.finished else call


def enter_call(call: Any) -> None:
    """Marks this thread as inside `call`, unless it is inside another one; from now on `call.check_step` hears of every optimizer that steps."""
    if running_call() is None:
        _thread.call = call
    _running.append(call)
    hook_steps()


def leave_call(call: Any) -> None:
    """Ends what `enter_call` began; does nothing for a call that has left."""
    if getattr(_thread, "call", None) is call:
        _thread.call = None
    if call in _running:
        _running.remove(call)


# one hook for all calls, which stays: putting it on and off for each would cost more than all its
# runs
@functools.cache
def hook_steps() -> None:
    """Has every step of an optimizer checked before it begins."""
    register_optimizer_step_pre_hook(_on_step)


def _on_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    for call in tuple(_running):
        if call.finished:  # an interrupt has struck between its end and its leaving
            leave_call(call)
        else:
            call.check_step(optimizer)


def check_gradients_stayed(
    committed: Sequence[torch.Tensor], name_of: Callable[[torch.Tensor], str]
) -> None:
    """Refuses a backward in which a leaf that committed has lost its gradient."""
    for leaf in committed:
        if leaf.grad is None:
            raise OptimizerInBackwardError(
                f"{name_of(leaf)} lost its gradient during backward: an optimizer steps inside "
                "backward (a post-accumulate hook that steps and "
                "clears .grad). Each piece would then be a step of its own; take the hook off and "
                "step once after the batch"
            )


def check_function(fn: object, usage: str) -> None:
    """Refuses a loss, a batch or anything else in the place of the function."""
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
