"""A rehearsal of a step: `verify` or `plan`, beside the training loop and without a trace."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch.optim import Optimizer

from elastic_mbs.batch.counts import Counts
from elastic_mbs.batch.reader import BatchReader
from elastic_mbs.batch.view import BatchView
from elastic_mbs.controller.messages import Key, shape_class
from elastic_mbs.engine.parts import look_around
from elastic_mbs.engine.shared.knowledge import Knowledge, LossProfile, names_of
from elastic_mbs.engine.shared.peers import quiet
from elastic_mbs.engine.shared.resources import Resources
from elastic_mbs.engine.shared.running import running_call
from elastic_mbs.errors import NestedCallError, UnsupportedError, UsageError
from elastic_mbs.escalation.autotune import Autotune, Candidate
from elastic_mbs.escalation.ladder import Ladder, Step
from elastic_mbs.events import Escalated
from elastic_mbs.memory.sensor import parse_bytes
from elastic_mbs.planning.plan import Budget, plan
from elastic_mbs.planning.report import PlannedWay, PlanReport
from elastic_mbs.rehearsal.samples import Signs
from elastic_mbs.rehearsal.verify import VerifyReport, verify


class Rehearsal:
    """The rehearsals of one runtime.

    Attributes:
        total: the counts of the batch that is rehearsed; None between rehearsals.
    """

    def __init__(self, resources: Resources, knowledge: Knowledge, batches: BatchReader) -> None:
        self.total: Any = None
        self._resources = resources
        self._knowledge = knowledge
        self._batches = batches

    def verify(self, loss_fn: Callable[[Any], Any], batch: Any, samples: int) -> VerifyReport:
        """Compare whole and split loss. See `ElasticMBS.verify`."""

        def read() -> tuple[BatchView, Counts]:
            view, counts = self._batches.plain(batch)
            signs = Signs(view, counts, self._resources.settings.limits)
            return self._batches.some(view, *signs.telling(samples))

        name, identity = names_of(loss_fn)
        with self._read("verify", read) as (few, counts):
            model = self._resources.model
            profile = self._knowledge.profile_of((name, identity), model.generation)
            look_around(self._resources, [loss_fn], first=not profile.seen)
            return verify(self._resources, few, counts, loss_fn)

    def plan(
        self,
        loss_fn: Callable[[Any], Any],
        batch: Any,
        optimizer: Optimizer | None,
        budget: int | str | None,
        *,
        compare: bool,
        autotune: bool,
        apply: bool,
    ) -> PlanReport:
        """Predict the memory of a step. See `ElasticMBS.plan`."""
        if autotune:
            self._refuse_tuning(apply=apply)
        capacity = None if budget is None else parse_bytes(budget)
        name, identity = names_of(loss_fn)
        read = partial(self._batches.read, batch, name, ((), {}), training=True)
        compare = compare or autotune
        with self._read("plan", read) as (view, counts), quiet(self._resources.peers):
            key = Key(name, "train", shape_class(view.elements))
            model = self._resources.model
            profile = self._knowledge.profile_of((name, identity), model.generation)
            # A measured time is one with the steps that are in use.
            time = None if profile.ladder.steps else self._knowledge.controller.time(key)
            there = Budget(capacity, time)
            report = plan(self._resources, view, counts, loss_fn, optimizer, there, compare=compare)
        if autotune and report.model is not None and report.capacity is None:
            raise UsageError(
                "autotune=True tries the ways that fit, and the free memory of "
                f'{self._resources.devices[0]} is not known: add budget=, for example "16GiB"'
            )
        if apply:
            self._apply(report, key, view, profile, autotune=autotune)
        return report

    def _refuse_tuning(self, *, apply: bool) -> None:
        """Refuse turns of calls that could change nothing."""
        if not apply:
            raise UsageError(
                "autotune=True changes the next calls, and apply=False changes nothing: leave one "
                "of them out"
            )
        if not self._resources.rungs():
            raise UsageError(
                "autotune=True tries the ways of RecoveryOptions.escalate, and there is none: make "
                'the runtime with recovery=RecoveryOptions(escalate="auto")'
            )

    def _apply(
        self, report: PlanReport, key: Key, view: BatchView, profile: LossProfile, *, autotune: bool
    ) -> None:
        """Have the next calls use a plan: its size, its way, and its figures of all ways."""
        self._knowledge.end_tuning(key)
        memory, size, ladder = report.model, report.largest, profile.ladder
        if memory is None or size is None:
            return
        if report.ways:
            ladder.plan(_needs(report), view.elements)
        candidates = self._candidates(report) if autotune else []
        if any(each.step is not None for each in candidates):
            tuning = Autotune(key, view.worth, view.elements, candidates)
            self._knowledge.begin_tuning(tuning)
            return
        way = self._way(report, key, ladder)
        if way is not None and way.model is not None:
            memory, size = way.model, way.largest
        self._knowledge.controller.planned(key, view.worth, view.elements, memory, size)

    def _candidates(self, report: PlanReport) -> list[Candidate]:
        """Return the ways that fit, of which each takes its turns."""
        none, most = report.ways[0], report.sizes[0]
        margin, capacity = self._resources.settings.policy.margin, self._resources.capacity()
        until = None
        if none.largest < most.size and most.peak is not None:
            enough = round(most.peak / (1 - margin))
            until = enough if capacity is None or enough > capacity.bytes else None
        rungs = self._resources.rungs()
        return [
            Candidate(way.step, way.model, way.largest, None if way.step is None else until)
            for way in report.ways
            if way.largest
            and way.model is not None
            and (way.step is None or way.step.rung in rungs)
        ]

    def _way(self, report: PlanReport, key: Key, ladder: Ladder) -> PlannedWay | None:
        """Return the way in use from now on; None where it is none, or was not planned.

        The fastest one is put in use where `escalate` has it, and no other step is.
        """
        if ladder.steps:
            return next((way for way in report.ways if (way.step,) == ladder.steps), None)
        way = report.chosen
        if way is None or way.step is None or way.step.rung not in self._resources.rungs():
            return None
        ladder.climb(way.step, way.until)
        self._knowledge.controller.needs_other(key)
        name = self._resources.settings.name
        step, samples = way.step, report.samples
        self._resources.log.emit(
            Escalated(name, 0, samples, step.rung, str(key), step.part, None, report.why)
        )
        return way

    @contextmanager
    def _read(
        self, door: str, read: Callable[[], tuple[BatchView, Counts]]
    ) -> Iterator[tuple[BatchView, Counts]]:
        """Yield the batch of a rehearsal; refuse one inside a step function."""
        if running_call() is not None:
            raise NestedCallError(
                f"{door}() was called inside a step function; call it beside the training loop"
            )
        if self._resources.peers.in_step:
            raise UnsupportedError(
                f"{door}() runs on one rank, and in lock-step mode every layer is gathered from "
                "all of them: use DistributedOptions(mode='local'), or one process"
            )
        with self._resources.peers.beside():
            self._resources.refresh_model()
            self._resources.follow_model()
            self._resources.model.refuse_private()
            found = self._resources.retry("look at the batch", read)
            self.total = found[1].total
            try:
                yield found
            finally:
                self.total = None


def _needs(report: PlanReport) -> dict[Step, int]:
    """Return the bytes that the smallest piece needs in each way, the fastest first."""
    known = sorted(report.ways, key=lambda way: math.inf if way.seconds is None else way.seconds)
    return {way.step: way.peak for way in known if way.step is not None and way.peak is not None}
