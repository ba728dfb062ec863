"""The facts of a failed attempt, taken while its exception is alive.

They are strings and numbers, so nothing of the attempt is kept alive. Recovery itself runs later,
when the exception and its traceback are gone.
"""

from __future__ import annotations

from dataclasses import replace

from elastic_mbs.engine.attempt import Attempt, Failure, Phase
from elastic_mbs.engine.parts import CallParts
from elastic_mbs.escalation.largest import SHOWN, Share, largest_share
from elastic_mbs.memory import oom


def failure_of(
    parts: CallParts, attempt: Attempt, phase: Phase, error: Exception, *, training: bool
) -> Failure | None:
    """Return the facts of a failed attempt and drop its graph.

    Args:
        parts: the parts of the call.
        attempt: the attempt.
        phase: the phase in which it failed.
        error: the exception.
        training: the pass runs backward.

    Returns:
        None where `error` is not out-of-memory. Nothing was changed then.
    """
    verdict = _classify(parts, attempt, error)
    if verdict is None:
        return None
    try:
        left = parts.gradients.left_by(
            attempt,
            after_forward=phase.after_forward,
            first=parts.progress.untouched,
            training=training,
        )
    except BaseException:  # a refusal, whose context is `error`
        oom.clear_traceback(error)
        raise
    origin, alive = parts.hooks.origin_of(error), parts.hooks.largest()
    asked = Share(origin.module, verdict.requested or 0)
    failure = Failure(
        piece=attempt.piece,
        phase=phase,
        verdict=verdict,
        commits=left.commits,
        unknown=left.unknown,
        unwatched=left.unwatched,
        edited=parts.edits.by_a_failed_piece(attempt.data),
        origin=origin,
        largest=tuple(alive[:SHOWN]),
        share=largest_share(alive, asked) if alive else None,
    )
    parts.hooks.drop_graph(attempt.terms)
    attempt.drop()
    oom.clear_traceback(error)
    return failure


def _classify(parts: CallParts, attempt: Attempt, error: Exception) -> oom.Verdict | None:
    """Return the verdict on an error, or None where it is not out-of-memory.

    An error whose text may or may not mean out-of-memory is tried once in a call, with half the
    size.
    """
    resources, schedule = parts.resources, parts.progress.schedule
    verdict = oom.classify(error, resources.settings.recovery.is_oom)
    if verdict is None or verdict.kind is not oom.Kind.MASKED:
        return verdict
    if resources.guard is not None and resources.guard.explains(verdict.message):
        return replace(verdict, kind=oom.Kind.HOST)
    half = max(1, schedule.worth(attempt.piece) // 2)
    if not schedule.can_split(attempt.piece, half) or not parts.progress.try_masked():
        return None
    resources.warn(
        f"masked:{verdict.message}",
        "this error is often a hidden out-of-memory; trying once with half the micro-batch: "
        f"{verdict.message}",
    )
    return verdict
