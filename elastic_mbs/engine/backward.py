"""Backward and commit of what is new, special, or has failed in this call: all that the steady path leaves out."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch

from elastic_mbs.engine.learning import learn, meet_inner_leaves, take_census
from elastic_mbs.engine.micro_batch import MicroBatch
from elastic_mbs.engine.misuse import check_gradients_stayed
from elastic_mbs.engine.recovery import retrying, separate_gradients
from elastic_mbs.rollback.graph import has_foreign_hook, has_foreign_hook_after
from elastic_mbs.rollback.inner_backward import inner_backwards
from elastic_mbs.rollback.isolation import Isolation

if TYPE_CHECKING:
    from elastic_mbs.engine.call import Call


def backward_with_care(call: Call, micro: MicroBatch, loss: torch.Tensor) -> None:
    """Backward of a weighted loss, after a census of what it reaches."""
    if loss.grad_fn is not None:  # the terms with a graph may have no counts in this piece
        take_census(call, micro)
        _set_gradients_aside(call)
        micro._phase = "backward"
        _run_backward(call, micro, loss)


def _set_gradients_aside(call: Call) -> None:
    """Isolates, where a failure inside backward could not be undone otherwise. Decided before anything has committed."""
    settings, traits = call.parts.settings, call.traits
    unsure = bool(call.filled) and (traits.mixes or not traits.clean)
    if call.isolation is None and (
        unsure or traits.hidden or settings.recovery.replay == "isolate" or settings.gradients.accumulate_dtype is not None
    ):
        call.isolation = Isolation(settings.gradients.accumulate_dtype)
    if call.isolation is not None:
        call.isolation.set_aside(call.parts.commits.leaves())


def _run_backward(call: Call, micro: MicroBatch, loss: torch.Tensor) -> None:
    settings, traits = call.parts.settings, call.traits
    call.history.touched = call.history.touched or call.isolation is None
    if settings.scaler is not None:
        loss = settings.scaler.scale(loss)
    if traits.custom or micro._custom:
        root = micro._root
        assert root is not None
        with inner_backwards(root, partial(meet_inner_leaves, call)):
            _backward_of(call, micro, loss)
    else:
        _backward_of(call, micro, loss)


def _backward_of(call: Call, micro: MicroBatch, loss: torch.Tensor) -> None:
    settings = call.parts.settings
    if micro._piece.committed:
        missing = [leaf for leaf in micro._leaves or () if not call.history.is_marked(leaf, micro._piece.committed)]
        if missing:
            torch.autograd.backward(loss, inputs=missing)
    elif settings.gradients.backward is not None:
        settings.gradients.backward(loss)
    else:
        loss.backward()


def commit_with_care(call: Call, micro: MicroBatch) -> None:
    """Learns from a clean backward what is not known yet, and adds up what was set aside for it."""
    parts, traits, commits = call.parts, call.traits, call.parts.commits
    moved = call.gradients.moved()
    if commits.listening:
        told, committed = True, [leaf for leaf in commits.fired if leaf.grad is not None]
        if len(committed) < len(commits.fired):
            _look_for_cleared(call, micro, moved)
        if call.isolation is None and traits.counted is not False:
            traits.counted = sorted(map(id, moved)) == sorted(map(id, committed)) and not any(map(has_foreign_hook_after, committed))
    else:
        told, committed = _gradients_tell(call), moved
        commits.listen()  # from now on
    if told and len(committed) not in traits.commits and micro._root is not None and not micro._piece.committed:
        learn(call, micro, committed)
        call.steady = call.steady and call.is_steady()
    commits.clear()
    separate_gradients(call)
    if call.isolation is not None:
        retrying(parts, "add a piece's gradient to the batch's", call.isolation.fold)
        call.history.touched = True
    call.remember_gradients()


def _look_for_cleared(call: Call, micro: MicroBatch, moved: list[torch.Tensor]) -> None:
    """Refuses leaves that came to a commit and have no gradient, unless it was never there: a custom function may return None for an input.

    Raises:
        OptimizerInBackwardError: a hook of the user's has cleared one.
    """
    had = set() if call.isolation is not None else {id(leaf) for leaf in moved}
    may_be_none = bool(call.traits.custom or micro._custom)
    suspects = [leaf for leaf in call.parts.commits.fired if not may_be_none or id(leaf) in had or has_foreign_hook(leaf)]
    check_gradients_stayed(suspects, call.parts.inventory.name_of)


def _gradients_tell(call: Call) -> bool:
    """Whether an unusual number of commits, told by the gradients alone, can be believed.

    Raises:
        OptimizerInBackwardError: a hook of the user's has cleared a gradient.
    """
    hooked = [leaf for leaf in call.parts.commits.leaves() if leaf._post_accumulate_grad_hooks]
    check_gradients_stayed(hooked, call.parts.inventory.name_of)
    if call.gradients.share_memory():
        call.traits.counted = False
    return call.traits.counted is True
