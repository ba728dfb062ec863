"""What is noted of a failed attempt while its exception is alive: strings and numbers, so that nothing of the attempt is kept alive."""

from __future__ import annotations

from dataclasses import replace

import torch

from elastic_mbs.engine.state import Attempt, CallState, Failure, Phase
from elastic_mbs.memory import oom
from elastic_mbs.rollback.graph import drain, has_hook_after, walk


def note_failure(state: CallState, attempt: Attempt, error: Exception) -> bool:
    """Notes what can be known of a failed attempt and drops its graph; False where `error` is not out-of-memory, and nothing was changed."""
    verdict = _classify(state, attempt, error)
    if verdict is None:
        return False
    ledger, phase = state.context.ledger, state.phase
    if phase in (Phase.BACKWARD, Phase.COMMIT):
        ledger.check_kept(attempt.seen)
    elif state.training:
        state.check_gradients()
    committed, indistinct = list[torch.Tensor](), False
    if phase in (Phase.BACKWARD, Phase.COMMIT):
        drain(ledger.leaves())
        committed = ledger.changed()
        indistinct = ledger.share_memory() or any(map(has_hook_after, ledger.leaves()))
    unknown: tuple[str, ...] = ()
    normalises_batch = surprising = False
    if (root := attempt.root) is not None:
        census = walk(root)
        unknown = tuple(
            str(tuple(leaf.shape))
            for leaf in census.leaves
            if leaf.grad is not None and leaf not in ledger
        )
        normalises_batch = census.normalises_batch
        ids = set(map(id, committed))
        surprising = (
            len(ids) < len(committed)
            or not ids <= set(map(id, census.leaves))
            or not census.custom <= state.profile.custom
        )
    edited = state.view.versions() != state.batch_versions and not state.edited
    state.profile.edits_batch = state.profile.edits_batch or (
        edited and not state.view.whole_edited(state.batch_versions)
    )
    state.failure = Failure(
        piece=attempt.piece,
        phase=phase,
        verdict=verdict,
        committed=state.mark(committed),
        unknown=unknown,
        normalises_batch=normalises_batch,
        surprising=surprising,
        indistinct=indistinct,
        edited=edited,
        streams=attempt.streams,
    )
    _drop(state, attempt, error)
    state.attempt, state.phase = None, Phase.FAILED
    return True


def _classify(state: CallState, attempt: Attempt, error: Exception) -> oom.Verdict | None:
    context = state.context
    verdict = oom.classify(error, context.settings.recovery.is_oom)
    if verdict is None or verdict.kind is not oom.Kind.MASKED:
        return verdict
    if context.guard is not None and context.guard.explains(verdict.message):
        return replace(verdict, kind=oom.Kind.HOST)
    if state.tried_masked or not state.schedule.can_split(
        attempt.piece, max(1, state.schedule.worth(attempt.piece) // 2)
    ):
        return None
    state.tried_masked = True
    context.warn(
        f"masked:{verdict.message}",
        "this error is often a hidden out-of-memory; trying once with half the micro-batch: "
        f"{verdict.message}",
    )
    return verdict


def _drop(state: CallState, attempt: Attempt, error: Exception) -> None:
    """Drops the attempt's tensors, and the references of the exception's frames to them."""
    if state.table is not None:
        state.table.empty()
        for loss in attempt.terms:
            node = loss.grad_fn
            # an older graph is the user's
            if (
                node is not None
                and node._sequence_nr() >= attempt.first_node
                and not loss._is_view()
            ):
                # the caller still holds it, and through it whatever checkpointing was recomputing
                loss.detach_()
    attempt.drop()
    oom.clear_traceback(error)
