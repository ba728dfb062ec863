"""Backward and commit of one piece."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch._C import _are_functorch_transforms_active, _is_torch_function_mode_enabled
from torch.autograd import Variable, graph

from elastic_mbs.engine.misuse import check_gradients_stayed
from elastic_mbs.engine.state import Attempt, CallState, Phase
from elastic_mbs.errors import ReplayUnsafeError
from elastic_mbs.noise_scale import NoiseScale, estimate, squared_norm
from elastic_mbs.rollback.gradients import separate
from elastic_mbs.rollback.graph import Census, has_hook, inner_backwards, walk
from elastic_mbs.rollback.isolation import Isolation

_ENGINE = Variable._execution_engine
_FIRST, _LAST = (2, 8), (2, 13)
_version = tuple(map(int, torch.__version__.split(".")[:2]))
_PRIVATE_ENTRY = _FIRST <= _version <= _LAST
"""`torch.autograd.backward` checks each root for 23 µs a piece. In these versions of torch its engine can be entered after the checks, with the same
result; on a CPU, where backward runs on the caller's thread, without what is for other threads too. Source: torch/autograd/__init__.py, `backward`;
torch/autograd/graph.py, `_engine_run_backward`."""


def run_backward(state: CallState, attempt: Attempt, loss: torch.Tensor, weight: float) -> None:
    """Backward of `loss * weight`, after a census of what it reaches where that is not known."""
    if not loss.requires_grad:  # the terms with a graph can have no counts in this piece
        return
    if state.settled:
        state.phase, state.modified = Phase.BACKWARD, True  # gradients move from here on
        backward(loss, weight)
        return
    _take_census(state, attempt)
    state.phase = Phase.BACKWARD
    _isolate(state)
    state.modified = state.modified or state.isolation is None
    own, scaler = state.context.settings.gradients.backward, state.context.settings.scaler
    run: Callable[[torch.Tensor], object] = partial(backward, weight=weight)
    if own is not None or scaler is not None or attempt.piece.committed:
        loss, run = loss * weight, backward if own is None else own
    if scaler is not None:
        loss = scaler.scale(loss)
    if attempt.piece.committed:
        run = partial(_backward_of_the_rest, state, attempt)
    if state.profile.custom or attempt.custom:
        root = attempt.root
        assert root is not None
        with inner_backwards(root, partial(_add_inner_leaves, state)):
            run(loss)
    else:
        run(loss)


def _backward_of_the_rest(state: CallState, attempt: Attempt, loss: torch.Tensor) -> None:
    """To the leaves that have not committed yet."""
    missing = [
        leaf for leaf in attempt.leaves or () if not state.is_marked(leaf, attempt.piece.committed)
    ]
    if missing:
        torch.autograd.backward(loss, inputs=missing)


def backward(loss: torch.Tensor, weight: float = 1.0) -> None:
    """`torch.autograd.backward(loss * weight)`, to the same bits: the gradient begins with the weight, so that no operation has to multiply by it."""
    seed = torch.full_like(loss, weight)
    if (
        _PRIVATE_ENTRY
        and type(loss) is torch.Tensor
        and not (_is_torch_function_mode_enabled() or _are_functorch_transforms_active())
    ):
        enter = _ENGINE.run_backward if loss.is_cpu else graph._engine_run_backward
        enter((loss,), (seed,), False, False, (), allow_unreachable=True, accumulate_grad=True)
    else:
        torch.autograd.backward(loss, seed)


# ---------------------------------------------------------------------- before: the census


def _take_census(state: CallState, attempt: Attempt) -> None:
    """Once per loss function; once a call where it reaches leaves outside the model; always after a failure."""
    profile = state.profile
    if (
        profile.census_taken
        and (state.census_taken or not profile.extra_leaves)
        and not state.failures
    ):
        return
    census = _census(attempt)
    _add_leaves(state, census.leaves)
    profile.normalises_batch = (
        profile.normalises_batch
        or census.normalises_batch
        or state.context.model.normalises_batch()
    )
    profile.census_taken = state.census_taken = True


def _census(attempt: Attempt) -> Census:
    root = attempt.root
    assert root is not None
    census = walk(root)
    attempt.leaves, attempt.custom = census.leaves, census.custom
    return census


def _add_leaves(state: CallState, leaves: tuple[torch.Tensor, ...]) -> None:
    """Adds leaves outside the model to the ledger, before any of them has a commit of this backward."""
    extra = state.context.ledger.add_extra(leaves)
    full = [leaf for leaf in extra if leaf.grad is not None]
    if state.restarts and full:  # their gradients can be from the dropped attempts
        raise ReplayUnsafeError(
            f"a leaf of shape {tuple(full[0].shape)} outside the model appeared in the middle of "
            "the batch, so its gradient can hold samples that "
            "are now being replayed: call zero_grad() on it and run the batch again, or give its "
            "module in model=[...]"
        )
    state.had_gradient.update(map(id, full))
    state.profile.extra_leaves = state.profile.extra_leaves or bool(extra)


def _add_inner_leaves(state: CallState, leaves: tuple[torch.Tensor, ...]) -> None:
    """The same for leaves of a backward inside a backward, which the census cannot reach."""
    before = set(map(id, state.context.ledger.leaves()))
    _add_leaves(state, leaves)
    state.profile.hidden = True
    if state.isolation is not None:
        state.isolation.set_aside(leaf for leaf in leaves if id(leaf) not in before)


def _isolate(state: CallState) -> None:
    """Sets gradients aside where a failure inside backward could not be undone otherwise.

    Decided before anything has committed.
    """
    settings, profile, ledger = state.context.settings, state.profile, state.context.ledger
    unsure = state.indistinct or (
        bool(state.had_gradient) and (profile.mixes or not profile.commits)
    )
    if state.isolation is None and (unsure or profile.hidden or settings.isolates):
        state.isolation = Isolation(settings.gradients.accumulate_dtype)
    if state.isolation is not None:
        state.isolation.set_aside(ledger.leaves())
        ledger.note()


# ---------------------------------------------------------------------- after: the commit


def commit(state: CallState, attempt: Attempt) -> None:
    """Adds up the gradients of a clean backward, with a look at each leaf, and learns from one with a number of commits that is new."""
    context, profile, ledger = state.context, state.profile, state.context.ledger
    ledger.check_kept(attempt.seen)
    changed = ledger.changed()
    _check_cleared(state, attempt, changed)
    committed = [leaf for leaf in changed if leaf.grad is not None]
    if (
        len(committed) not in profile.commits
        and attempt.root is not None
        and not attempt.piece.committed
    ):
        _learn(state, attempt, committed)
        state.settled = state.settled and state.is_settled()
    separate_gradients(state)
    if state.isolation is not None:
        state.modified = True
        if context.noise is not None:
            attempt.squared_norm = context.retry(
                "take the norm of a piece's gradient", lambda: squared_norm(context.model.leaves)
            )
        context.retry("add a piece's gradient to the batch's", state.isolation.fold)
    ledger.note()


def measure_noise(state: CallState) -> NoiseScale | None:
    """The noise scale with what this call has shown, once its gradient is whole.

    A single piece says nothing of how samples differ, nor do gradients that were there before, nor
    pieces without a loss of their own.
    """
    context, noise = state.context, state.context.noise
    if noise is None or not state.training:
        return None
    scale = 1.0 if context.settings.scaler is None else context.settings.scaler.get_scale()

    def read(norms: Sequence[torch.Tensor]) -> float:
        return sum(map(float, norms)) / scale**2

    pieces = [(len(attempt.piece), read(attempt.squared_norm)) for attempt in state.committed]
    # what counts nothing adds nothing
    pieces += [(stop - start, 0.0) for start, stop in state.schedule.skipped]
    if (
        len(pieces) > 1
        and not state.had_gradient
        and all(attempt.loss is not None for attempt in state.committed)
    ):
        noise.add(*estimate(pieces, read(squared_norm(context.model.leaves))))
    return noise.latest


def separate_gradients(state: CallState) -> None:
    """Separates what this call has made.

    Gradients that were there when it began are the user's, and so is where they lie.
    """
    made = [leaf for leaf in state.context.ledger.leaves() if id(leaf) not in state.had_gradient]
    state.context.retry("give each gradient memory of its own", lambda: separate(made))


def _learn(state: CallState, attempt: Attempt, committed: list[torch.Tensor]) -> None:
    """Compares what a clean backward has committed to with the census: the first one, and each with a number of commits that is new."""
    context, profile = state.context, state.profile
    if attempt.leaves is None:
        _census(attempt)
    reached = set(map(id, attempt.leaves or ()))
    ids = [id(leaf) for leaf in committed]
    profile.custom |= attempt.custom
    profile.hidden = profile.hidden or len(set(ids)) < len(ids) or not reached.issuperset(ids)
    start = state.streams
    assert start is not None
    profile.draws = (
        context.retry("read the random streams", lambda: context.streams.learn(start))
        or profile.draws
    )
    profile.commits.add(len(ids))
    for leaf in committed:
        if has_hook(leaf):
            context.warn(
                "tensor-hook",
                f"{context.model.name_of(leaf)} has a hook on its gradient, which runs once per "
                "micro-batch: it must be linear (no clamp, no norm) "
                "for the gradient to be the whole batch's",
            )


def _check_cleared(state: CallState, attempt: Attempt, changed: list[torch.Tensor]) -> None:
    """Checks that leaves which committed still have their gradient.

    A custom function can return None for an input, which then never has one.
    """
    cleared = [
        leaf for leaf in state.context.ledger.leaves() if leaf.grad is None and has_hook(leaf)
    ]
    if cleared and attempt.root is not None and not attempt.piece.committed:
        reached = set(map(id, walk(attempt.root).leaves))
        cleared = [leaf for leaf in cleared if id(leaf) in reached]
    check_gradients_stayed([*changed, *cleared], state.context.model.name_of)
