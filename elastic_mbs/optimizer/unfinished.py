"""Optimizer steps made without the guard: if one runs out of memory, what it has left is said.

Such a step is half made more often than not: moments have moved and parameters have not, or states are there for some parameters and not for others.
Calling `step()` again then trains a different model without a word (shared/reference/autograd.md, "optimizer.step()").
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from elastic_mbs.optimizer.known import takes_lists
from elastic_mbs.optimizer.snapshot import tensors_in_state


@dataclass(frozen=True)
class _Begun:
    """A step that has begun and not ended.

    Attributes:
        optimizer: held weakly.
        states: parameters that had a state.
        versions: of the first parameter of each group and of its state. Every implementation changes those first, so they tell for all.
    """

    optimizer: weakref.ref[Optimizer]
    states: int
    versions: tuple[int, ...]


class StepWatch:
    """Follows the steps of every optimizer of the process while it is on."""

    def __init__(self) -> None:
        self._begun: _Begun | None = None
        self._handles: list[RemovableHandle] = []

    def start(self) -> None:
        """Starts watching."""
        if not self._handles:
            self._handles = [register_optimizer_step_pre_hook(self._before), register_optimizer_step_post_hook(self._after)]

    def stop(self) -> None:
        """Stops watching."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._begun = None

    @property
    def unfinished(self) -> bool:
        """Whether a step has begun and not ended."""
        return self._begun is not None

    def forget(self) -> None:
        """Forgets a step that somebody else answers for."""
        self._begun = None

    def left_behind(self) -> str | None:
        """What a step that has not ended has left, and what to do, in words; None if all have. Said once."""
        begun, self._begun = self._begun, None
        optimizer = begun.optimizer() if begun is not None else None
        if begun is None or optimizer is None:
            return None
        name = f"{type(optimizer).__name__}.step()"
        guard = "mbs.optimizer_step(optimizer) takes such a step back and makes it again"
        if any(group.get("fused") is True or takes_lists(group) for group in optimizer.param_groups):
            # fused kernels move no version, nor do operations on lists under a dispatch mode such as a MemoryBudget
            return f"{name} did not end. It works on all parameters at once, so what it has changed cannot be told: load the last checkpoint. {guard}"
        if _versions(optimizer, begun.states) != begun.versions:
            return (
                f"{name} did not end, and has changed parameters or their state already: called again it would change them twice. "
                f"Load the last checkpoint. {guard}"
            )
        made = len(optimizer.state) - begun.states
        if made:
            return (
                f"{name} did not end. It has changed no value, but has created the state of {made} parameters, perhaps in part: "
                f"remove that from optimizer.state before you call it again. {guard}"
            )
        return f"{name} did not end, and has changed nothing: it may be called again when there is memory. {guard}"

    def _before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if len(args) > 1 or kwargs:  # a closure, which runs forward and backward, and this very code, inside the step
            self._begun = None
            return
        states = len(optimizer.state)
        self._begun = _Begun(weakref.ref(optimizer), states, _versions(optimizer, states))

    def _after(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._begun = None


def _versions(optimizer: Optimizer, states: int) -> tuple[int, ...]:
    return tuple([tensor._version for tensor in _firsts(optimizer, states)])


def _firsts(optimizer: Optimizer, states: int) -> Iterator[Tensor]:
    """The first parameter of each group, and its state where there was one before the step."""
    for group in optimizer.param_groups:
        parameter = next((parameter for parameter in group["params"] if parameter.grad is not None), None)
        if parameter is not None:
            yield parameter
            if states:
                yield from tensors_in_state(optimizer.state.get(parameter))
