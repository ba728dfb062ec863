"""The ways of calls while they are tuned (`ElasticMBS.plan(autotune=True)`)."""

from __future__ import annotations

from elastic_mbs.batch.view import BatchView
from elastic_mbs.engine.outcome.timing import Stopwatch
from elastic_mbs.engine.shared.knowledge import Knowledge, LossProfile
from elastic_mbs.engine.shared.resources import Resources
from elastic_mbs.escalation.autotune import Autotune, Candidate
from elastic_mbs.events import Escalated


def use_next(knowledge: Knowledge, profile: LossProfile, tuning: Autotune) -> None:
    """Put the way of the next turn in use."""
    assert tuning.candidate is not None  # the last turn has ended the tuning
    _use(knowledge, profile, tuning, tuning.candidate)


def note_call(
    resources: Resources,
    knowledge: Knowledge,
    profile: LossProfile,
    view: BatchView,
    watch: Stopwatch,
    *,
    failed: bool,
) -> None:
    """Note the time of a call that has ended, and put the fastest way in use after the last turn.

    Args:
        resources: the log.
        knowledge: the sizes.
        profile: of the loss function that is tuned.
        view: the batch of the call.
        watch: its time. Where a device runs behind the host, it is waited for.
        failed: the call has run out of memory.
    """
    tuning = profile.tuning
    assert tuning is not None
    watch.done(wait=True)
    tuning.note(None if failed else watch.seconds(), view.worth * view.elements)
    if tuning.candidate is not None:
        return
    profile.end_tuning()
    fastest = tuning.fastest
    if fastest is None:
        return
    _use(knowledge, profile, tuning, fastest)
    if fastest.step is not None:
        name, key, step = resources.settings.name, str(tuning.key), fastest.step
        resources.log.emit(
            Escalated(name, 0, view.length, step.rung, key, step.part, None, tuning.why)
        )


def _use(
    knowledge: Knowledge, profile: LossProfile, tuning: Autotune, candidate: Candidate
) -> None:
    profile.ladder.use(candidate.step, candidate.until)
    knowledge.controller.needs_other(tuning.key)
    knowledge.controller.planned(
        tuning.key, tuning.samples, tuning.elements, candidate.memory, candidate.size
    )
