"""The turns of calls in the ways that `ElasticMBS.plan(autotune=True)` has found to fit.

The steps of `escalate` that are in use otherwise stay as they are.
"""

from __future__ import annotations

from typing import NamedTuple

from elastic_mbs.batch.view import BatchView
from elastic_mbs.engine.outcome.timing import Stopwatch, known
from elastic_mbs.engine.shared.knowledge import Knowledge, LossProfile
from elastic_mbs.engine.shared.resources import Resources
from elastic_mbs.escalation.autotune import Autotune, Candidate
from elastic_mbs.escalation.ladder import Step
from elastic_mbs.events import Deescalated, Escalated


class Turn(NamedTuple):
    """A call in one of the ways that take turns.

    Attributes:
        tuning: the ways.
        way: that of the call.
    """

    tuning: Autotune
    way: Candidate

    @property
    def steps(self) -> tuple[Step, ...]:
        """The steps of `escalate` that the call is made with."""
        return () if self.way.step is None else (self.way.step,)


def begin_turn(knowledge: Knowledge, tuning: Autotune) -> Turn:
    """Return the turn of the next call, which has the size of its way."""
    assert tuning.candidate is not None  # the last turn has ended the tuning
    _plan(knowledge, tuning, tuning.candidate)
    return Turn(tuning, tuning.candidate)


def end_turn(
    resources: Resources,
    knowledge: Knowledge,
    profile: LossProfile,
    turn: Turn,
    view: BatchView,
    watch: Stopwatch,
    *,
    failed: bool,
) -> None:
    """Note the time of a call, and put the fastest way in use after the last turn.

    It can be repeated for a call that has failed.

    Args:
        resources: the log.
        knowledge: the sizes.
        profile: of the loss function.
        turn: that of the call.
        view: the batch of the call.
        watch: its time. Where a device runs behind the host, it is waited for.
        failed: the call has run out of memory.
    """
    tuning = turn.tuning
    if tuning.candidate != turn.way:
        return
    if failed:
        tuning.leave_out()
    else:
        watch.done(wait=True)
        for (key, outcome), seconds in known(knowledge.timed, wait=True):
            knowledge.controller.timed(key, outcome._replace(seconds=seconds))
        tuning.note(watch.seconds(), view.worth * view.elements)
    if tuning.candidate is not None:
        return
    knowledge.end_tuning(tuning.key)
    if tuning.fastest is not None:
        _keep(resources, knowledge, profile, tuning, tuning.fastest)


def _keep(
    resources: Resources,
    knowledge: Knowledge,
    profile: LossProfile,
    tuning: Autotune,
    fastest: Candidate,
) -> None:
    """Put the fastest way in the place of the steps in use; where it is none, they stay."""
    before, step = profile.ladder.steps, fastest.step
    name, key = resources.settings.name, str(tuning.key)
    if step is None:
        if not before:
            _plan(knowledge, tuning, fastest)
        return
    profile.ladder.use(step, fastest.until)
    knowledge.controller.needs_other(tuning.key)
    _plan(knowledge, tuning, fastest)
    for each in before:
        if each != step:
            resources.log.emit(Deescalated(name, each.rung, key, each.part))
    if step not in before:
        samples, why = tuning.samples, tuning.why
        resources.log.emit(Escalated(name, 0, samples, step.rung, key, step.part, None, why))


def _plan(knowledge: Knowledge, tuning: Autotune, candidate: Candidate) -> None:
    samples, elements = tuning.samples, tuning.elements
    memory, size = candidate.memory, candidate.size
    knowledge.controller.needs_other(tuning.key, alone=True)
    knowledge.controller.planned(tuning.key, samples, elements, memory, size)
