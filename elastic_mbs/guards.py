"""Mistakes that a replay could not undo, noticed while a piece runs and named.

`optimizer.step()` and `backward()` inside the step function, `zero_grad()` in the middle of a batch, a call inside a call, a loop left early.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from elastic_mbs.errors import GradientsChangedError, OptimizerInBackwardError

_thread = threading.local()


def running_call() -> Any:
    """The call that this thread is inside of, or None."""
    call = getattr(_thread, "call", None)
    return None if call is None or call.finished else call


def enter_call(call: object) -> None:
    """Marks this thread as inside `call`."""
    _thread.call = call


def leave_call(call: object) -> None:
    """Ends what `enter_call` began; does nothing for another call."""
    if getattr(_thread, "call", None) is call:
        _thread.call = None


class StepGuard:
    """Calls `refuse` when any optimizer steps while the guard is up, on any thread: a backward on a GPU has its own."""

    def __init__(self, refuse: Callable[[torch.optim.Optimizer], None]) -> None:
        self._refuse: Callable[[torch.optim.Optimizer], None] | None = refuse
        self._handle: RemovableHandle | None = None

    def up(self) -> None:
        """Starts watching."""
        if self._handle is None:
            self._handle = register_optimizer_step_pre_hook(self._on_step)

    def down(self) -> None:
        """Stops watching."""
        if self._handle is not None:
            self._handle.remove()
            self._handle = None
            self._refuse = None  # it is the call's own method: a cycle that would keep the batch until a garbage collection

    def _on_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if self._refuse is not None:
            self._refuse(optimizer)


class GradientSentinels:
    """A few leaves whose `.grad` is looked at between pieces: whoever clears or edits gradients there is noticed.

    At most 16 leaves, spread over the model: the whole of it would cost a hundred microseconds a piece, and `zero_grad()` reaches all of them.
    """

    def __init__(self) -> None:
        self._seen: list[tuple[torch.Tensor, torch.Tensor, int]] = []

    def remember(self, leaves: Sequence[torch.Tensor]) -> None:
        """Notes the gradients as they are after a piece has committed."""
        step = max(1, -(-len(leaves) // 16))
        self._seen = [(leaf, grad, grad._version) for leaf in leaves[::step] if (grad := leaf.grad) is not None]

    def forget(self) -> None:
        """Forgets them: gradients may be changed freely until the next commit."""
        self._seen = []

    def check(self) -> None:
        """Compares with what was remembered.

        Raises:
            GradientsChangedError: a gradient was cleared, replaced or edited since.
        """
        for leaf, grad, version in self._seen:
            if leaf.grad is not grad or grad._version != version:
                raise GradientsChangedError(
                    f"the gradient of a leaf of shape {tuple(leaf.shape)} was {'cleared' if leaf.grad is None else 'changed'} in the middle of a "
                    "batch: call zero_grad(), clip or edit gradients after the whole batch, next to optimizer.step()"
                )


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
